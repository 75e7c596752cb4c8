"""Reads token IDs from files, as a training and a validation stream: a folder of shards with a
`tokens.json`, or a Megatron-LM data set. Only the folder format can be written.

A shard such as `train-00000.bin` contains little-endian IDs of consecutive documents, each followed
by the end-of-text token. The IDs of a Megatron-LM data set are in PREFIX.bin. PREFIX.idx has a
header, the sequence lengths (int32), their offsets in bytes (int64), and the index of the first
sequence of each document, then the number of sequences (int64).

IDs are read directly into the batch. Files are not memory-mapped, so the memory of a process does
not grow with the data that it has read."""

from __future__ import annotations

import os
import struct
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar, Literal

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from parallel3d.config.yaml_text import plain_name
from parallel3d.data.windows import TokenIds
from parallel3d.errors import DataError

TOKENS_JSON = "tokens.json"
TOKENIZER_JSON = "tokenizer.json"
Part = Literal["train", "validation"]
PARTS: tuple[Part, ...] = ("train", "validation")
PlainName = Annotated[str, AfterValidator(plain_name)]  # Name of a file in the same folder.
Count = Annotated[int, Interval(ge=0, lt=2**63)]
_OPEN_FILES = 64  # Limit per stream; a corpus may have more shards than a process may open.
# Megatron's header: magic, version, dtype code, number of sequences, number of document boundaries.
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
# Megatron's dtype codes.
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Entry of `tokens.json` for one file of token IDs."""

    file: PlainName
    tokens: Count = 0
    documents: Count = 0
    crc32: int = 0


@dataclass(frozen=True, kw_only=True)
class ShardTokenizer:
    """Entry of `tokens.json` for the tokenizer: `bytes`, or a tokenizer.json in the same folder."""

    kind: Literal["bytes", "json"]
    file: PlainName | None = None
    sha256: str | None = None
    end_of_text: str | None = None  # Token that ends a document. None: `build_tokenizer` finds it.

    @property
    def label(self) -> str:
        return f"{self.file or self.kind} {self.sha256 or ''}".strip()


@dataclass(frozen=True, kw_only=True)
class TokensJson:
    """Content of `tokens.json`."""

    # Also applies to the dataclasses above.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    format: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    largest_id: int
    end_of_text: int | None  # ID that ends a document, or None if unknown.
    tokenizer: ShardTokenizer | None
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.train + self.validation

    def write(self, folder: Path) -> None:
        """Writes `tokens.json` atomically. Call it after writing all shards, because a folder
        without `tokens.json` counts as incomplete."""
        partial = folder / f"{TOKENS_JSON}.partial"
        partial.write_bytes(_TOKENS_JSON.dump_json(self, indent=1) + b"\n")
        partial.replace(folder / TOKENS_JSON)

    @classmethod
    def read(cls, folder: Path) -> TokensJson:
        """Reads `tokens.json`. Raises DataError if it is missing or invalid."""
        path = folder / TOKENS_JSON
        try:
            return _TOKENS_JSON.validate_json(path.read_bytes())
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); try parallel3d-data tokenize"
            ) from error
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, fault["loc"]))
            raise DataError(
                f"{path}: damaged ({key}: {fault['msg']}); tokenize the data again"
            ) from error


_TOKENS_JSON = TypeAdapter(TokensJson)


@dataclass(frozen=True)
class FileSlice:
    """`tokens` consecutive token IDs of a file, from index `first` on."""

    path: Path
    tokens: int
    first: int = 0


class FileTokens:
    """A stream of token IDs from several files. IDs are read on demand."""

    def __init__(self, slices: Sequence[FileSlice], dtype: np.dtype[np.integer]) -> None:
        self.slices = tuple(slices)
        self.dtype = dtype
        self._starts = [0, *accumulate(each.tokens for each in slices)]
        self._open = lru_cache(_OPEN_FILES)(_Descriptor)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, starts: NDArray[np.int64], length: int) -> TokenIds:
        """Returns `length` tokens from each of `starts`, as `[len(starts), length]`. A range may
        span several files. Raises DataError for a file that cannot be read."""
        found = np.empty((len(starts), length), self.dtype)
        for row, start in zip(found, starts.tolist(), strict=True):
            at = bisect_right(self._starts, start) - 1
            place = start - self._starts[at]
            while len(row):
                source = self.slices[at]
                ids = row[: source.tokens - place]
                self._fill(ids, source, place)
                row = row[len(ids) :]
                at += 1
                place = 0
        return found

    def _fill(self, ids: TokenIds, source: FileSlice, place: int) -> None:
        """Reads the tokens of `source` from index `place` on into `ids`."""
        at = (source.first + place) * self.dtype.itemsize
        try:
            count = os.preadv(self._open(source.path).number, [ids.data.cast("B")], at)
        except OSError as error:
            raise _unreadable(source.path, error) from error
        if count < ids.nbytes:
            raise DataError(
                f"{source.path}: shrank below {at + ids.nbytes} bytes while it was read; start "
                "the run again"
            )


class _Descriptor:
    """A file descriptor for reading, closed when this object is deleted."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


@dataclass(frozen=True)
class TokenFiles:
    """The training and validation streams of token files. `header` is None for Megatron's."""

    train: FileTokens
    validation: FileTokens
    header: TokensJson | None


def open_tokens(path: Path, validation_fraction: float) -> TokenFiles:
    """Opens a folder with a `tokens.json`, or else Megatron's files with the prefix `path`.

    The last `validation_fraction` of Megatron's documents are for validation: at least one, never
    all. A single document is split. Reads only headers and file sizes. Raises DataError for a
    missing file, an invalid header or a wrong size."""
    if not path.is_dir():
        return _open_megatron(path, validation_fraction)
    header = TokensJson.read(path)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    slices = [FileSlice(path / shard.file, shard.tokens) for shard in header.shards]
    for each in slices:
        _check_size(each.path, each.tokens * dtype.itemsize)
    in_train = len(header.train)
    train = FileTokens(slices[:in_train], dtype)
    return TokenFiles(train, FileTokens(slices[in_train:], dtype), header)


def _open_megatron(prefix: Path, validation_fraction: float) -> TokenFiles:
    path = Path(f"{prefix}.bin")
    index = Path(f"{prefix}.idx")
    try:
        with index.open("rb") as file:
            raw = file.read(_HEADER.size)
        magic, version, code, sequences, borders = _HEADER.unpack(raw)
        dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        content = np.memmap(index, np.uint8, mode="r", offset=_HEADER.size)
        if (magic, version) != (_MAGIC, 1) or borders < 2 or not sequences:
            raise ValueError("another header")
        lengths = np.frombuffer(content, "<i4", sequences)
        starts = np.frombuffer(content, "<i8", sequences, 4 * sequences)
        first_sequences = np.frombuffer(content, "<i8", borders, 12 * sequences)
        size_bytes = int(starts[-1]) + int(lengths[-1]) * dtype.itemsize
        tokens = size_bytes // dtype.itemsize
        first = tokens - max(round(tokens * validation_fraction), 1)
        if borders > 2:  # With several documents, none is split.
            held_out = min(max(round((borders - 1) * validation_fraction), 1), borders - 2)
            first = int(starts[first_sequences[-1 - held_out]]) // dtype.itemsize
    except OSError as error:
        raise DataError(
            f"{prefix}: not a folder of tokens, and {error.filename} cannot be read "
            f"({error.strerror}); try a folder with a tokens.json"
        ) from error
    except (ValueError, LookupError, OverflowError, struct.error) as error:
        raise DataError(
            f"{index}: not a Megatron index of version 1 with integer IDs ({error}); create it "
            "again"
        ) from error
    _check_size(path, size_bytes)
    train = FileSlice(path, first)
    validation = FileSlice(path, tokens - first, first)
    return TokenFiles(FileTokens([train], dtype), FileTokens([validation], dtype), None)


def _check_size(path: Path, size_bytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if found != size_bytes:
        raise DataError(
            f"{path}: has {found} bytes but must have {size_bytes}; copy or create it again"
        )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error.strerror}); make it readable, or name another data.path"
    )


class FolderWriter(AbstractContextManager["FolderWriter"]):
    """Context manager that writes a folder of token files.

    `add` appends documents to a part, to a new shard if the last has `shard_tokens` tokens or more.
    `tokens.json` is written at the end if no error occurred. Without it, a folder does not count as
    complete."""

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
        self.folder = folder
        self.shard_tokens = shard_tokens
        self.vocab_size = vocab_size
        self.end_of_text = end_of_text
        self.tokenizer = tokenizer
        self.dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self.largest_id = 0
        self._shards: dict[Part, list[Shard]] = {part: [] for part in PARTS}
        self._files: dict[Part, BinaryIO] = {}

    def add(self, part: Part, ids: TokenIds, documents: int = 1) -> None:
        """Appends the `ids` of `documents` documents, including end-of-text tokens, to `part`.
        Raises DataError for an ID outside the vocabulary."""
        largest = int(np.max(ids))
        for each in (np.min(ids), largest):
            if not 0 <= each < self.vocab_size:
                last = self.vocab_size - 1
                raise DataError(f"{self.folder}: token ID {each}: must be from 0 to {last}")
        shards = self._shards[part]
        if not shards or shards[-1].tokens >= self.shard_tokens:
            self._close(part)
            shards.append(Shard(file=f"{part}-{len(shards):05}.bin"))
            self._files[part] = (self.folder / shards[-1].file).open("wb")
        raw = ids.astype(np.dtype(self.dtype).newbyteorder("<")).tobytes()
        self._files[part].write(raw)
        before = shards.pop()
        after = replace(
            before,
            tokens=before.tokens + len(ids),
            documents=before.documents + documents,
            crc32=zlib.crc32(raw, before.crc32),
        )
        shards.append(after)
        self.largest_id = max(self.largest_id, largest)

    def _close(self, part: Part) -> None:
        if part in self._files:
            with self._files.pop(part) as file:
                file.flush()
                os.fsync(file.fileno())

    def __exit__(self, kind: object, *_: object) -> None:
        for part in PARTS:
            self._close(part)
        if kind is None:
            TokensJson(
                dtype=self.dtype,
                vocab_size=self.vocab_size,
                largest_id=self.largest_id,
                end_of_text=self.end_of_text,
                tokenizer=self.tokenizer,
                train=tuple(self._shards["train"]),
                validation=tuple(self._shards["validation"]),
            ).write(self.folder)
