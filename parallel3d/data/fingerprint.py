"""Fingerprints of training data, which detect that a run is resumed on different data.

They do not depend on paths. Those of token files are computed from `tokens.json`, those of
Megatron's files from the numbers of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from parallel3d.data.corpus import Corpus, open_token_files
from parallel3d.data.windows import TokensInMemory

Fingerprint = Mapping[str, Any]  # property of a corpus -> value


def data_fingerprint(corpora: Sequence[Corpus]) -> tuple[dict[str, Any], ...]:
    """Returns the fingerprint of each corpus."""
    return tuple(map(_fingerprint, corpora))


def differences(then: Sequence[Fingerprint], now: Sequence[Fingerprint]) -> list[str]:
    """Describes how the data of this run, `now`, differs from that of a checkpoint, `then`."""
    if len(then) != len(now):
        return [f"{len(then)} sources, now {len(now)}"]
    found = []
    for before, after in zip(then, now, strict=True):
        for key, value in after.items():
            old = before.get(key)
            if old != value:
                found.append(f"{key} {old}, now {value}")
    return found


def _fingerprint(corpus: Corpus) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_tokens": len(corpus.train),
        "validation_tokens": len(corpus.validation),
    }
    checksum = hashlib.blake2b(digest_size=16)
    if corpus.config.source != "tokens":
        for stream in (corpus.train, corpus.validation):
            assert isinstance(stream, TokensInMemory)
            checksum.update(stream.ids.tobytes())
    else:
        header = open_token_files(corpus.config).header
        if header is None:  # Megatron's files have no checksums.
            return found
        checksum.update(header.dtype.encode())
        for shard in header.shards:
            checksum.update(f"{shard.tokens} {shard.documents} {shard.crc32};".encode())
    found["checksum"] = checksum.hexdigest()
    return found
