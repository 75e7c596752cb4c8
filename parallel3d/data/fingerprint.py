"""What identifies the data and the tokenizer of a run, so that a resume on other data is noticed. Where the data lies
is no part of it. It is cheap for terabytes: of files of ids it reads what their headers say, and of text, which the
process holds in memory anyway, the ids."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import Corpus, open_token_files
from parallel3d.data.tokenizers import JsonTokenizer
from parallel3d.data.windows import TokensInMemory

_EDGE_BYTES = 1 << 20  # what is read of each end of Megatron's files, which have no checksum


@dataclass(frozen=True, kw_only=True)
class SourceFingerprint:
    """What identifies one corpus."""

    source: str  # as `data.source`
    tokenizer: str  # bytes, the SHA-256 of a tokenizer.json, or unknown
    train_tokens: int
    validation_tokens: int
    checksum: str  # the sum of all ids, or of what identifies their files


def data_fingerprint(data: DataConfig, corpora: Sequence[Corpus]) -> tuple[dict[str, Any], ...]:
    """Returns the fingerprint of each of the corpora that `data` names, as a checkpoint holds it."""
    return tuple(asdict(_fingerprint(*pair)) for pair in zip(data.corpora, corpora, strict=True))


def differences(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns in words what differs between the data of a checkpoint and that of this run."""
    if len(then) != len(now):
        return [f"{len(then)} sources, now {len(now)}"]
    return [
        f"{key}{f' of source {at + 1}' if len(now) > 1 else ''} {before.get(key)}, now {value}"
        for at, (before, after) in enumerate(zip(then, now, strict=True))
        for key, value in after.items()
        if before.get(key) != value
    ]


def _fingerprint(config: DataConfig, corpus: Corpus) -> SourceFingerprint:
    checksum = hashlib.blake2b(digest_size=16)
    for part in _identity(config, corpus):
        checksum.update(part)
    return SourceFingerprint(
        source=config.source,
        tokenizer=_tokenizer(config, corpus),
        train_tokens=len(corpus.train),
        validation_tokens=len(corpus.validation),
        checksum=checksum.hexdigest(),
    )


def _tokenizer(config: DataConfig, corpus: Corpus) -> str:
    if config.source == "tokens":
        header = open_token_files(config).header
        own = None if header is None else header.tokenizer
        return "unknown" if own is None else own.sha256 or own.kind
    tokenizer = corpus.tokenizer
    return tokenizer.sha256 if isinstance(tokenizer, JsonTokenizer) else "bytes"


def _identity(config: DataConfig, corpus: Corpus) -> Iterator[bytes]:
    """Yields the bytes that identify a corpus: the ids of text; the type of ids and the sizes and checksums of the
    shards that a tokens.json lists; the sizes and both ends of Megatron's two files."""
    if config.source != "tokens":
        for stream in (corpus.train, corpus.validation):
            assert isinstance(stream, TokensInMemory)
            yield stream.ids.tobytes()
        return
    header = open_token_files(config).header
    if header is not None:
        yield header.dtype.encode()
        for shard in (*header.train, *header.validation):
            yield f"{shard.tokens} {shard.documents} {shard.crc32};".encode()
        return
    for ending in ("idx", "bin"):
        with Path(f"{os.path.expanduser(config.path or '')}.{ending}").open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            yield f"{size};".encode()
            for at in sorted({0, max(0, size - _EDGE_BYTES)}):
                file.seek(at)
                yield file.read(_EDGE_BYTES)
