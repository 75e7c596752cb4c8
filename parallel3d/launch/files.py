"""Writes and renames files of a run folder."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_LOG_BYTES = 8 << 20


def write_atomically(path: Path, text: str) -> None:
    """Writes a file such that readers never see incomplete content."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def free_path(path: Path) -> Path:
    """Returns the first of PATH.1, PATH.2 and so on that does not exist."""
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free


def rotate(log: Path) -> None:
    """Renames a log of more than 8 MiB to LOG.1, which replaces an earlier one."""
    if log.exists() and log.stat().st_size > _MOST_LOG_BYTES:
        log.replace(log.with_name(f"{log.name}.1"))
