"""Token ids in files: a folder of flat shards with a `tokens.json`, written and read, or Megatron's data set.

A shard `train-00000.bin` is little-endian ids, one document after the other, each followed by the end of text;
`train-00000.documents.bin` has the place of each document's first id, as uint64. In both formats all ids of a part are
one stream.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.yaml_text import plain_name, shown
from parallel3d.data import megatron
from parallel3d.data.id_files import FileSlice, FileTokens, IdWriter, check_size, open_regular
from parallel3d.data.windows import TokenIds
from parallel3d.errors import DataError

TOKENS_JSON, TOKENIZER_JSON = "tokens.json", "tokenizer.json"
FORMAT = 1
Part = Literal["train", "validation"]
T = TypeVar("T")
_LARGEST_JSON_BYTES = 64 << 20  # a tokens.json has some 100 bytes for each shard
_CHUNK = 1 << 23  # ids that are checked at a time


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One file of ids, as `tokens.json` describes it."""

    file: str
    tokens: int
    documents: int
    crc32: int  # the checksum of the file's bytes


@dataclass(frozen=True, kw_only=True)
class ShardTokenizer:
    """The tokenizer that the ids come from: `bytes`, or a tokenizer.json beside the shards."""

    kind: str
    file: str | None = None
    sha256: str | None = None  # the file's
    end_of_text: str | None = None  # the token after each document, where the file's own tokens do not tell

    def check(self) -> None:
        """Raises ValueError for what could lead to a file outside the folder."""
        if self.file is not None:
            plain_name(self.file)
        elif self.kind != "bytes":
            raise ValueError(f"a tokenizer of the kind {shown(self.kind)} needs a file")


@dataclass(frozen=True, kw_only=True)
class TokensJson:
    """What `tokens.json` holds."""

    format: int = FORMAT
    dtype: str  # uint16 or uint32
    vocab_size: int
    largest_id: int
    end_of_text: int | None  # the id after each document
    tokenizer: ShardTokenizer | None
    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]

    def write(self, folder: Path) -> None:
        """Writes `tokens.json`, whole or not at all. It is written last: a folder without it is not done."""
        partial = folder / f"{TOKENS_JSON}.partial"
        with partial.open("w") as file:
            json.dump(asdict(self), file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / TOKENS_JSON)

    @classmethod
    def read(cls, folder: Path) -> TokensJson:
        """Reads `tokens.json`. Raises DataError where it is missing, or not what this version writes."""
        path = folder / TOKENS_JSON
        try:
            with open(path, opener=open_regular) as file:
                if os.fstat(file.fileno()).st_size > _LARGEST_JSON_BYTES:
                    raise ValueError("it is larger than that of any data set")
                found = json.load(file)
            if found["format"] != FORMAT:
                said = shown(found["format"])
                raise DataError(f"{path}: format {said}, this version reads {FORMAT}; write the folder anew")
            for part in ("train", "validation"):
                found[part] = tuple(_record(Shard, shard) for shard in found[part])
            if found["tokenizer"] is not None:
                found["tokenizer"] = _record(ShardTokenizer, found["tokenizer"])
            header = _record(cls, found)
            for shard in (*header.train, *header.validation):
                plain_name(shard.file)
            if header.tokenizer is not None:
                header.tokenizer.check()
            if header.dtype not in ("uint16", "uint32"):
                raise DataError(f"{path}: dtype {header.dtype}: must be uint16 or uint32; write the folder anew")
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); make the folder with parallel3d-data"
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DataError(f"{path}: is damaged ({error}); write the folder anew") from error
        return header


def _record(kind: type[T], found: dict[str, object]) -> T:
    """Returns the dataclass that a JSON object describes. Raises ValueError for a value of another type."""
    for name, hint in get_type_hints(kind).items():
        wanted = get_origin(hint) if get_origin(hint) is tuple else hint
        if name in found and (isinstance(found[name], bool) or not isinstance(found[name], wanted)):
            raise ValueError(f"{name} = {shown(found[name])}: is of another type")
    return kind(**found)


@dataclass(frozen=True)
class TokenFiles:
    """The two streams that a path names. `header` is None for Megatron's files, which do not say it."""

    train: FileTokens
    validation: FileTokens
    header: TokensJson | None


def open_tokens(path: Path, validation_fraction: float) -> TokenFiles:
    """Opens a folder with a `tokens.json`, or Megatron's files with the prefix `path`, of whose documents the last
    `validation_fraction` are for validation. Only headers and sizes are read. Raises DataError where a file is missing
    or not as long as it has to be."""
    if not path.is_dir():
        slices, dtype = megatron.split(path, validation_fraction)
        train, validation = (FileTokens([part], dtype) for part in slices)
        return TokenFiles(train, validation, None)
    header = TokensJson.read(path)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    for shard in (*header.train, *header.validation):
        check_size(path / shard.file, shard.tokens * dtype.itemsize)
    train, validation = (
        FileTokens([FileSlice(path / shard.file, shard.tokens) for shard in shards], dtype)
        for shards in (header.train, header.validation)
    )
    return TokenFiles(train, validation, header)


def verify(path: Path) -> Iterator[str]:
    """Reads all that `path` names, and yields a line for each fault in it: a checksum, an id or a document's border
    that is not what it should be. Raises DataError where the path cannot be opened at all."""
    if not path.is_dir():
        yield from megatron.verify(path)
        return
    header = open_tokens(path, 0.0).header
    assert header is not None
    largest = 0
    for shard in (*header.train, *header.validation):
        faults, found = verify_shard(path, shard, header)
        largest = max(largest, found)
        yield from faults
    if largest != header.largest_id:
        yield f"{path / TOKENS_JSON}: largest_id = {header.largest_id}, and the largest id of the shards is {largest}"


def verify_shard(folder: Path, shard: Shard, header: TokensJson) -> tuple[list[str], int]:
    """Returns a line for each fault in one shard and its documents, and the shard's largest id."""
    path, faults = folder / shard.file, list[str]()
    if not shard.tokens:
        return [f"{path}: holds no ids"], 0
    ids = np.memmap(path, dtype=np.dtype(header.dtype).newbyteorder("<"), mode="r")
    crc, largest = 0, 0
    for at in range(0, len(ids), _CHUNK):
        chunk = np.ascontiguousarray(ids[at : at + _CHUNK])
        crc, largest = zlib.crc32(chunk.data, crc), max(largest, int(chunk.max()))
    if crc != shard.crc32:
        faults.append(
            f"{path}: crc32 is {crc}, tokens.json has {shard.crc32}: the file has changed since it was written"
        )
    if largest >= header.vocab_size:
        faults.append(f"{path}: token id {largest}, the vocabulary has ids 0 to {header.vocab_size - 1}")
    starts_path = documents_path(path)
    try:
        starts = np.fromfile(starts_path, dtype="<u8")
    except OSError as error:
        return [*faults, f"{starts_path}: cannot be read ({error.strerror})"], largest
    if len(starts) != shard.documents or not _are_borders(starts, len(ids)):
        faults.append(f"{starts_path}: must be {shard.documents} rising places from 0 to below {len(ids)}")
    elif header.end_of_text is not None:
        ends = np.append(starts[1:], len(ids)).astype(np.int64) - 1
        wrong = np.flatnonzero(ids[ends] != header.end_of_text)
        if len(wrong):
            faults.append(
                f"{path}: document {wrong[0]} ends with id {ids[ends[wrong[0]]]} and not with the end of text, "
                f"{header.end_of_text} ({len(wrong)} such documents)"
            )
    return faults, largest


def _are_borders(starts: NDArray[np.integer], tokens: int) -> bool:
    """Tells whether `starts` rise from 0 to below `tokens`."""
    return len(starts) > 0 and starts[0] == 0 and starts[-1] < tokens and bool((starts[1:] > starts[:-1]).all())


def documents_path(shard: Path) -> Path:
    """Returns the path of the file with the places of a shard's documents."""
    return shard.with_suffix(".documents.bin")


class ShardWriter(IdWriter):
    """Writes one shard of a folder and the places of its documents; `shard` then describes it."""

    @property
    def shard(self) -> Shard:
        """The shard's entry in `tokens.json`."""
        return Shard(file=self.path.name, tokens=self.tokens, documents=len(self.starts), crc32=self.crc32)

    def _write_documents(self) -> None:
        documents_path(self.path).write_bytes(np.array(self.starts, dtype="<u8").tobytes())


class FolderWriter:
    """Writes a folder of tokens: `add` documents to its parts, and a shard that reaches `shard_tokens` is closed for
    the next one. `tokens.json` comes last, so a folder that an error or a kill left is not taken for a whole one."""

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        end_of_text: int | None,
        tokenizer: ShardTokenizer | None = None,
        shard_tokens: int = 1 << 30,
    ) -> None:
        self.folder, self.shard_tokens = folder, shard_tokens
        self.vocab_size, self.end_of_text, self.tokenizer = vocab_size, end_of_text, tokenizer
        self.dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._writers: dict[Part, list[ShardWriter]] = {"train": [], "validation": []}  # the last of each is open
        self._open = {part: ExitStack() for part in self._writers}

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def add(self, part: Part, document: TokenIds) -> None:
        """Appends a document to `part`. Raises DataError for an id beyond the vocabulary."""
        self._writer(part).add(document)

    def add_ended(self, part: Part, ids: TokenIds, lengths: NDArray[np.integer]) -> None:
        """Appends documents of these lengths to `part`, whose ends of text are among `ids` already."""
        self._writer(part).add_ended(ids, lengths)

    def _writer(self, part: Part) -> ShardWriter:
        """Returns the writer of the shard that a part's next documents go to."""
        writers = self._writers[part]
        if not writers or writers[-1].tokens >= self.shard_tokens:
            self._open[part].close()
            path = self.folder / f"{part}-{len(writers):05}.bin"
            writer = ShardWriter(path, dtype=self.dtype, vocab_size=self.vocab_size, end_of_text=self.end_of_text)
            writers.append(self._open[part].enter_context(writer))
        return writers[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for shards in self._open.values():
            shards.__exit__(kind, error, traceback)
        if kind is not None:
            return
        train, validation = (tuple(writer.shard for writer in writers) for writers in self._writers.values())
        header = TokensJson(
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            largest_id=max((writer.largest_id for writers in self._writers.values() for writer in writers), default=0),
            end_of_text=self.end_of_text,
            tokenizer=self.tokenizer,
            train=train,
            validation=validation,
        )
        header.write(self.folder)
