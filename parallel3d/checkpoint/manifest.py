"""The manifest of a checkpoint, `manifest.json`: its files and their checksums, which file holds which part of which
tensor, and the progress of the run. It is read and checked before anything else of a checkpoint. No torch here.

A file's checksum is its CRC-32, which no flipped bit leaves as it was. A piece's is the running CRC-32 of its file up
to the piece's end: one pass over a file gives both, and the checksum before and after a piece tell whether this piece
is what was saved. The manifest ends with the CRC-32 of what stands above it.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin, get_type_hints

from parallel3d import __version__
from parallel3d.config.recipe import SequenceRange
from parallel3d.errors import CheckpointError, DamagedCheckpointError
from parallel3d.spikes import SpikeHistory

FORMAT = 1
MANIFEST_FILE, INDEX_FILE, CONFIG_FILE = "manifest.json", ".metadata", "config.yaml"
FORMER_FILE = "checksums.sha256"  # what a checkpoint had before formats had numbers
ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1
}  # fmt: skip
_LARGEST_BYTES, _BYTES_PER_VALUE = 128 << 20, 10  # about a million pieces, each of some 130 bytes and 11 values
_FILE_NAME = re.compile(r"__\d+_0\.distcp|\.metadata|config\.yaml")  # those that a save writes
_CRC = re.compile(r"[0-9a-f]{8}")
_END = re.compile(rb',\n"crc32": "([0-9a-f]{8})"\n}\n')
_END_BYTES = len(b',\n"crc32": "01234567"\n}\n')
_MOST_DIMS, _LARGEST_DIM, _LONGEST_NAME = 16, 1 << 62, 500
_SHOWN_TENSORS, _SHOWN_CHARACTERS = 3, 200


@dataclass(frozen=True, kw_only=True)
class SavedProgress:
    """The progress of a run, which a checkpoint holds beside tensors."""

    step: int
    tokens: int  # labels seen
    seed: int
    global_batch_size: int
    seq_len: int
    parameters: int  # in the whole model
    parallel: dict[str, Any]  # the layout that wrote the checkpoint, for people; reading does not need it
    sequences: int | None = None  # sequences seen, the place in the data; None: step * global_batch_size
    skip: tuple[SequenceRange, ...] = ()  # data.skip of the run
    skipped_by_rollbacks: tuple[SequenceRange, ...] = ()  # sequences left out beside them
    drawn: dict[str, int] | None = None  # sequences seen of each source of a mixture; None: not known
    spikes: SpikeHistory = SpikeHistory()
    skipped_steps: int = 0  # steps that the loss scaler has skipped
    val_loss: float | None = None  # after this step; None: the step had no evaluation
    loss_scale: float | None = None  # the scale of the next step; None: not trained in float16
    loss_scale_good_steps: int = 0  # finite steps in a row at that scale
    optimizer: str = "adamw"  # the optimizer whose states the checkpoint has
    local_sgd: dict[str, Any] | None = None  # replicas that train apart (training/local_sgd/state.py)
    data_fingerprint: tuple[dict[str, Any], ...] | None = None  # what identifies each corpus; None: not known


@dataclass(frozen=True)
class SavedFile:
    """The size and the CRC-32, as eight hexadecimal digits, of a file."""

    bytes: int
    crc32: str


@dataclass(frozen=True)
class SavedPiece:
    """A box of a global tensor and where it lies: `bytes` bytes from `at` in a file, the elements from `data` on, in
    row-major order."""

    file: str
    at: int
    bytes: int
    data: int
    crc32: str  # running, of the file up to the end of this piece
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A global tensor and the pieces that make it up."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True)
class Extent:
    """A range of a file that is checked at once: a piece of a tensor, or a whole file without tensors."""

    file: str
    at: int
    bytes: int
    crc_before: int
    crc_after: int
    tensor: str | None


@dataclass(frozen=True)
class Damage:
    """A file that is not what was saved, why, the names of the tensors that are damaged with it, and what to do."""

    file: str
    reason: str
    tensors: tuple[str, ...] = ()
    advice: str = "take an older checkpoint"

    def error(self, folder: Path) -> DamagedCheckpointError:
        shown = ", ".join(in_line(name) for name in self.tensors[:_SHOWN_TENSORS])
        more = f" and {len(self.tensors) - _SHOWN_TENSORS} more" * (len(self.tensors) > _SHOWN_TENSORS)
        held = f" (in {shown}{more})" if shown else ""
        where = folder / in_line(self.file)
        return DamagedCheckpointError(f"{where}: {in_line(self.reason)}{held}; {self.advice}")


def in_line(text: str) -> str:
    """Returns a text that a checkpoint holds as it may stand in a message: on one line, cut short, and without the
    characters that steer a terminal."""
    text = text if text.isprintable() else text.encode("unicode_escape").decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class _UnknownKeyError(ValueError):
    """A manifest says something that this version does not know."""


@dataclass(frozen=True)
class Manifest:
    format: int
    parallel3d: str  # the versions that wrote the checkpoint, for people
    torch: str
    progress: SavedProgress
    files: dict[str, SavedFile]
    tensors: dict[str, SavedTensor]

    @cached_property
    def extents(self) -> list[Extent]:
        """Returns the ranges that make up all files, those of one file in their order."""
        pieces: dict[str, list[tuple[int, int, str, str]]] = {name: [] for name in self.files}
        for name, tensor in self.tensors.items():
            for piece in tensor.pieces:
                pieces[piece.file].append((piece.at, piece.bytes, piece.crc32, name))
        found = []
        for file in sorted(pieces, key=lambda name: (len(name), name)):  # rank 2 before rank 10
            before = 0
            for at, length, crc, tensor_name in sorted(pieces[file]):
                found.append(Extent(file, at, length, before, int(crc, 16), tensor_name))
                before = int(crc, 16)
            if not pieces[file]:
                found.append(Extent(file, 0, self.files[file].bytes, 0, int(self.files[file].crc32, 16), None))
        return found

    def write(self, folder: Path) -> None:
        """Writes the manifest, to the disk itself."""
        with (folder / MANIFEST_FILE).open("wb") as file:
            file.write(self._text())
            file.flush()
            os.fsync(file.fileno())

    def _text(self) -> bytes:
        """Returns the manifest as JSON, with a line for each file and each tensor."""
        lines = []
        for key in _fields(Manifest)[0]:
            value = getattr(self, key)
            if key in ("files", "tensors"):
                entries = (f"  {json.dumps(name)}: {_json(entry)}" for name, entry in value.items())
                lines.append(f'"{key}": {{\n' + ",\n".join(entries) + "\n}")
            else:
                lines.append(f'"{key}": {_json(value)}')
        text = ("{\n" + ",\n".join(lines)).encode()
        return text + f',\n"crc32": "{zlib.crc32(text):08x}"\n}}\n'.encode()


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint alone; parallel3d.checkpoint.integrity compares the files with it. Raises
    DamagedCheckpointError where it is not what was saved, and CheckpointError where another version has written the
    checkpoint: in another format, or with keys that this version does not know."""
    path = folder / MANIFEST_FILE
    try:
        if not path.exists() and (folder / FORMER_FILE).exists():
            raise CheckpointError(
                f"{folder}: is of a form before format 1; this parallel3d reads format {FORMAT} alone"
            )
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError("is no file")
        largest = _largest_manifest(folder)
        with path.open("rb") as file:
            text = file.read(largest + 1)
        end = _END.fullmatch(text[-_END_BYTES:])
        if end is None or f"{zlib.crc32(text[:-_END_BYTES]):08x}".encode() != end[1]:
            raise ValueError("is not what was saved: its own checksum is another")
        if len(text) > largest or _values(text) > largest // _BYTES_PER_VALUE:
            raise ValueError("is larger than the manifest of any checkpoint")
        tree = json.loads(text)
        if not isinstance(tree, dict) or not isinstance(tree.get("format"), int):
            raise ValueError("has no format number")
        if tree["format"] != FORMAT:
            raise _UnknownKeyError(f" is of format {tree['format']}, and not of format {FORMAT}")
        del tree["crc32"]
        manifest: Manifest = _as(Manifest, tree)
        _check(manifest)
    except _UnknownKeyError as error:
        versions = f"parallel3d {in_line(str(tree.get('parallel3d')))} has written it, and this is {__version__}"
        words = in_line(str(error).lstrip(". "))
        raise CheckpointError(f"{path}: {words}; {versions}: use that version or a newer one") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = f"cannot be read: {error}" if isinstance(error, OSError | RecursionError) else str(error).lstrip(". ")
        raise Damage(MANIFEST_FILE, reason).error(folder) from error
    return manifest


def _json(value: object) -> str:
    return json.dumps(value, default=vars)


def _largest_manifest(folder: Path) -> int:
    """Returns the bytes that a manifest has at most: a quarter of what the files beside it take on the disk, because a
    piece has a kilobyte of torch's own there and 130 bytes in the manifest. A file's length would not do, which a
    forged file with holes has for nothing."""
    taken = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(folder))
    return max(_LARGEST_BYTES, taken // 4)


def _values(text: bytes) -> int:
    """Returns about how many values JSON has, which say what it takes in memory."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _as(kind: Any, value: Any) -> Any:
    """Returns `value`, which was read from JSON, as a value of the annotation `kind`. Raises ValueError, with where it
    is, if it is of another type, has a key that `kind` lacks, or lacks one."""
    if type(value) is kind or kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple([_as(arguments[0], item) for item in value])
    if NoneType in arguments:
        return None if value is None else _as(arguments[0], value)
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, dict) or not (origin is dict or is_dataclass(kind)):
        raise ValueError(f" is {str(value):.40}, not of the type {kind}")
    if origin is dict:
        kinds: dict[str, Any] = dict.fromkeys(value, arguments[1])
    else:
        kinds, required = _fields(cast(type, kind))
        for name in (*(value.keys() - kinds.keys()), *(required - value.keys())):
            if name in required:
                raise ValueError(f" has no key {name}")
            raise _UnknownKeyError(f" has an unknown key {name}")
    found = {}
    for name, item in value.items():
        try:
            found[name] = _as(kinds[name], item)
        except ValueError as error:
            raise type(error)(f".{name}{error}") from None
    return found if origin is dict else cast(type, kind)(**found)


@cache
def _fields(kind: type) -> tuple[dict[str, Any], set[str]]:
    """Returns the types of a dataclass's fields, and the names of those without a default."""
    return get_type_hints(kind), {field.name for field in fields(kind) if field.default is MISSING}


def _check(manifest: Manifest) -> None:
    """Raises ValueError unless the pieces cover every tensor and every file that has pieces, each part once."""
    for name, file in manifest.files.items():
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"names a file {name[:80]!r}, which no checkpoint has")
        if file.bytes < 0 or not _CRC.fullmatch(file.crc32):
            raise ValueError(f"has no size or no checksum of {name}")
    progress = manifest.progress
    if not 0 <= progress.skipped_steps <= progress.step or progress.tokens < 0:
        raise ValueError("has a progress that no run can make")
    for each in (*progress.skip, *progress.skipped_by_rollbacks):
        if not 0 <= each.first <= each.last < _LARGEST_DIM:
            raise ValueError(f"has left out sequences {each.first} to {each.last}, which no run has")
    for name, tensor in manifest.tensors.items():
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            raise ValueError(f"names a tensor {name[:80]!r}, which no checkpoint has")
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"has {name} of the type {tensor.dtype[:40]}, which no checkpoint has")
        if len(tensor.shape) > _MOST_DIMS or max(tensor.shape, default=0) >= _LARGEST_DIM:
            raise ValueError(f"has {name} of the shape {str(tensor.shape):.40}, which no checkpoint has")
        for piece in tensor.pieces:
            data_bytes = math.prod(piece.sizes) * ITEM_BYTES[tensor.dtype]
            inside = piece.at >= 0 and piece.at <= piece.data and piece.data + data_bytes <= piece.at + piece.bytes
            if piece.file not in manifest.files or not inside or not _CRC.fullmatch(piece.crc32):
                raise ValueError(f"has a piece of {name} that lies in no file")
        if not _covers(tensor):
            raise ValueError(f"has pieces of {name} that do not cover its shape {list(tensor.shape)}")
    ends = dict.fromkeys(manifest.files, 0)
    last: dict[str, Extent] = {}
    for extent in manifest.extents:
        if extent.at != ends[extent.file] or extent.bytes < 0:
            raise ValueError(f"has pieces that do not cover {extent.file}")
        ends[extent.file], last[extent.file] = extent.at + extent.bytes, extent
    for name, file in manifest.files.items():
        if ends[name] != file.bytes or last[name].crc_after != int(file.crc32, 16):
            raise ValueError(f"has pieces that do not cover {name}")


def _covers(tensor: SavedTensor) -> bool:
    """Returns whether the pieces have each element of a tensor once: they lie inside, have as many elements together,
    and no two have one in common."""
    dims = range(len(tensor.shape))
    for piece in tensor.pieces:
        if not len(piece.offsets) == len(piece.sizes) == len(tensor.shape):
            return False
        if any(
            piece.offsets[dim] < 0 or piece.sizes[dim] < 0 or piece.offsets[dim] + piece.sizes[dim] > tensor.shape[dim]
            for dim in dims
        ):
            return False
    if sum(math.prod(piece.sizes) for piece in tensor.pieces) != math.prod(tensor.shape):
        return False
    boxes = [piece for piece in tensor.pieces if math.prod(piece.sizes)]
    if len(boxes) < 2:
        return True
    # Only boxes that overlap in one dim are compared in the others: in the dim that has the most cuts.
    sweep = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}), default=None)
    if sweep is None:
        return False  # a single number cannot have two pieces
    boxes.sort(key=lambda box: box.offsets[sweep])
    for at, box in enumerate(boxes):
        for other in boxes[at + 1 :]:
            if other.offsets[sweep] >= box.offsets[sweep] + box.sizes[sweep]:
                break
            if all(
                box.offsets[dim] < other.offsets[dim] + other.sizes[dim]
                and other.offsets[dim] < box.offsets[dim] + box.sizes[dim]
                for dim in dims
            ):
                return False
    return True
