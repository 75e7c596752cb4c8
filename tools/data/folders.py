"""`parallel3d-data inspect`, `check` and `merge`, for folders of tokens."""

from __future__ import annotations

import shutil
import zlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import find_tokenizer
from parallel3d.data.token_files import PARTS, TOKENIZER_JSON, Part, Shard, TokensJson, open_tokens
from parallel3d.data.tokenizers import JsonTokenizer
from parallel3d.errors import ConfigError, DataError
from parallel3d.tools.cli_output import Reply

_SAMPLE_TOKENS = 60
_CHUNK_BYTES = 1 << 24  # Number of bytes read at a time.


def answer_inspect(options: Namespace) -> Reply:
    return inspect(options.path)


def inspect(path: Path) -> Reply:
    """Describes a folder of tokens from its tokens.json. Raises DataError if it cannot be read."""
    header = TokensJson.read(path)
    parts: dict[str, dict[str, int]] = {}
    for part in PARTS:
        shards: Sequence[Shard] = getattr(header, part)
        tokens = sum(shard.tokens for shard in shards)
        documents = sum(shard.documents for shard in shards)
        parts[part] = {"tokens": tokens, "documents": documents, "shards": len(shards)}
    tokens = sum(part["tokens"] for part in parts.values())
    documents = sum(part["documents"] for part in parts.values())
    tree = {
        "path": str(path),
        "dtype": header.dtype,
        "vocab_size": header.vocab_size,
        "largest_id": header.largest_id,
        "end_of_text": header.end_of_text,
        "tokenizer": header.tokenizer and header.tokenizer.label,
        "tokens": tokens,
        "documents": documents,
        "mean_document_tokens": tokens / max(documents, 1),
        "parts": parts,
    }

    def page() -> Iterator[str]:
        yield f"{path}: {tokens:,} tokens in {documents:,} documents"
        yield f"  mean document  {tree['mean_document_tokens']:,.1f} tokens"
        ids = f"{header.vocab_size:,} ids, up to {header.largest_id:,} here"
        yield f"  vocabulary     {ids}; {header.dtype}"
        tokenizer = tree["tokenizer"] or "unknown"
        yield f"  tokenizer      {tokenizer}; end of text {header.end_of_text}"
        for name, sizes in parts.items():
            words = "{tokens:,} tokens in {documents:,} documents, shards: {shards}"
            yield f"  {name:<13}  {words.format(**sizes)}"

    return Reply(page=page(), tree=lambda: tree)


def answer_check(options: Namespace) -> Reply:
    """Reports all faults in a folder, or shows samples if there are none."""
    path: Path = options.path
    samples: list[str] = []
    try:
        faults = list(verify(path))
        if not faults:
            samples = list(_samples(path))
    except DataError as error:
        faults = [str(error)]

    def page() -> Iterator[str]:
        yield f"{path}: damaged" if faults else f"{path}: complete"
        yield from (f"  {fault}" for fault in faults)
        yield from (f"  {sample!r}" for sample in samples)

    return Reply(
        page=page(),
        tree=lambda: {"path": str(path), "faults": faults, "samples": samples},
        status=DataError.exit_status if faults else 0,
    )


def verify(folder: Path) -> Iterator[str]:
    """Reads all shards of a folder and yields a line for each wrong checksum, token ID or document
    count. Raises DataError if the folder cannot be opened."""
    header = TokensJson.read(folder)
    open_tokens(folder, 0.0)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    for shard in header.shards:
        path = folder / shard.file
        crc = largest = ends = 0
        with path.open("rb") as file:
            while raw := file.read(_CHUNK_BYTES):
                crc = zlib.crc32(raw, crc)
                ids = np.frombuffer(raw, dtype)
                largest = max(largest, int(ids.max()))
                ends += int(np.count_nonzero(ids == header.end_of_text))
        if crc != shard.crc32:
            yield f"{path}: crc32 is {crc}, but {shard.crc32} in tokens.json: the file has changed"
        if largest > header.largest_id or largest >= header.vocab_size:
            known = f"largest_id = {header.largest_id}, vocab_size = {header.vocab_size}"
            yield f"{path}: contains token ID {largest}, but tokens.json has {known}"
        if header.end_of_text is not None and ends != shard.documents:
            yield f"{path}: {ends} document ends, but {shard.documents} documents in tokens.json"


def _samples(folder: Path) -> Iterator[str]:
    """Yields the decoded start of the first, middle and last shard. Raises DataError if the
    folder's tokenizer does not match its token IDs, and ConfigError if the tokenizer's library is
    not installed.
    """
    header = TokensJson.read(folder)
    if header.tokenizer is None or not header.shards:
        return
    tokenizer = find_tokenizer(DataConfig(source="tokens", path=str(folder)))
    if isinstance(tokenizer, JsonTokenizer) and tokenizer.sha256 != header.tokenizer.sha256:
        raise DataError(
            f"{tokenizer.path}: does not match the tokenizer that produced these token IDs; "
            "restore the original file"
        )
    last = len(header.shards) - 1
    for index in sorted({0, last // 2, last}):
        path = folder / header.shards[index].file
        ids = np.fromfile(path, dtype=header.dtype, count=_SAMPLE_TOKENS)
        yield tokenizer.decode(ids)


def answer_merge(options: Namespace) -> Reply:
    merge(options.paths, options.out)
    return inspect(options.out)


def merge(folders: list[Path], out: Path) -> None:
    """Copies the shards of several folders of tokens to the new folder `out`, in the order of
    `folders`. Raises ConfigError if their tokenizers differ or `out` exists or cannot be written,
    and DataError for a damaged shard.
    """
    headers = [TokensJson.read(folder) for folder in folders]
    first = headers[0]
    for folder, header in zip(folders, headers, strict=True):
        for name in ("tokenizer", "vocab_size", "end_of_text"):
            own = getattr(header, name)
            other = getattr(first, name)
            own = getattr(own, "label", own)
            other = getattr(other, "label", other)
            if own != other:
                raise ConfigError(
                    f"{folder}: {name} is {own}, but {other} in {folders[0]}; merge folders of "
                    "one tokenizer, or tokenize one of them again"
                )
        for fault in verify(folder):
            raise DataError(f"{fault}; create {folder} again")
    if out.exists():
        raise ConfigError(f"--out {out}: exists already; try another name, or delete it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{out.name}.", suffix=".merging", dir=out.parent) as own:
            # A subfolder, because only the owner may read the temporary folder.
            partial = Path(own) / "result"
            partial.mkdir()
            train, validation = (tuple(_copy(folders, headers, part, partial)) for part in PARTS)
            tokenizer = first.tokenizer
            if tokenizer is not None and tokenizer.file is not None:
                shutil.copyfile(folders[0] / tokenizer.file, partial / TOKENIZER_JSON)
                tokenizer = replace(tokenizer, file=TOKENIZER_JSON)
            largest = max(header.largest_id for header in headers)
            merged = replace(first, tokenizer=tokenizer, largest_id=largest)
            replace(merged, train=train, validation=validation).write(partial)
            partial.replace(out)
    except OSError as error:
        raise ConfigError(
            f"--out {out}: cannot be written ({error.strerror}); try another folder"
        ) from error


def _copy(
    folders: list[Path], headers: list[TokensJson], part: Part, partial: Path
) -> Iterator[Shard]:
    """Copies the shards of `part`, renumbered, and yields their entries for tokens.json."""
    number = 0
    for folder, header in zip(folders, headers, strict=True):
        for shard in getattr(header, part):
            name = f"{part}-{number:05}.bin"
            number += 1
            shutil.copyfile(folder / shard.file, partial / name)
            yield replace(shard, file=name)
