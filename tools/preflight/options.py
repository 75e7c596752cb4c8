"""What `parallel3d-launch check` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What is asked of a check. `run_dir` is the recipe's, into whose folder a check writes
    nothing."""

    run_dir: str | None = None
    hardware: str | None = None
    emit_hardware: Path | None = None
    as_json: bool = False
    strict: bool = False  # warnings fail, too
    wait_s: float = 60.0  # for all ranks to come
