"""Compares the files of a checkpoint with its manifest, and names what is damaged. No torch and no
processes here."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from parallel3d.checkpoint.manifest import MANIFEST_FILE, Damage, Manifest, read_manifest
from parallel3d.errors import DamagedCheckpointError


def missing_files(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    """Yields the files that are missing, added, or of another size. Reads no file."""
    there = {entry.name: entry.stat().st_size for entry in folder.iterdir()}
    for name, file in manifest.files.items():
        size = there.pop(name, None)
        if size != file.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            yield Damage(name, f"{found}, and was saved with {file.bytes}")
    for name in sorted(there.keys() - {MANIFEST_FILE}):
        yield Damage(name, "is not a file of this checkpoint", advice="remove it")


def damaged_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[Damage]:
    """Reads files and yields those that are not what was saved, with the tensors that are
    damaged."""
    buffer = memoryview(bytearray(1 << 19))
    for name in names:
        tensors: dict[str, None] = {}
        try:
            with (folder / name).open("rb", buffering=0) as file:
                crc, is_damaged = 0, False
                for each in manifest.ranges[name]:
                    left = each.bytes
                    while left and (count := file.readinto(buffer[: min(left, len(buffer))])):
                        crc, left = zlib.crc32(buffer[:count], crc), left - count
                    if left or crc != each.crc:
                        is_damaged = True
                        tensors |= {each.tensor: None} if each.tensor else {}
                    crc = each.crc
        except OSError as error:
            yield Damage(name, f"cannot be read: {error.strerror}")
            continue
        if is_damaged:
            yield Damage(name, "is not what was saved: its CRC-32 is another", tuple(tensors))


def find_damage(folder: Path) -> Iterator[Damage]:
    """Reads all files of a checkpoint, and yields those that are not what was saved, with the
    tensors that are damaged. Raises CheckpointError if the checkpoint is of another format."""
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpointError as error:
        yield Damage(MANIFEST_FILE, str(error))
        return
    missing = list(missing_files(folder, manifest))
    yield from missing
    there = manifest.files.keys() - {damage.file for damage in missing}
    yield from damaged_files(folder, manifest, sorted(there))
