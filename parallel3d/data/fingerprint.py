"""Identifies the data of a run, so that a resume on other data is noticed. The path of the data
does not matter. Of files of ids, only the header is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from parallel3d.config.recipe import DataConfig
from parallel3d.data.corpus import Corpus, open_token_files
from parallel3d.data.windows import TokensInMemory

Fingerprint = Mapping[str, Any]  # of one corpus


def data_fingerprint(data: DataConfig, corpora: Sequence[Corpus]) -> tuple[dict[str, Any], ...]:
    """Returns the fingerprint of each of the corpora that `data` names."""
    return tuple(_fingerprint(*pair) for pair in zip(data.corpora, corpora, strict=True))


def differences(then: Sequence[Fingerprint], now: Sequence[Fingerprint]) -> list[str]:
    """Returns in words what differs between the data of a checkpoint and that of this run."""
    if len(then) != len(now):
        return [f"{len(then)} sources, now {len(now)}"]
    found = []
    for number, (before, after) in enumerate(zip(then, now, strict=True), 1):
        source = f" of source {number}" if len(now) > 1 else ""
        for key, value in after.items():
            if before.get(key) != value:
                found.append(f"{key}{source} {before.get(key)}, now {value}")
    return found


def _fingerprint(config: DataConfig, corpus: Corpus) -> dict[str, Any]:
    found: dict[str, Any] = {"source": config.source}
    found["train_tokens"], found["validation_tokens"] = len(corpus.train), len(corpus.validation)
    checksum = hashlib.blake2b(digest_size=16)
    if config.source != "tokens":
        found["tokenizer"] = getattr(corpus.tokenizer, "sha256", "bytes")
        for stream in (corpus.train, corpus.validation):
            assert isinstance(stream, TokensInMemory)
            checksum.update(stream.ids.tobytes())
    elif header := open_token_files(config).header:
        if header.tokenizer is not None:
            found["tokenizer"] = header.tokenizer.sha256 or header.tokenizer.kind
        checksum.update(header.dtype.encode())
        for shard in header.shards:
            checksum.update(f"{shard.tokens} {shard.documents} {shard.crc32};".encode())
    else:  # Megatron's files have no checksum
        return found
    return found | {"checksum": checksum.hexdigest()}
