"""The manifest of a checkpoint, `manifest.json`: the checksums of its files, the place of each part
of a tensor, and the progress of the run. It is read before any other file of a checkpoint, and the
others are compared with it, as its tensors are with those of a model. No torch here.

A file's checksum is its CRC-32. A piece's is the running CRC-32 of its file up to the end of the
piece: one pass over a file gives both, and two of them check a single piece. The manifest ends with
the CRC-32 of what stands above it.
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

_BLOCK = re.compile(r"\.\d+\.")  # the number of a block in a tensor's name
Shapes = Mapping[str, Sequence[int]]  # by the tensors' names
FORMAT: Literal[1] = 1
MANIFEST_FILE = "manifest.json"
INDEX_FILE = ".metadata"
CONFIG_FILE = "config.yaml"
# the files that a save writes, and no others
FileName = Annotated[str, StringConstraints(pattern=r"^(__\d+_0\.distcp|\.metadata|config\.yaml)$")]


@dataclass(frozen=True, kw_only=True)
class SpikeHistory:
    """The last steps of a run, by which `training.guard` finds spikes. The counts include steps
    that a rollback has undone."""

    losses: tuple[float, ...] = ()  # the last finite steps, oldest first
    grad_norms: tuple[float, ...] = ()
    spikes: int = 0
    rollbacks: int = 0
    last_spike: int = 0  # its step; 0: none
    in_a_row: int = 0  # spikes up to the last that followed each other closely


@dataclass(frozen=True, kw_only=True)
class SavedReplicas:
    """The replicas that train apart (`training.local_sgd`) in the run that wrote a checkpoint."""

    # earlier versions wrote more
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="ignore")

    replicas: int
    has_momentum: bool


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run: the state of its trainer, which a checkpoint holds beside tensors."""

    step: int
    tokens: int  # labels seen
    seed: int
    global_batch_size: int
    seq_len: int
    parameters: int  # in the whole model
    # the layout that wrote the checkpoint, for people; reading does not need it
    parallel: dict[str, Any]
    # sequences seen, the place in the data; None: step * global_batch_size
    sequences: int | None = None
    skip: tuple[SequenceRange, ...] = ()  # data.skip of the run
    skipped_by_rollbacks: tuple[SequenceRange, ...] = ()  # sequences left out beside them
    # sequences seen of each source of a mixture; None: not known
    drawn: dict[str, int] | None = None
    spikes: SpikeHistory = SpikeHistory()
    skipped_steps: int = 0  # steps that the loss scaler has skipped
    val_loss: float | None = None  # after this step; None: the step had no evaluation
    loss_scale: float | None = None  # the scale of the next step; None: not trained in float16
    loss_scale_good_steps: int = 0  # finite steps in a row at that scale
    optimizer: str = "adamw"  # the optimizer whose states the checkpoint has
    local_sgd: SavedReplicas | None = None
    # what identifies each corpus; None: not known
    data_fingerprint: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class SavedFile:
    """The size and the CRC-32, as eight hexadecimal digits, of a file."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class SavedPiece:
    """A box of a global tensor and its place: `bytes` bytes from `at` in a file, the elements from
    `data` on, in row-major order."""

    file: FileName
    at: int
    bytes: int
    data: int
    crc32: str  # running, of the file up to the end of this piece
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A global tensor and its pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True)
class Damage:
    """A file that is not what was saved, the reason, the names of its damaged tensors, and what to
    do."""

    file: str
    reason: str
    tensors: tuple[str, ...] = ()
    advice: str = "take an older checkpoint"

    def error(self, folder: Path) -> DamagedCheckpointError:
        held = f" (in {shown(self.tensors)})" if self.tensors else ""
        return DamagedCheckpointError(f"{folder / self.file}: {self.reason}{held}; {self.advice}")


@dataclass(frozen=True)
class Manifest:
    # strict for all classes above, too
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    format: Literal[1]
    parallel3d: str  # the versions that wrote the checkpoint, for people
    torch: str
    progress: Progress
    files: dict[FileName, SavedFile]
    tensors: dict[str, SavedTensor]

    @cached_property
    def pieces(self) -> dict[str, list[tuple[SavedPiece, str]]]:
        """The pieces of each file in their order, each with the name of its tensor."""
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
    """Reads the manifest of a checkpoint, and no other file. Raises DamagedCheckpointError if it is
    not what was saved, and CheckpointError if another version wrote it: in another format, or with
    keys that this version does not know."""
    path = folder / MANIFEST_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damage(MANIFEST_FILE, f"cannot be read: {error.strerror}").error(folder) from error
    text = content[: content.rfind(b',\n"crc32"')]
    if not content.endswith(_ending(text)):
        reason = "is not what was saved: its own checksum is another"
        raise Damage(MANIFEST_FILE, reason).error(folder)
    try:
        return _MANIFEST.validate_json(text + b"}")
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = shown(".".join(map(str, fault["loc"])))
        raise CheckpointError(
            f"{path}: {key}: {fault['msg']}; another version of parallel3d than {__version__} has "
            "written it: use that one or a newer one"
        ) from None


def _ending(text: bytes) -> bytes:
    """Returns what follows `text` in a manifest: its checksum."""
    return f',\n"crc32": "{zlib.crc32(text):08x}"\n}}\n'.encode()


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
        crc = zlib.crc32(buffer[:read], crc)
        count = count - read
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


def differences(there: Shapes, here: Shapes) -> list[str]:
    """Returns a line for each tensor that only one of both has, or has in another shape. Tensors of
    several blocks with one difference share a line."""
    found = []
    for name in there.keys() | here.keys():
        shapes = [list(each[name]) if name in each else "missing" for each in (there, here)]
        if shapes[0] != shapes[1]:
            found.append((name, f"is {shapes[0]} there and {shapes[1]} here"))
    return by_block(found)


def by_block(descriptions: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each tensor's name and description, in the order of the names. Tensors of
    several blocks with the same description share a line: `layers.*.mlp.up.weight (4 tensors)`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, words in sorted(descriptions):
        groups.setdefault((_BLOCK.sub(".*.", name, count=1), words), []).append(name)
    lines = []
    for (pattern, words), names in groups.items():
        label = names[0] if len(names) == 1 else f"{pattern} ({len(names)} tensors)"
        lines.append(f"{label} {words}")
    return lines
