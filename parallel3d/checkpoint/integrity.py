"""Compares the files of a checkpoint with its manifest, and names what is damaged. No torch and no processes here."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from parallel3d.checkpoint.manifest import MANIFEST_FILE, Damage, Extent, Manifest, read_manifest
from parallel3d.errors import DamagedCheckpointError


def missing_files(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    """Yields what a look at the folder tells, without reading a file: what is missing, added, or of another size."""
    there = {entry.name: entry for entry in os.scandir(folder)}
    for name, file in manifest.files.items():
        entry, held = there.pop(name, None), None
        if entry is None:
            reason, held = "is missing, and was saved", 0
        elif not entry.is_file(follow_symlinks=False):
            reason, held = "is no file, and was saved as one", 0
        elif (held := entry.stat().st_size) != file.bytes:
            changed = "cut short" if held < file.bytes else "written to"
            reason = f"has {held} bytes of {file.bytes}; it was {changed}"
        else:
            continue
        lost = [each.tensor for each in manifest.extents if each.file == name and each.at + each.bytes > held]
        yield Damage(name, reason, tuple(dict.fromkeys(tensor for tensor in lost if tensor is not None)))
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
    """Yields each file of a checkpoint that is not what was saved, with the tensors that are damaged. It reads every
    file whole. Raises CheckpointError where the checkpoint is of another format."""
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpointError as error:
        reason = str(error).removeprefix(f"{folder / MANIFEST_FILE}: ").removesuffix(f"; {Damage.advice}")
        yield Damage(MANIFEST_FILE, reason)
        return
    lost = {damage.file: damage for damage in missing_files(folder, manifest)}
    yield from lost.values()
    found: dict[str, list[Damage]] = {}
    for damage in damaged_extents(folder, [each for each in manifest.extents if each.file not in lost]):
        found.setdefault(damage.file, []).append(damage)
    for file, damages in found.items():
        names = dict.fromkeys(name for damage in damages for name in damage.tensors)
        yield Damage(file, damages[0].reason, tuple(names))


def share_of(extents: Sequence[Extent], rank: int, ranks: int) -> list[Extent]:
    """Returns the extents that one of `ranks` ranks checks: about as many bytes as any other, side by side, so that a
    rank checks what it has saved itself."""
    total, end, share = sum(extent.bytes for extent in extents), 0, []
    for extent in extents:
        middle, end = end + extent.bytes / 2, end + extent.bytes
        if min(int(middle * ranks / max(total, 1)), ranks - 1) == rank:
            share.append(extent)
    return share
