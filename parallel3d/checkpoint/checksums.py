"""Checksums of a checkpoint's files, without which a flipped bit would load silently.

They stand in one file that people can check, too: `sha256sum -c checksums.sha256`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from parallel3d.errors import DamagedCheckpointError

CHECKSUMS = "checksums.sha256"
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")  # a line as sha256sum writes it


def write_checksums(folder: Path, names: Iterable[str], into: str) -> None:
    """Writes the checksums of the files `names` of `folder` into its file `into`."""
    lines = [f"{_sha256(folder / name)}  {name}\n" for name in sorted(names)]
    (folder / into).write_text("".join(lines))


def merge_checksums(folder: Path, parts: Iterable[str], more: Iterable[str]) -> None:
    """Merges the ranks' files of checksums, which are deleted, and the checksums of the files `more` into one file."""
    own = "more.sha256"
    write_checksums(folder, more, own)
    files = [folder / part for part in (*parts, own)]
    text = "".join(file.read_text() for file in files)
    (folder / CHECKSUMS).write_text(text)
    for file in files:
        file.unlink()


def read_checksums(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each saved file, by its name. Raises DamagedCheckpointError where the checksums cannot be
    read, and where the folder has other files than they name."""
    path = folder / CHECKSUMS
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"{path}: cannot be read: {error}") from error
    matches = [_LINE.fullmatch(line) for line in lines]
    found = {match[2]: match[1] for match in matches if match is not None}
    if None in matches or not found:
        raise DamagedCheckpointError(f"{path}: line {matches.index(None) + 1 if matches else 1} is no checksum")
    there = {file.name for file in folder.iterdir()} - {CHECKSUMS}
    if missing := sorted(found.keys() - there):
        raise DamagedCheckpointError(f"{folder / missing[0]}: is missing, and was saved")
    if extra := sorted(there - found.keys()):
        raise DamagedCheckpointError(f"{folder / extra[0]}: is no file of this checkpoint; remove it")
    return found


def differs(folder: Path, name: str, checksum: str) -> bool:
    """True if a file is not what was saved."""
    return _sha256(folder / name) != checksum


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
