"""Keeps `report.html` in the folder of a run up to date: at checkpoints and at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel3d.errors import printable
from parallel3d.tools.report.command import report_tree
from parallel3d.tools.report.html import report_page
from parallel3d.tools.report.page import write_page
from parallel3d.tools.report.text import short_lines
from parallel3d.training.callbacks import Callback, RunView

_PAUSE = 20.0  # Time between two reports, relative to the time that one takes.


class ReportWriter(Callback):
    """Writes the report when a checkpoint is complete, in at most 5% of the time."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def saved(self, run: RunView, checkpoint: Path) -> None:
        start_s = time.monotonic()
        if start_s >= self._next_s:
            lines = _update(run.run_dir)
            if len(lines) == 1:
                run.say(lines[0])
            now_s = time.monotonic()
            self._next_s = now_s + _PAUSE * (now_s - start_s)


@contextmanager
def reporting(run_dir: Path) -> Iterator[None]:
    """Context manager that writes the report of a run after its end, and prints three lines of it.

    Does nothing if the run ended before it wrote its recipe to the folder.
    """
    before_ns = _recipe_time_ns(run_dir)
    yield
    if _recipe_time_ns(run_dir) != before_ns:
        for line in _update(run_dir):
            print(printable(line), file=sys.stderr, flush=True)


def _recipe_time_ns(run_dir: Path) -> int:
    path = run_dir / "config.yaml"
    return path.stat().st_mtime_ns if path.is_file() else 0


def _update(run_dir: Path) -> list[str]:
    """Writes the report. Returns its three lines, or a warning. Without metrics: nothing."""
    try:
        if not (run_dir / "metrics.jsonl").stat().st_size:
            return []
        tree = report_tree([run_dir])
        write_page(run_dir / "report.html", report_page(tree))
        return short_lines(tree["runs"][0])
    except Exception as error:  # A report must never stop a run.
        return [f"warning: no report of {run_dir}: {type(error).__name__}: {error}"]
