"""Token ids in files, as two streams: a folder of shards with a `tokens.json`, or Megatron's data
set. Both are read and written here.

A shard `train-00000.bin` is little-endian ids, one document after the other, each followed by the
end of text; `train-00000.documents.bin` has the place of each document's first id, as uint64.
Megatron's ids are in PREFIX.bin. PREFIX.idx is a header, the lengths of sequences (int32), their
places in bytes (int64), and the sequences at which documents begin and the last one ends (int64).

Ids are read by position into the batch's own array. No file is mapped, so a process's memory does
not grow with what it has read.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from parallel3d.config.yaml_text import plain_name
from parallel3d.data.windows import TokenIds
from parallel3d.errors import DataError

TOKENS_JSON, TOKENIZER_JSON = "tokens.json", "tokenizer.json"
Part = Literal["train", "validation"]
PARTS: tuple[Part, ...] = ("train", "validation")
PlainName = Annotated[str, AfterValidator(plain_name)]  # of a file in the same folder
_OPEN_FILES = 64  # a corpus may have more shards than a process may open
_CHUNK = 1 << 23  # ids that are checked at a time
# Megatron's magic, version, code of the ids' type, numbers of sequences and of document borders
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of ids, as `tokens.json` describes it."""

    file: PlainName
    tokens: int
    documents: int
    crc32: int  # the checksum of the file's bytes


@dataclass(frozen=True, kw_only=True)
class ShardTokenizer:
    """The tokenizer that the ids come from: `bytes`, or a tokenizer.json beside the shards."""

    kind: Literal["bytes", "json"]
    file: PlainName | None = None
    sha256: str | None = None  # the file's
    end_of_text: str | None = None  # the token after each document, if the file does not tell

    @property
    def label(self) -> str:
        return f"{self.file or self.kind} {self.sha256 or ''}".strip()


@dataclass(frozen=True, kw_only=True)
class TokensJson:
    """The content of `tokens.json`."""

    # strict for the classes above, too
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    format: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    largest_id: int
    end_of_text: int | None  # the id after each document
    tokenizer: ShardTokenizer | None
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.train + self.validation

    def write(self, folder: Path) -> None:
        """Writes `tokens.json`, complete or not at all. It is written last: a folder without it is
        incomplete."""
        partial = folder / f"{TOKENS_JSON}.partial"
        with partial.open("w") as file:
            file.write(json.dumps(asdict(self), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / TOKENS_JSON)

    @classmethod
    def read(cls, folder: Path) -> TokensJson:
        """Reads `tokens.json`. Raises DataError if it is missing, or not what this version
        writes."""
        path = folder / TOKENS_JSON
        try:
            return _TOKENS_JSON.validate_json(path.read_bytes())
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); make the folder with parallel3d-data"
            ) from error
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, fault["loc"]))
            raise DataError(
                f"{path}: is damaged ({key}: {fault['msg']}); write the folder anew"
            ) from error


_TOKENS_JSON = TypeAdapter(TokensJson)


@dataclass(frozen=True)
class FileSlice:
    """The ids `first` to `first + tokens` of a file."""

    path: Path
    tokens: int
    first: int = 0


class FileTokens:
    """The stream of ids of several files, one after the other. Only what `read` returns is in
    memory."""

    def __init__(self, slices: Sequence[FileSlice], dtype: np.dtype[np.integer]) -> None:
        self.slices, self.dtype = tuple(slices), dtype
        self._starts = [0, *accumulate(each.tokens for each in slices)]
        self._open = lru_cache(_OPEN_FILES)(_Descriptor)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, starts: NDArray[np.int64], length: int) -> TokenIds:
        """Returns `length` tokens from each of `starts`, as `[starts, length]`; a run may cross
        from one file into the next. Raises DataError for a file that cannot be read."""
        found = np.empty((len(starts), length), self.dtype)
        for row, start in zip(found, starts.tolist(), strict=True):
            at, filled = bisect_right(self._starts, start) - 1, 0
            while filled < length:
                place = start + filled - self._starts[at]
                tokens = min(length - filled, self.slices[at].tokens - place)
                self._fill(row[filled : filled + tokens], self.slices[at], place)
                filled, at = filled + tokens, at + 1
        return found

    def _fill(self, ids: TokenIds, source: FileSlice, place: int) -> None:
        """Fills `ids` with those of `source` from `place` on."""
        at = (source.first + place) * self.dtype.itemsize
        try:
            count = os.preadv(self._open(source.path).number, [ids.data.cast("B")], at)
        except OSError as error:
            raise _unreadable(source.path, error) from error
        if count < ids.nbytes:
            raise DataError(
                f"{source.path}: shrank below {at + ids.nbytes} bytes while it was read; start the "
                "run again"
            )


class _Descriptor:
    """A file that is open for reading until nothing refers to this object."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


@dataclass(frozen=True)
class TokenFiles:
    """The two streams that a path names. `header` is None for Megatron's files."""

    train: FileTokens
    validation: FileTokens
    header: TokensJson | None


def open_tokens(path: Path, validation_fraction: float) -> TokenFiles:
    """Opens a folder with a `tokens.json`, or Megatron's files with the prefix `path`, of whose
    documents the last `validation_fraction` are for validation. Only headers and sizes are read.
    Raises DataError if a file is missing or has another size."""
    if not path.is_dir():
        return _open_megatron(path, validation_fraction)
    header = TokensJson.read(path)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    for shard in header.shards:
        _check_size(path / shard.file, shard.tokens * dtype.itemsize)
    train, validation = (
        FileTokens([FileSlice(path / shard.file, shard.tokens) for shard in shards], dtype)
        for shards in (header.train, header.validation)
    )
    return TokenFiles(train, validation, header)


def _open_megatron(prefix: Path, validation_fraction: float) -> TokenFiles:
    path = Path(f"{prefix}.bin")
    if not path.exists():
        raise DataError(
            f"{prefix}: is no folder of tokens, and there is no {path}; try a folder with a "
            "tokens.json"
        )
    index = MegatronIndex.read(prefix)
    _check_size(path, index.tokens * index.dtype.itemsize)
    documents = len(index.borders) - 1
    # As with a single file of text, the end of a single document is for validation.
    border = index.tokens - max(round(index.tokens * validation_fraction), 1)
    if documents > 1:
        held_out = min(max(round(documents * validation_fraction), 1), documents - 1)
        border = index.start_of(int(index.borders[documents - held_out]))
    train, validation = FileSlice(path, border), FileSlice(path, index.tokens - border, border)
    return TokenFiles(FileTokens([train], index.dtype), FileTokens([validation], index.dtype), None)


def _check_size(path: Path, size_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if found != size_bytes:
        raise DataError(
            f"{path}: has {found} bytes and must have {size_bytes}; copy it again, or write it anew"
        )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error.strerror}); make it readable, or name another data.path"
    )


@dataclass(frozen=True, eq=False)
class MegatronIndex:
    """PREFIX.idx. Its tables are mapped, so only what is used of them is read."""

    path: Path
    dtype: np.dtype[np.integer]
    lengths: NDArray[np.integer]  # of each sequence, in ids
    places: NDArray[np.integer]  # of each sequence's first id in PREFIX.bin, in bytes
    borders: NDArray[np.integer]  # the first sequence of each document, and the end of the last

    @classmethod
    def read(cls, prefix: Path) -> MegatronIndex:
        """Raises DataError for another file, or one that is shorter than its header says."""
        path = Path(f"{prefix}.idx")
        try:
            with path.open("rb") as file:
                raw = file.read(_HEADER.size)
        except OSError as error:
            raise _unreadable(path, error) from error
        if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
            raise DataError(f"{path}: is no index of Megatron's; give PREFIX of PREFIX.idx")
        _, version, code, sequences, borders = _HEADER.unpack(raw)
        if version != 1 or code not in _DTYPES:
            raise DataError(
                f"{path}: version {version}, type of ids {code}; version 1 of an integer type can "
                "be read"
            )
        needed = _HEADER.size + 12 * sequences + 8 * borders
        if path.stat().st_size < needed or borders < 2 or not sequences:
            raise DataError(
                f"{path}: has not the {sequences} sequences that it says; build it anew"
            )
        content = np.memmap(path, dtype=np.uint8, mode="r", offset=_HEADER.size)
        lengths, rest = content[: 4 * sequences], content[4 * sequences :]
        places, rest = rest[: 8 * sequences], rest[8 * sequences : 8 * (sequences + borders)]
        dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        return cls(path, dtype, lengths.view("<i4"), places.view("<i8"), rest.view("<i8"))

    @property
    def tokens(self) -> int:
        """The number of tokens in PREFIX.bin."""
        return self.start_of(len(self.lengths))

    def start_of(self, sequence: int) -> int:
        """Returns the place of a sequence's first token; after the last sequence, the end."""
        if sequence == len(self.lengths):
            return self.start_of(sequence - 1) + int(self.lengths[-1])
        return int(self.places[sequence]) // self.dtype.itemsize

    def faults(self) -> Iterator[str]:
        """Reads the tables, and yields a line for each fault."""
        ends = np.cumsum(self.lengths, dtype=np.int64) * self.dtype.itemsize
        follows = bool((self.places[1:] == ends[:-1]).all())
        if self.places[0] != 0 or not follows or self.lengths.min() < 0:
            yield f"{self.path}: its sequences do not follow each other in the .bin file"
        first, last = self.borders[0], self.borders[-1]
        if first != 0 or last != len(self.lengths) or (np.diff(self.borders) < 0).any():
            count = len(self.lengths)
            yield f"{self.path}: the borders of its documents must rise from 0 to {count}"


def verify(path: Path) -> Iterator[str]:
    """Reads all that `path` names, and yields a line for each fault in it: a checksum, an id or a
    document's border that is not what it should be. Raises DataError if the path cannot be
    opened."""
    header = open_tokens(path, 0.05).header
    if header is None:
        yield from MegatronIndex.read(path).faults()
        return
    largest = 0
    for shard in header.shards:
        shard_path = path / shard.file
        if not shard.tokens:
            yield f"{shard_path}: holds no ids"
            continue
        ids = np.memmap(shard_path, dtype=np.dtype(header.dtype).newbyteorder("<"), mode="r")
        crc = shard_largest = 0
        for at in range(0, len(ids), _CHUNK):
            chunk = np.ascontiguousarray(ids[at : at + _CHUNK])
            crc = zlib.crc32(chunk.data, crc)
            shard_largest = max(shard_largest, int(chunk.max()))
        if crc != shard.crc32:
            yield f"{shard_path}: crc32 is {crc}, tokens.json has {shard.crc32}: the file changed"
        if shard_largest >= header.vocab_size:
            known = f"ids 0 to {header.vocab_size - 1}"
            yield f"{shard_path}: token id {shard_largest}, the vocabulary has {known}"
        yield from _verify_documents(shard_path, ids, shard, header.end_of_text)
        largest = max(largest, shard_largest)
    if largest != header.largest_id:
        yield (
            f"{path / TOKENS_JSON}: largest_id = {header.largest_id}, and the largest id of the "
            f"shards is {largest}"
        )


def _verify_documents(path: Path, ids: TokenIds, shard: Shard, end: int | None) -> Iterator[str]:
    """Yields a line for a fault in the borders of a shard's documents."""
    starts_path = documents_path(path)
    try:
        starts = np.fromfile(starts_path, dtype="<u8")
    except OSError as error:
        yield f"{starts_path}: cannot be read ({error.strerror})"
        return
    borders = np.append(starts, len(ids)).astype(np.int64)
    if len(starts) != shard.documents or borders[0] != 0 or (np.diff(borders) <= 0).any():
        yield f"{starts_path}: must be {shard.documents} rising places from 0 to below {len(ids)}"
        return
    ends = ids[borders[1:] - 1]
    wrong = np.flatnonzero(ends != end)
    if end is not None and len(wrong):
        first = f"document {wrong[0]} ends with id {ends[wrong[0]]}"
        yield f"{path}: {first} and not with the end of text, {end} ({len(wrong)} such documents)"


def documents_path(shard: Path) -> Path:
    """Returns the path of the file with the places of a shard's documents."""
    return shard.with_suffix(".documents.bin")


class IdWriter(AbstractContextManager["IdWriter"]):
    """Writes documents, each with its end of text, into a file of ids."""

    def __init__(self, path: Path, *, dtype: str, vocab_size: int) -> None:
        self.path, self.dtype = path, np.dtype(dtype).newbyteorder("<")
        self.tokens = self.crc32 = self.largest_id = 0
        self.starts = array("q")
        self._limit = min(vocab_size - 1, np.iinfo(self.dtype).max)
        self._file = path.open("wb")

    @property
    def shard(self) -> Shard:
        """The file's entry in `tokens.json`."""
        documents = len(self.starts)
        return Shard(file=self.path.name, tokens=self.tokens, documents=documents, crc32=self.crc32)

    def add(self, ids: TokenIds, lengths: NDArray[np.integer]) -> None:
        """Appends documents of these lengths. Raises DataError for an id that the vocabulary or the
        type of the ids does not have."""
        starts = np.cumsum(lengths) - lengths
        wrong = np.flatnonzero((ids < 0) | (ids > self._limit))
        if len(wrong):
            document = np.searchsorted(starts, wrong[0], side="right") - 1
            raise DataError(
                f"{self.path}: token id {ids[wrong[0]]} of document "
                f"{len(self.starts) + document}: ids are 0 to {self._limit}"
            )
        raw = ids.astype(self.dtype).tobytes()
        self._file.write(raw)
        self.starts.extend((self.tokens + starts).tolist())
        self.tokens += len(ids)
        self.crc32 = zlib.crc32(raw, self.crc32)
        self.largest_id = max(self.largest_id, int(ids.max()))

    def __exit__(self, kind: object, *_: object) -> None:
        """Completes the file, and writes the one with the places of the documents."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        if kind is None:
            self.write_documents()

    def write_documents(self) -> None:
        starts = np.array(self.starts, dtype="<u8")
        documents_path(self.path).write_bytes(starts.tobytes())


class MegatronWriter(IdWriter):
    """Writes PREFIX.bin and PREFIX.idx as Megatron's own builder does, a document per sequence;
    `path` is PREFIX.bin."""

    def write_documents(self) -> None:
        code = next(code for code, name in _DTYPES.items() if name == self.dtype.name)
        starts = np.array(self.starts, dtype="<i8")
        lengths = np.diff(np.append(starts, self.tokens))
        if len(lengths) and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(
                f"{self.path}: a document of {lengths.max()} tokens; Megatron's index counts to "
                "2^31 - 1"
            )
        with self.path.with_suffix(".idx").open("wb") as file:
            borders = len(starts) + 1
            file.write(_HEADER.pack(_MAGIC, 1, code, len(starts), borders))
            file.write(lengths.astype("<i4").tobytes())
            file.write((starts * self.dtype.itemsize).tobytes())
            file.write(np.arange(borders, dtype="<i8").tobytes())


class FolderWriter(AbstractContextManager["FolderWriter"]):
    """Writes a folder of tokens: `add` documents to its parts, and a shard that reaches
    `shard_tokens` is closed for the next one. `tokens.json` comes last, so a folder that an error
    or a kill left does not count as complete."""

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        end_of_text: int | None,
        tokenizer: ShardTokenizer | None = None,
        shard_tokens: int = 1 << 30,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.shard_tokens = folder, shard_tokens
        self.vocab_size, self.end_of_text, self.tokenizer = vocab_size, end_of_text, tokenizer
        self.dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._writers: dict[Part, list[IdWriter]] = {part: [] for part in PARTS}

    def add(self, part: Part, ids: TokenIds, lengths: NDArray[np.integer]) -> None:
        """Appends documents of these lengths, each with its end of text, to `part`. Raises
        DataError for an id beyond the vocabulary."""
        writers = self._writers[part]
        if not writers or writers[-1].tokens >= self.shard_tokens:
            for full in writers[-1:]:
                full.__exit__(None)
            path = self.folder / f"{part}-{len(writers):05}.bin"
            writers.append(IdWriter(path, dtype=self.dtype, vocab_size=self.vocab_size))
        writers[-1].add(ids, lengths)

    def __exit__(self, kind: object, *_: object) -> None:
        largest = 0
        shards: dict[Part, tuple[Shard, ...]] = {}
        for part, writers in self._writers.items():
            for last in writers[-1:]:
                last.__exit__(kind)
            shards[part] = tuple(writer.shard for writer in writers)
            largest = max([largest, *(writer.largest_id for writer in writers)])
        if kind is None:
            TokensJson(
                dtype=self.dtype,
                vocab_size=self.vocab_size,
                largest_id=largest,
                end_of_text=self.end_of_text,
                tokenizer=self.tokenizer,
                train=shards["train"],
                validation=shards["validation"],
            ).write(self.folder)
