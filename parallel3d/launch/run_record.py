"""The file run.json of a run folder, with the provenance of each start of the run.

Rank 0 adds a start. The process that writes outcome.json completes it, so a killed run has no
end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parallel3d.errors import writing
from parallel3d.launch.files import free_path, write_atomically
from parallel3d.launch.provenance import environment

RUN_FILE = "run.json"
SCHEMA = "parallel3d.run/1"


def now() -> str:
    """Returns the time in ISO 8601, as in 2026-01-31T09:00:00.123+00:00. Such times sort like
    text."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# A start that this process takes part in begins later than this.
_IMPORTED_AT = now()


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """One start of a run, as in run.json."""

    command: Sequence[str]
    start: str = field(default_factory=now)
    end: str | None = None
    status: str | None = None
    exit_status: int | None = None
    reason: str | None = None
    step: int  # Step that it resumed from, or 0.
    recipe: dict[str, Any]
    versions: dict[str, Any]
    hosts: dict[str, list[int]]  # Ranks by hostname.
    devices: dict[str, list[int]]  # Ranks by device name.
    environment: dict[str, str] = field(default_factory=environment)
    saved: Sequence[int] = ()  # Steps of completed checkpoints.


def add_start(run_dir: Path, start: RunStart) -> str:
    """Adds a start to run.json. Returns a message for the user, or "".

    Renames a run.json that it cannot read. Raises SaveError if the folder cannot be written."""
    path = run_dir / RUN_FILE
    note = ""
    starts = _read(run_dir)
    with writing(path):
        if not starts and path.exists():
            aside = free_path(path)
            path.rename(aside)
            note = f"warning: {path}: is not a record of a run; the file is kept as {aside}"
        _write(run_dir, [*starts, asdict(start)])
    return note


def has_begun(run_dir: str | Path | None) -> bool:
    """Returns True if the run of this process has begun and has not ended."""
    starts = [] if run_dir is None else _read(run_dir)
    return bool(starts) and starts[-1]["end"] is None and str(starts[-1]["start"]) >= _IMPORTED_AT


def update_start(run_dir: str | Path, *, saved: Sequence[int] = (), **changes: object) -> None:
    """Changes the start of this process and adds saved steps. Does nothing unless `has_begun`."""
    if has_begun(run_dir):
        starts = _read(run_dir)
        starts[-1] |= changes
        starts[-1]["saved"] += saved
        _write(run_dir, starts)


def _read(run_dir: str | Path) -> list[dict[str, Any]]:
    """Returns the starts in run.json. They are empty if it does not exist or is not from a run."""
    try:
        tree = json.loads(Path(run_dir, RUN_FILE).read_text(encoding="utf-8"))
        starts = tree["starts"]
        is_known = tree["schema"] == SCHEMA and starts[-1].keys() >= {"start", "end"}
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return []
    return starts if is_known else []


def _write(run_dir: str | Path, starts: Sequence[dict[str, Any]]) -> None:
    tree = {"schema": SCHEMA, "starts": starts}
    write_atomically(Path(run_dir, RUN_FILE), json.dumps(tree, indent=1) + "\n")
