"""Compares the files of a checkpoint with its manifest, and names what is damaged. No torch and no
processes here."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from parallel3d.checkpoint.manifest import MANIFEST_FILE, Damage, Extent, Manifest, read_manifest
from parallel3d.errors import DamagedCheckpointError


def missing_files(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    """Yields the files that are missing, added, or of another size. Reads no file."""
    there = {entry.name: entry.stat().st_size for entry in folder.iterdir()}
    for name, file in manifest.files.items():
        size = there.pop(name, None)
        if size == file.bytes:
            continue
        reason = "is missing, and was saved"
        if size is not None:
            changed = "cut short" if size < file.bytes else "written to"
            reason = f"has {size} bytes of {file.bytes}; it was {changed}"
        extents = (each for each in manifest.extents if each.file == name)
        lost = [each.tensor for each in extents if each.at + each.bytes > (size or 0)]
        yield Damage(name, reason, tuple(filter(None, lost)))
    for name in sorted(there.keys() - {MANIFEST_FILE}):
        yield Damage(name, "is no file of this checkpoint", advice="remove it")


def damaged_extents(folder: Path, extents: Sequence[Extent]) -> Iterator[Damage]:
    """Reads ranges of files and yields those that are not what was saved."""
    buffer = memoryview(bytearray(1 << 19))
    for extent in extents:
        try:
            with (folder / extent.file).open("rb", buffering=0) as file:
                file.seek(extent.at)
                crc, left = extent.crc_before, extent.bytes
                while left and (count := file.readinto(buffer[: min(left, len(buffer))])):
                    crc, left = zlib.crc32(buffer[:count], crc), left - count
            same = crc == extent.crc_after and left == 0
            reason = "is not what was saved: its CRC-32 is another"
        except OSError as error:
            same, reason = False, f"cannot be read: {error.strerror}"
        if not same:
            yield Damage(extent.file, reason, () if extent.tensor is None else (extent.tensor,))


def find_damage(folder: Path) -> Iterator[Damage]:
    """Reads all files of a checkpoint, and yields those that are not what was saved, with the
    tensors that are damaged. Raises CheckpointError if the checkpoint is of another format."""
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpointError as error:
        reason = str(error).removeprefix(f"{folder / MANIFEST_FILE}: ")
        yield Damage(MANIFEST_FILE, reason.removesuffix(f"; {Damage.advice}"))
        return
    missing = list(missing_files(folder, manifest))
    yield from missing
    lost = {damage.file for damage in missing}
    there = [each for each in manifest.extents if each.file not in lost]
    for _, damages in groupby(damaged_extents(folder, there), key=lambda damage: damage.file):
        first, *others = damages
        names = dict.fromkeys(sum((each.tensors for each in others), first.tensors))
        yield replace(first, tensors=tuple(names))


def share_of(extents: Sequence[Extent], rank: int, ranks: int) -> list[Extent]:
    """Returns the extents that one of `ranks` ranks checks: about as many bytes as any other, side
    by side, so that a rank checks what it has saved itself."""
    total, end, share = sum(extent.bytes for extent in extents), 0, []
    for extent in extents:
        middle, end = end + extent.bytes / 2, end + extent.bytes
        if min(int(middle * ranks / max(total, 1)), ranks - 1) == rank:
            share.append(extent)
    return share
