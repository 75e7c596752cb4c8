"""What one process (the launcher, or rank 0 where somebody else launched the workers) prepares before the first worker
of a run starts, its compiler and its folder, and the outcome that closes the folder after the last has ended."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import Recipe
from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError
from parallel3d.launch.failure import Failure
from parallel3d.launch.run_lock import RunLock


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The end of a run, as `outcome.json` holds it."""

    exit_status: int = 0
    rank: int | None = None  # the rank that failed
    reason: str | None = None

    @classmethod
    def of(cls, failure: Failure) -> RunOutcome:
        return cls(exit_status=failure.exit_status, rank=failure.rank, reason=failure.line().partition("\n")[0])

    def write(self, run_dir: str | None) -> None:
        """Writes `outcome.json`, if the folder exists."""
        outcome = {"status": "failed" if self.exit_status else "done", **asdict(self)}
        try:
            if run_dir is not None:
                _write(Path(run_dir) / "outcome.json", json.dumps(outcome, indent=2) + "\n")
        except OSError:
            return  # the run is over, and its error (such as a full disk) has been reported


def check_compiler() -> None:
    """Raises ConfigError where there is no C++ compiler, which `torch.compile` needs for its kernels on a CPU and for
    their launchers on a GPU."""
    named = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(named) is None:
        raise ConfigError(
            f"train.compile = true: torch.compile needs a C++ compiler, and there is no {named} on PATH; install it, "
            "name another in CXX, or try train.compile=false"
        )


@contextmanager
def locked(run_dir: str | Path) -> Iterator[RunLock]:
    """Makes the folder of a run where there is none, and holds its lock for a block. Raises RunLockedError where
    another run holds it, and ConfigError where the folder cannot be had."""
    try:
        lock = RunLock(Path(run_dir))
    except (OSError, ValueError) as error:
        raise _cannot_be_written(run_dir, error) from error
    with lock:
        yield lock


def has_earlier_run(recipe: Recipe) -> bool:
    """True if `run_dir` holds a run that this one would set aside, because it resumes nothing."""
    traces = (Path(recipe.run_dir or ".") / trace for trace in ("metrics.jsonl", "checkpoints"))
    return recipe.checkpoint.resume == "none" and any(trace.exists() for trace in traces)


def prepare_run_dir(recipe: Recipe, lock: RunLock) -> list[str]:
    """Writes `config.yaml` into `run_dir`, which `lock` holds. Returns one line for each thing that the user should
    know.

    A run that resumes nothing never mixes with an earlier one: the earlier folder is renamed to `<run_dir>.1` (or the
    next free number). Raises ConfigError where the folder cannot be written.
    """
    assert recipe.run_dir is not None
    run_dir = Path(recipe.run_dir)
    notes = [lock.notice] if lock.notice else []
    try:
        if has_earlier_run(recipe):
            named = run_dir.resolve() if run_dir.name in ("", "..") else run_dir
            free = (named.with_name(f"{named.name}.{number}") for number in itertools.count(1))
            earlier = next(path for path in free if not path.exists())
            lock.set_aside(earlier)
            notes.append(f"{run_dir} held an earlier run, which is now {earlier} (checkpoint.resume = none)")
        _write(run_dir / "config.yaml", to_yaml(recipe))
    except OSError as error:
        raise _cannot_be_written(run_dir, error) from error
    return notes


def _cannot_be_written(run_dir: str | Path, error: OSError | ValueError) -> ConfigError:
    cause = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ConfigError(
        f"run_dir = {shown(str(run_dir))}: cannot be written ({cause}); try another, such as run_dir=/tmp/run"
    )


def _write(path: Path, text: str) -> None:
    """Writes a text whole or not at all, so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
