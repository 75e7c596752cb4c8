"""What is in a folder of tokens: `inspect`, `check` and `merge`."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import tokenizer_of
from parallel3d.data.megatron import MegatronIndex
from parallel3d.data.token_files import (
    TOKENIZER_JSON,
    Part,
    Shard,
    ShardTokenizer,
    TokensJson,
    documents_path,
    open_tokens,
    verify,
)
from parallel3d.data.tokenizers import JsonTokenizer
from parallel3d.errors import ConfigError, DataError
from parallel3d.tools.reply import Reply

_SAMPLE_TOKENS = 60
_SAMPLES = 3
_BLOCK_BYTES = 1 << 24
_DAMAGED = 65
_PARTS: tuple[Part, Part] = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class PartSummary:
    """One part of the data."""

    tokens: int
    documents: int
    shards: int


@dataclass(frozen=True, kw_only=True)
class TokensSummary:
    """What `inspect` tells of a folder of tokens or of Megatron's files, which have one part and know no vocabulary."""

    path: str
    format: str
    dtype: str
    vocab_size: int | None
    largest_id: int | None
    end_of_text: int | None
    tokenizer: str | None  # bytes, or the sha256 of a tokenizer.json
    tokens: int
    documents: int
    mean_document_tokens: float
    parts: dict[str, PartSummary]

    def lines(self) -> Iterator[str]:
        """Yields the lines of a page."""
        yield f"{self.path}: {self.tokens:,} tokens in {self.documents:,} documents, {self.format}"
        yield f"  mean document  {self.mean_document_tokens:,.1f} tokens"
        if self.vocab_size is not None:
            yield f"  vocabulary     {self.vocab_size:,} ids, the largest here is {self.largest_id:,}; {self.dtype}"
            yield f"  tokenizer      {self.tokenizer or 'unknown'}; end of text {self.end_of_text}"
        else:
            yield f"  ids            {self.dtype}"
        for name, part in self.parts.items():
            shards = f"{part.shards} shard{'s' * (part.shards != 1)}"
            yield f"  {name:<13}  {part.tokens:,} tokens in {part.documents:,} documents, {shards}"


def inspect(path: Path) -> Reply:
    """Answers what is in a folder of tokens, or in Megatron's files with the prefix `path`. Reads headers alone. Raises
    DataError where there is neither."""
    found = _summary(path)
    return Reply(page=found.lines, tree=lambda: asdict(found))


def _summary(path: Path) -> TokensSummary:
    header = TokensJson.read(path) if path.is_dir() else None
    if header is None:
        index = MegatronIndex.read(Path(f"{path}.idx"))
        parts = {"all": PartSummary(tokens=index.tokens, documents=index.borders - 1, shards=1)}
        dtype = index.dtype.name
    else:
        dtype = header.dtype
        parts = {
            name: PartSummary(
                tokens=sum(shard.tokens for shard in shards),
                documents=sum(shard.documents for shard in shards),
                shards=len(shards),
            )
            for name, shards in (("train", header.train), ("validation", header.validation))
        }
    tokens, documents = (sum(part.tokens for part in parts.values()), sum(part.documents for part in parts.values()))
    return TokensSummary(
        path=str(path),
        format="Megatron" if header is None else "flat",
        dtype=dtype,
        vocab_size=None if header is None else header.vocab_size,
        largest_id=None if header is None else header.largest_id,
        end_of_text=None if header is None else header.end_of_text,
        tokenizer=None if header is None else _told(header.tokenizer),
        tokens=tokens,
        documents=documents,
        mean_document_tokens=tokens / max(documents, 1),
        parts=parts,
    )


def check(path: Path) -> Reply:
    """Answers what is wrong in all that `path` holds, and shows samples where nothing is."""
    try:
        faults = list(verify(path))
        samples = [] if faults or not path.is_dir() else list(_samples(path))
    except DataError as error:
        faults, samples = [str(error)], []
    return Reply(
        page=lambda: _check_lines(path, faults, samples),
        tree=lambda: {"path": str(path), "faults": faults, "samples": samples},
        status=_DAMAGED if faults else 0,
    )


def _check_lines(path: Path, faults: list[str], samples: list[str]) -> Iterator[str]:
    if faults:
        yield f"{path}: damaged"
        yield from (f"  {fault}" for fault in faults)
        return
    yield f"{path}: whole"
    for sample in samples:
        yield f"  {sample!r}"


def _samples(folder: Path) -> Iterator[str]:
    """Yields the beginnings of three documents, of the first, a middle and the last shard. Raises DataError where the
    folder's tokenizer is another than that of its ids, ConfigError where its library is missing."""
    files = open_tokens(folder, 0.0)
    assert files.header is not None
    if files.header.tokenizer is None:
        return
    tokenizer = tokenizer_of(DataConfig(source="tokens", path=str(folder)), files)
    if isinstance(tokenizer, JsonTokenizer) and tokenizer.sha256 != files.header.tokenizer.sha256:
        raise DataError(f"{tokenizer.path}: is not the tokenizer that the ids come from; put the right file back")
    shards = (*files.header.train, *files.header.validation)
    for place in range(_SAMPLES):
        shard = shards[place * (len(shards) - 1) // (_SAMPLES - 1)]
        starts = np.memmap(documents_path(folder / shard.file), dtype="<u8", mode="r")
        first = int(starts[place * (len(starts) - 1) // (_SAMPLES - 1)])
        ids = np.memmap(folder / shard.file, dtype=files.header.dtype, mode="r")[first : first + _SAMPLE_TOKENS]
        ends = np.flatnonzero(ids == files.header.end_of_text)
        yield tokenizer.decode(ids[: ends[0] if len(ends) else None])


def merge(folders: list[Path], out: Path) -> None:
    """Copies the shards of several folders of tokens into the new folder `out`, those of the first folder first. Raises
    ConfigError where their tokenizers differ or `out` is there, DataError for a shard that is damaged."""
    headers = [TokensJson.read(folder) for folder in folders]
    for folder, header in zip(folders, headers, strict=True):
        for name in ("tokenizer", "vocab_size", "end_of_text"):
            own, first = _told(getattr(header, name)), _told(getattr(headers[0], name))
            if own != first:
                raise ConfigError(
                    f"{folder}: {name} is {own}, and that of {folders[0]} is {first}; merge folders of "
                    "one tokenizer, or tokenize one of them again"
                )
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; try another name, or delete it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{out.name}.", suffix=".merging", dir=out.parent) as own:
            partial = Path(own) / "result"  # with the usual permissions, which the folder around it lacks
            partial.mkdir()
            train, validation = (tuple(_copied(folders, headers, part, partial)) for part in _PARTS)
            whose = headers[0].tokenizer
            if whose is not None and whose.file is not None:
                shutil.copyfile(folders[0] / whose.file, partial / TOKENIZER_JSON)
                whose = replace(whose, file=TOKENIZER_JSON)
            largest = max(header.largest_id for header in headers)
            merged = replace(headers[0], tokenizer=whose, largest_id=largest, train=train, validation=validation)
            merged.write(partial)
            partial.replace(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written ({error.strerror}); try another folder") from error


def _copied(folders: list[Path], headers: list[TokensJson], part: Part, partial: Path) -> Iterator[Shard]:
    """Copies all shards of a part under new numbers, and yields their entries."""
    both = zip(folders, headers, strict=True)
    pairs = ((folder, shard) for folder, header in both for shard in getattr(header, part))
    for number, (folder, shard) in enumerate(pairs):
        source, copy = folder / shard.file, partial / f"{part}-{number:05}.bin"
        crc = 0
        with source.open("rb") as old, copy.open("wb") as new:
            while block := old.read(_BLOCK_BYTES):
                crc = zlib.crc32(block, crc)
                new.write(block)
        if crc != shard.crc32:
            raise DataError(f"{source}: crc32 is {crc}, tokens.json has {shard.crc32}; make {folder} again")
        shutil.copyfile(documents_path(source), documents_path(copy))
        yield replace(shard, file=copy.name)


def _told(value: object) -> str:
    """Returns a setting of a folder as an error shows it."""
    return (
        f"{value.file or value.kind} {value.sha256 or ''}".strip() if isinstance(value, ShardTokenizer) else str(value)
    )
