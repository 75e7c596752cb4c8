"""Manifest of a checkpoint, `manifest.json`: its progress, files, tensors and checksums.

It is read before all other files and used to validate them. Its tensors are compared with those of
the model. This module does not import torch.

The checksum of a file is its CRC-32. The checksum of a piece is the running CRC-32 of its file up
to the end of the piece. One pass over a file computes both, and the checksums of a piece and of its
predecessor suffice to verify the piece. The manifest ends with the CRC-32 of its preceding bytes.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError

from parallel3d import __version__
from parallel3d.config.recipe import SequenceRange
from parallel3d.config.yaml_text import shown
from parallel3d.errors import CheckpointError, DamagedCheckpointError

_BLOCK = re.compile(r"\.\d+\.")  # Index of the transformer block in a tensor's name.
Shapes = Mapping[str, Sequence[int]]  # Keyed by tensor name.
FORMAT: Literal[1] = 1
MANIFEST_FILE = "manifest.json"
INDEX_FILE = ".metadata"
CONFIG_FILE = "config.yaml"
# Names of the files that a manifest can list.
FileName = Annotated[str, StringConstraints(pattern=r"^(__\d+_0\.distcp|\.metadata|config\.yaml)$")]


@dataclass(frozen=True, kw_only=True)
class SpikeHistory:
    """Recent steps of a run. `training.guard` compares new steps with them to detect spikes.

    The counts include steps that a rollback has undone.
    """

    # Losses and gradient norms of the last finite steps (train.spike_window), oldest first.
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    spikes: int = 0
    rollbacks: int = 0
    last_spike: int = 0  # Step of the last spike, or 0.
    in_a_row: int = 0  # Consecutive spikes up to the last one, as defined by `find_spike`.


@dataclass(frozen=True, kw_only=True)
class SavedReplicas:
    """Replicas of local SGD (`training.local_sgd`) in the run that wrote a checkpoint."""

    # Earlier versions wrote more keys, which are ignored.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore")

    replicas: int
    has_momentum: bool


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run, which a checkpoint holds in addition to tensors."""

    step: int
    tokens: int  # Target tokens seen.
    seed: int
    global_batch_size: int
    seq_len: int
    parameters: int  # Number of parameters of the full model.
    # `parallel` section of the recipe that wrote the checkpoint. Informational only.
    parallel: dict[str, Any]
    # Number of sequences seen. None: step * global_batch_size.
    sequences: int | None = None
    skip: tuple[SequenceRange, ...] = ()  # data.skip of the run.
    # Sequences skipped by rollbacks, in addition to `skip`.
    skipped_by_rollbacks: tuple[SequenceRange, ...] = ()
    # Number of sequences seen from each source of a mixture. None: unknown.
    drawn: dict[str, int] | None = None
    spikes: SpikeHistory = SpikeHistory()
    skipped_steps: int = 0  # Number of steps without an optimizer update.
    val_loss: float | None = None  # Validation loss after this step. None: no evaluation.
    loss_scale: float | None = None  # Loss scale of the next step. None: not trained in float16.
    loss_scale_good_steps: int = 0  # Consecutive finite steps at this scale.
    optimizer: str = "adamw"  # Optimizer whose states the checkpoint holds.
    local_sgd: SavedReplicas | None = None
    # Fingerprint of each corpus. None: unknown.
    data_fingerprint: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class SavedFile:
    """Size in bytes of a saved file, and its CRC-32 as eight hexadecimal digits."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class SavedPiece:
    """Region of a global tensor, and its location: `bytes` bytes from offset `at` in a file.

    The elements start at file offset `data`, in row-major order.
    """

    file: FileName
    at: int
    bytes: int
    data: int
    crc32: str  # Running CRC-32 of the file up to the end of this piece.
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """Global tensor and its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True)
class Damage:
    """Damaged file, with the affected tensors and advice to the user."""

    file: str
    reason: str
    tensors: tuple[str, ...] = ()
    advice: str = "use an older checkpoint"

    def error(self, folder: Path) -> DamagedCheckpointError:
        held = f" (in {shown(self.tensors)})" if self.tensors else ""
        return DamagedCheckpointError(f"{folder / self.file}: {self.reason}{held}; {self.advice}")


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`: versions, progress of the run, and all files and tensors."""

    # Also applies to the dataclasses above, unless they have their own.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    format: Literal[1]
    # Versions that wrote the checkpoint. Informational only.
    parallel3d: str
    torch: str
    progress: Progress
    files: dict[FileName, SavedFile]
    tensors: dict[str, SavedTensor]

    @cached_property
    def pieces(self) -> dict[str, list[tuple[SavedPiece, str]]]:
        """Pieces of each file, ordered by position, each with the name of its tensor."""
        found: dict[str, list[tuple[SavedPiece, str]]] = {}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                found.setdefault(piece.file, []).append((piece, name))
        for pieces in found.values():
            pieces.sort(key=lambda each: each[0].at)
        return found

    def write(self, folder: Path) -> None:
        """Writes and syncs the manifest."""
        text = json.dumps(self, default=vars).removesuffix("}").encode()
        save_file(folder / MANIFEST_FILE, text + _ending(text))


_MANIFEST = TypeAdapter(Manifest)


def save_file(path: Path, content: bytes) -> SavedFile:
    """Writes and syncs a small file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return SavedFile(len(content), f"{zlib.crc32(content):08x}")


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint, and no other file.

    Raises:
        DamagedCheckpointError: The manifest is corrupt or cannot be read.
        CheckpointError: Another version wrote it, in another format or with unknown keys.
    """
    path = folder / MANIFEST_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damage(MANIFEST_FILE, f"cannot be read: {error.strerror}").error(folder) from error
    text = content[: content.rfind(b',\n"crc32"')]
    if not content.endswith(_ending(text)):
        reason = "is corrupt: its checksum does not match"
        raise Damage(MANIFEST_FILE, reason).error(folder)
    try:
        return _MANIFEST.validate_json(text + b"}")
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = shown(".".join(map(str, fault["loc"])))
        raise CheckpointError(
            f"{path}: {key}: {fault['msg']}; parallel3d {__version__} did not write it: use "
            "the version that did, or a newer one"
        ) from None


def _ending(text: bytes) -> bytes:
    """Returns the end of a manifest with the checksum of `text`."""
    return f',\n"crc32": "{zlib.crc32(text):08x}"\n}}\n'.encode()


def missing_files(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    """Yields a Damage for each missing, unexpected or wrongly sized file, without reading any."""
    there = {entry.name: entry.stat().st_size for entry in folder.iterdir()}
    for name, file in manifest.files.items():
        size = there.pop(name, None)
        if size != file.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            yield Damage(name, f"{found}, but {file.bytes} were saved")
    for name in sorted(there.keys() - {MANIFEST_FILE}):
        yield Damage(name, "is not a file of this checkpoint", advice="remove it")


def damaged_files(folder: Path, manifest: Manifest, names: Iterable[str]) -> Iterator[Damage]:
    """Reads the named files and yields a Damage for each corrupt or unreadable one."""
    for name in names:
        crc = 0
        tensors = dict[str, None]()
        try:
            with (folder / name).open("rb", buffering=0) as file:
                for piece, tensor in manifest.pieces.get(name, []):
                    crc = _crc_of(file, piece.bytes, crc)
                    expected = int(piece.crc32, 16)
                    if crc != expected:
                        tensors[tensor] = None
                    crc = expected
                # Read the rest of the file, or all of it if it has no pieces.
                crc = _crc_of(file, manifest.files[name].bytes, crc)
        except OSError as error:
            yield Damage(name, f"cannot be read: {error.strerror}")
            continue
        if tensors or f"{crc:08x}" != manifest.files[name].crc32:
            reason = "is corrupt: its CRC-32 does not match"
            yield Damage(name, reason, tuple(tensors))


def _crc_of(file: FileIO, count: int, crc: int) -> int:
    """Returns the running CRC-32 after the next `count` bytes of a file."""
    buffer = memoryview(bytearray(min(count, 1 << 19)))
    while count and (read := file.readinto(buffer[:count])):
        crc = zlib.crc32(buffer[:read], crc)
        count = count - read
    return crc


def find_damage(folder: Path) -> Iterator[Damage]:
    """Reads a checkpoint and yields a Damage for each missing, unexpected or corrupt file.

    Raises CheckpointError if the format of the manifest is unknown.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpointError as error:
        yield Damage(MANIFEST_FILE, str(error))
        return
    missing = list(missing_files(folder, manifest))
    yield from missing
    there = manifest.files.keys() - {damage.file for damage in missing}
    yield from damaged_files(folder, manifest, sorted(there))


def differences(there: Shapes, here: Shapes) -> list[str]:
    """Returns a line for each tensor that is only on one side, or whose shapes differ.

    Blocks with the same difference share a line.
    """
    found = []
    for name in there.keys() | here.keys():
        shapes = [list(each[name]) if name in each else "missing" for each in (there, here)]
        if shapes[0] != shapes[1]:
            found.append((name, f"is {shapes[0]} there and {shapes[1]} here"))
    return by_block(found)


def by_block(descriptions: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each (tensor name, description), sorted by name.

    Blocks with the same description share a line: `layers.*.mlp.up.weight (4 tensors)`.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, words in sorted(descriptions):
        groups.setdefault((_BLOCK.sub(".*.", name, count=1), words), []).append(name)
    lines = []
    for (pattern, words), names in groups.items():
        label = names[0] if len(names) == 1 else f"{pattern} ({len(names)} tensors)"
        lines.append(f"{label} {words}")
    return lines
