"""The folder of a run, prepared before the first worker starts, and closed with an outcome after the last has ended.

Only one process does this: the launcher, or rank 0 where somebody else launched the workers.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError

_TRACES_OF_A_RUN = ("metrics.jsonl", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The end of a run, as `outcome.json` holds it."""

    status: Literal["done", "failed"]
    exit_status: int
    rank: int | None = None  # the rank that failed
    reason: str | None = None


def prepare_run_dir(recipe: Recipe) -> list[str]:
    """Makes `run_dir` with its `config.yaml`. Returns one line for each thing that the user should know.

    A run that resumes nothing never mixes with an earlier one: the earlier folder is renamed to `<run_dir>.1` (or the
    next free number). Raises ConfigError where the folder cannot be had, or the checkpoint to resume from is not there.
    """
    assert recipe.run_dir is not None
    run_dir, resume = Path(recipe.run_dir), recipe.checkpoint.resume
    if resume not in ("none", "auto") and not Path(resume).exists():
        raise ConfigError(f"checkpoint.resume = {resume}: no such checkpoint; try auto, none or the path of one")
    notes = []
    try:
        if resume == "none" and any((run_dir / trace).exists() for trace in _TRACES_OF_A_RUN):
            earlier = _set_aside(run_dir)
            notes.append(f"{run_dir} held an earlier run, which is now {earlier} (checkpoint.resume = none)")
        run_dir.mkdir(parents=True, exist_ok=True)
        _write(run_dir / "config.yaml", to_yaml(recipe))
    except OSError as e:
        raise ConfigError(
            f"run_dir = {run_dir}: cannot be written ({e.strerror or e}); try another, such as run_dir=/tmp/run"
        ) from e
    return notes


def write_outcome(run_dir: Path, outcome: RunOutcome) -> None:
    """Writes `outcome.json`, if the folder exists."""
    try:
        _write(run_dir / "outcome.json", json.dumps(asdict(outcome), indent=2) + "\n")
    except OSError:
        return  # the run is over, and its error (such as a full disk) has been reported


def _set_aside(run_dir: Path) -> Path:
    if run_dir.name in ("", ".."):
        run_dir = run_dir.resolve()
    free = (run_dir.with_name(f"{run_dir.name}.{number}") for number in itertools.count(1))
    earlier = next(path for path in free if not path.exists())
    return run_dir.rename(earlier)


def _write(path: Path, text: str) -> None:
    """Writes a text whole or not at all, so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
