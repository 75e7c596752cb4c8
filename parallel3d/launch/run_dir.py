"""Manages the run folder: checks it before workers start, writes its first files, and writes the
outcome of the run."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import Recipe, SinkName
from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError, PreemptedError, writing
from parallel3d.launch.failure import Failure
from parallel3d.launch.files import free_path, write_atomically
from parallel3d.launch.run_record import now, update_start
from parallel3d.launch.signals import STOP_SIGNALS

# Glob pattern of checkpoint folders. Those of other frameworks do not match.
STEP_FOLDERS = f"step_{'[0-9]' * 8}*"
# Glob patterns of the files that a run writes, in the order in which `begin_run` moves those of an
# earlier run. metrics.jsonl is last: a config.yaml without it would count as the user's own file.
_RUN_FILES = (
    f"checkpoints/{STEP_FOLDERS}",
    f"export/{STEP_FOLDERS}",
    "profile/rank_*",
    "timeline_step_*.json",
    "report.html",
    "range_test.json",
    "nccl_flight_record_rank_*",
    "tensorboard/events.out.tfevents.*",
    *(f"{name}.id" for name in get_args(SinkName)),
    "log.txt",
    "log.txt.1",
    "logs/rank_*",
    "run.json*",
    "outcome.json",
    "config.yaml",
    "metrics.jsonl*",
)
# File that a run overwrites -> bytes that it contains if a run has written it.
_MARKS = {
    "config.yaml": b"\nlocal_sgd:",
    "metrics.jsonl": b'"tokens_per_s_per_device"',
    "outcome.json": b'"exit_status"',
    "run.json": b'"parallel3d.run/1"',
}


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """Outcome of a run, written to `outcome.json`, and to `run.json` if the run has begun."""

    exit_status: int = 0
    rank: int | None = None  # Rank that failed, or None.
    reason: str | None = None  # Error line, or None.

    @property
    def status(self) -> str:
        """`done`, `preempted` (saved after SIGTERM or SIGHUP), `stopped` (by Ctrl-C, or by a signal
        without a save) or `failed`."""
        if self.exit_status - 128 in STOP_SIGNALS:
            return "stopped"
        known = {0: "done", PreemptedError.exit_status: "preempted"}
        return known.get(self.exit_status, "failed")

    @classmethod
    def of(cls, failure: Failure) -> RunOutcome:
        return cls(
            exit_status=failure.exit_status,
            rank=failure.rank,
            reason=failure.line().partition("\n")[0],
        )

    def write(self, run_dir: str | None) -> None:
        """Writes the files if `run_dir` is given. If this run ended before `begin_run`, keeps
        the outcome of an earlier run. Ignores errors of the file system."""
        if run_dir is None:
            return
        path = Path(run_dir) / "outcome.json"
        if path.exists() and holds_run(path.parent):
            return
        outcome = {"status": self.status, **asdict(self)}
        # Best effort: the run is over, and an error such as a full disk has already been reported.
        with suppress(OSError):
            write_atomically(path, json.dumps(outcome, indent=2) + "\n")
            update_start(
                run_dir,
                end=now(),
                status=self.status,
                exit_status=self.exit_status,
                reason=self.reason,
            )


def check_compiler() -> None:
    """Raises ConfigError if the C++ compiler is missing. `torch.compile` needs it for CPU kernels
    and for the code that launches GPU kernels."""
    named = os.environ.get("CXX", "g++")
    if shutil.which(named) is None:
        raise ConfigError(
            f"train.compile = true: requires a C++ compiler, but {named} is not on PATH; install "
            "it, set CXX to another compiler, or try train.compile=false"
        )


def holds_run(run_dir: Path) -> bool:
    """Returns True if the folder contains metrics or checkpoints of a run."""
    metrics = run_dir / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or any(
        run_dir.glob(f"checkpoints/{STEP_FOLDERS}")
    )


def check_run_dir(recipe: Recipe) -> None:
    """Checks that the run may write to `run_dir`.

    Raises ConfigError if the run would overwrite a file that no run has written, or if the folder
    contains a different run from that of the checkpoint in `checkpoint.resume`."""
    run_dir = Path(recipe.run_dir or ".")
    resume = recipe.checkpoint.resume
    where = f"run_dir = {shown(str(run_dir))}"
    has_run = holds_run(run_dir)
    foreign = [name for name, mark in _MARKS.items() if not _has_mark(run_dir / name, mark)]
    # A run creates metrics.jsonl first, so config.yaml without it belongs to the user.
    has_begun = has_run or (run_dir / "metrics.jsonl").exists()
    if not has_begun and (run_dir / "config.yaml").exists():
        foreign.append("config.yaml")
    if foreign:
        raise ConfigError(
            f"{where}: the run would overwrite {foreign[0]}, which is not from a run; try another "
            "folder, such as run_dir=runs/mine"
        )
    is_own = Path(resume).resolve().parent == (run_dir / "checkpoints").resolve()
    if resume not in ("none", "auto") and has_run and not is_own:
        raise ConfigError(
            f"checkpoint.resume = {resume}: belongs to another run than the one in {where}; try a "
            "new run_dir, or checkpoint.resume=auto to continue the run that is there"
        )


def _has_mark(path: Path, mark: bytes) -> bool:
    """Returns True if a file does not exist, is empty, or contains the mark in its first 64 KiB."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        head = file.read(64 << 10)
    return not head or mark in head


def begin_run(recipe: Recipe) -> list[str]:
    """Prepares `run_dir` after all checks: writes `config.yaml` and removes an old `outcome.json`.
    Returns messages for the user.

    If `checkpoint.resume` is "none", moves the files of an earlier run to `<run_dir>.1` or the next
    free number. Raises SaveError if the folder cannot be written."""
    run_dir = Path(recipe.run_dir or ".")
    notes = []
    with writing(run_dir):
        if recipe.checkpoint.resume == "none" and holds_run(run_dir):
            named = run_dir.resolve() if run_dir.name in ("", "..") else run_dir
            earlier = free_path(named)
            _move_run(run_dir, earlier)
            notes.append(
                f"moved an earlier run from {run_dir} to {earlier} (checkpoint.resume = none)"
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "metrics.jsonl").touch()  # Marks config.yaml as written by a run.
        (run_dir / "outcome.json").unlink(missing_ok=True)
        write_atomically(run_dir / "config.yaml", to_yaml(recipe))
    return notes


def _move_run(run_dir: Path, earlier: Path) -> None:
    """Moves the files that a run writes from `run_dir` to `earlier`, and no others."""
    for path in [found for pattern in _RUN_FILES for found in run_dir.glob(pattern)]:
        target = earlier / path.relative_to(run_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
        if path.parent != run_dir:
            with suppress(OSError):  # The folder may contain other files.
                path.parent.rmdir()
