"""What is in a folder of tokens: `inspect`, `check` and `merge`."""

from __future__ import annotations

import shutil
import zlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import tokenizer_of
from parallel3d.data.token_files import (
    PARTS,
    TOKENIZER_JSON,
    MegatronIndex,
    Part,
    Shard,
    TokensJson,
    documents_path,
    open_tokens,
    verify,
)
from parallel3d.data.tokenizers import JsonTokenizer
from parallel3d.errors import ConfigError, DataError
from parallel3d.tools.cli_output import Reply

_SAMPLE_TOKENS = 60
_BLOCK_BYTES = 1 << 24


def answer_inspect(options: Namespace) -> Reply:
    """Describes the path that the command line names."""
    return inspect(options.path)


def inspect(path: Path) -> Reply:
    """Describes a folder of tokens, or Megatron's files with the prefix `path`. Reads only headers.
    Raises DataError if there is neither."""
    found: dict[str, Any] = dict.fromkeys(("vocab_size", "largest_id", "end_of_text", "tokenizer"))
    parts: dict[str, dict[str, int]] = {}
    if path.is_dir():
        header = TokensJson.read(path)
        kind, vocabulary = "flat", f"{header.vocab_size:,} ids, up to {header.largest_id:,} here; "
        found = {name: getattr(header, name) for name in found}
        found["tokenizer"] = header.tokenizer and header.tokenizer.label
        dtype: str = header.dtype
        for part in PARTS:
            shards: Sequence[Shard] = getattr(header, part)
            tokens = sum(shard.tokens for shard in shards)
            documents = sum(shard.documents for shard in shards)
            parts[part] = {"tokens": tokens, "documents": documents, "shards": len(shards)}
    else:  # Megatron's files have one part and no vocabulary
        index = MegatronIndex.read(path)
        kind, vocabulary, dtype = "Megatron", "", index.dtype.name
        documents = len(index.borders) - 1
        parts["all"] = {"tokens": index.tokens, "documents": documents, "shards": 1}
    tokens = sum(part["tokens"] for part in parts.values())
    documents = sum(part["documents"] for part in parts.values())
    mean = tokens / max(documents, 1)
    page = [
        f"{path}: {tokens:,} tokens in {documents:,} documents, {kind}",
        f"  mean document  {mean:,.1f} tokens",
        f"  vocabulary     {vocabulary}{dtype}",
    ]
    if vocabulary:
        tokenizer = found["tokenizer"] or "unknown"
        page.append(f"  tokenizer      {tokenizer}; end of text {found['end_of_text']}")
    for name, sizes in parts.items():
        words = "{tokens:,} tokens in {documents:,} documents, shards: {shards}"
        page.append(f"  {name:<13}  {words.format(**sizes)}")
    tree = {
        "path": str(path),
        "format": kind,
        "dtype": dtype,
        **found,
        "tokens": tokens,
        "documents": documents,
        "mean_document_tokens": mean,
        "parts": parts,
    }
    return Reply(page=lambda: page, tree=lambda: tree)


def answer_check(options: Namespace) -> Reply:
    """Reports what is wrong in all that a path holds, and shows samples if nothing is."""
    path: Path = options.path
    samples: list[str] = []
    try:
        faults = list(verify(path))
        if not faults and path.is_dir():
            samples = list(_samples(path))
    except DataError as error:
        faults = [str(error)]

    def page() -> Iterator[str]:
        yield f"{path}: damaged" if faults else f"{path}: whole"
        yield from (f"  {fault}" for fault in faults)
        yield from (f"  {sample!r}" for sample in samples)

    return Reply(
        page=page,
        tree=lambda: {"path": str(path), "faults": faults, "samples": samples},
        status=DataError.exit_status if faults else 0,
    )


def _samples(folder: Path) -> Iterator[str]:
    """Yields the beginnings of a document of the first, a middle and the last shard. Raises
    DataError if the folder's tokenizer is not that of its ids, ConfigError if its library is
    missing."""
    files = open_tokens(folder, 0.0)
    header = files.header
    if header is None or header.tokenizer is None:
        return
    tokenizer = tokenizer_of(DataConfig(source="tokens", path=str(folder)), files)
    if isinstance(tokenizer, JsonTokenizer) and tokenizer.sha256 != header.tokenizer.sha256:
        raise DataError(
            f"{tokenizer.path}: is not the tokenizer that the ids come from; put the right file "
            "back"
        )
    for place in (0.0, 0.5, 1.0):
        shard = header.shards[int(place * (len(header.shards) - 1))]
        starts = np.fromfile(documents_path(folder / shard.file), dtype="<u8")
        first = int(starts[int(place * (len(starts) - 1))])
        shard_ids = np.memmap(folder / shard.file, dtype=header.dtype, mode="r")
        ids = shard_ids[first : first + _SAMPLE_TOKENS]
        ends = np.flatnonzero(ids == header.end_of_text).tolist()
        yield tokenizer.decode(ids[: min(ends, default=None)])


def answer_merge(options: Namespace) -> Reply:
    """Joins folders of tokens, and describes the result."""
    merge(options.paths, options.out)
    return inspect(options.out)


def merge(folders: list[Path], out: Path) -> None:
    """Copies the shards of several folders of tokens into the new folder `out`, those of the first
    folder first. Raises ConfigError if their tokenizers differ or `out` exists, DataError for a
    damaged shard."""
    headers = [TokensJson.read(folder) for folder in folders]
    for folder, header in zip(folders, headers, strict=True):
        for name in ("tokenizer", "vocab_size", "end_of_text"):
            own, other = getattr(header, name), getattr(headers[0], name)
            own, other = getattr(own, "label", own), getattr(other, "label", other)
            if own != other:
                raise ConfigError(
                    f"{folder}: {name} is {own}, and that of {folders[0]} is {other}; merge "
                    "folders of one tokenizer, or tokenize one of them again"
                )
    if out.exists():
        raise ConfigError(f"--out {out}: is there already; try another name, or delete it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{out.name}.", suffix=".merging", dir=out.parent) as own:
            # with the usual permissions, which the folder around it lacks
            partial = Path(own) / "result"
            partial.mkdir()
            train, validation = (tuple(_copy(folders, headers, part, partial)) for part in PARTS)
            tokenizer = headers[0].tokenizer
            if tokenizer is not None and tokenizer.file is not None:
                shutil.copyfile(folders[0] / tokenizer.file, partial / TOKENIZER_JSON)
                tokenizer = replace(tokenizer, file=TOKENIZER_JSON)
            largest = max(header.largest_id for header in headers)
            merged = replace(headers[0], tokenizer=tokenizer, largest_id=largest)
            replace(merged, train=train, validation=validation).write(partial)
            partial.replace(out)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: cannot be written ({error.strerror}); try another folder"
        ) from error


def _copy(
    folders: list[Path], headers: list[TokensJson], part: Part, partial: Path
) -> Iterator[Shard]:
    """Copies all shards of a part under new numbers, and yields their entries."""
    number = 0
    for folder, header in zip(folders, headers, strict=True):
        for shard in getattr(header, part):
            source, copy = folder / shard.file, partial / f"{part}-{number:05}.bin"
            number += 1
            crc = 0
            with source.open("rb") as old, copy.open("wb") as new:
                while block := old.read(_BLOCK_BYTES):
                    crc = zlib.crc32(block, crc)
                    new.write(block)
            if crc != shard.crc32:
                raise DataError(
                    f"{source}: crc32 is {crc}, tokens.json has {shard.crc32}; make {folder} again"
                )
            shutil.copyfile(documents_path(source), documents_path(copy))
            yield replace(shard, file=copy.name)
