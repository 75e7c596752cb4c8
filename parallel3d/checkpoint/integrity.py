"""Compares the files of a checkpoint with its manifest, and names what is damaged. No torch and no
processes here."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from io import FileIO
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
    for name in names:
        crc, tensors = 0, dict[str, None]()
        try:
            with (folder / name).open("rb", buffering=0) as file:
                for piece, tensor in manifest.pieces.get(name, []):
                    crc, expected = _crc_of(file, piece.bytes, crc), int(piece.crc32, 16)
                    if crc != expected:
                        tensors[tensor] = None
                    crc = expected
                crc = _crc_of(file, manifest.files[name].bytes, crc)  # a file without pieces
        except OSError as error:
            yield Damage(name, f"cannot be read: {error.strerror}")
            continue
        if tensors or f"{crc:08x}" != manifest.files[name].crc32:
            reason = "is not what was saved: its CRC-32 is another"
            yield Damage(name, reason, tuple(tensors))


def _crc_of(file: FileIO, count: int, crc: int) -> int:
    """Returns the running CRC-32 after the next `count` bytes of a file."""
    buffer = memoryview(bytearray(min(count, 1 << 19)))
    while count and (read := file.readinto(buffer[:count])):
        crc, count = zlib.crc32(buffer[:read], crc), count - read
    return crc


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
