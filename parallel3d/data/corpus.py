"""A corpus: two streams of token ids, for training and for validation, held in memory by every process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from parallel3d.config.recipe import DataConfig
from parallel3d.data.source import Document, find_documents
from parallel3d.data.tokenizers import Tokenizer, build_tokenizer
from parallel3d.data.windows import TokenIds, TokensInMemory, TokenStream
from parallel3d.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of the documents, one after the other, each followed by `tokenizer.end_of_text`."""

    train: TokenStream
    validation: TokenStream
    tokenizer: Tokenizer


def load_corpus(config: DataConfig) -> Corpus:
    """Reads and tokenizes all documents that `config` names. Raises ConfigError and DataError as `find_documents`
    does."""
    tokenizer = build_tokenizer(config.tokenizer, config.end_of_text)

    def stream(documents: Iterable[Document]) -> TokensInMemory:
        pieces: list[TokenIds] = []
        for document in documents:
            ids = ids_of(document, tokenizer)
            pieces += [ids, np.full(1, tokenizer.end_of_text, dtype=ids.dtype)]
        return TokensInMemory(np.concatenate(pieces))

    train, validation = split_documents(find_documents(config), config.validation_fraction)
    return Corpus(train=stream(train), validation=stream(validation), tokenizer=tokenizer)


def ids_of(document: Document, tokenizer: Tokenizer) -> TokenIds:
    """Returns the ids of a document. Raises DataError where it cannot be read, or is no text to `tokenizer`."""
    try:
        return tokenizer.encode(document.read())
    except UnicodeDecodeError as error:
        raise DataError(
            f"{document.path}: is no text in UTF-8 ({error.reason}); convert it or take it out of the corpus, or try "
            "data.tokenizer=bytes"
        ) from None


def check_data(data: DataConfig, *, seq_len: int, vocab: int) -> None:
    """Raises ConfigError where a run on `data` could not train or validate, DataError for a file that cannot be read.
    It is called before any worker starts, and reads only as many files as fill one window of each part."""
    tokenizer = build_tokenizer(data.tokenizer, data.end_of_text)
    if tokenizer.vocab_size > vocab:
        raise ConfigError(
            f"model.vocab = {vocab}: must be at least {tokenizer.vocab_size}, the size of data.tokenizer = "
            f"{data.tokenizer}; try {-(-tokenizer.vocab_size // 8) * 8}"  # a multiple of 8 divides by the usual tp
        )
    train, validation = split_documents(find_documents(data), data.validation_fraction)
    for part, documents, more in (
        ("training", train, "more text"),
        ("validation", validation, "more text or a larger data.validation_fraction"),
    ):
        tokens = 0
        for document in documents:
            tokens += len(ids_of(document, tokenizer)) + 1  # its end_of_text
            if tokens > seq_len:
                break
        else:
            corpus = "data.source = stdlib" if data.path is None else f"data.path = {data.path}"
            would_do = f"train.seq_len={tokens - 1} or less, or {more}" if tokens > 1 else more
            raise ConfigError(
                f"train.seq_len = {seq_len}: a window is seq_len + 1 = {seq_len + 1} tokens, and {corpus} has {tokens} "
                f"for {part}; try {would_do}"
            )


class TrainValidationSplit(NamedTuple):
    """The documents of a corpus, divided into two parts."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]


def split_documents(documents: Sequence[Document], validation_fraction: float) -> TrainValidationSplit:
    """Divides `documents` into two parts that are not empty, each in the order of `documents`. The last
    `validation_fraction` of a single document's bytes is for validation. Raises ConfigError where the fraction is not
    between 0 and 1.

    Each file's own name decides (a hash of it against the fraction), so that a file added to a corpus moves no other
    across the border, and a run that is resumed on a larger corpus does not validate on what it was trained on. Where
    few documents leave a part empty, the one whose hash is nearest to the border goes there (the only case where adding
    a file may move another)."""
    if not 0.0 < validation_fraction < 1.0:
        raise ConfigError(f"data.validation_fraction = {validation_fraction}: must lie between 0 and 1; try 0.05")
    if len(documents) == 1:
        (whole,) = documents
        size = whole.stop - whole.start
        border = whole.stop - min(max(round(size * validation_fraction), 1), max(size - 1, 1))
        return TrainValidationSplit((replace(whole, stop=border),), (replace(whole, start=border),))

    def draw(name: str) -> float:
        """Returns a number in [0, 1) that depends on the name alone, and is the same on every machine."""
        digest = hashlib.blake2b(os.fsencode(name), digest_size=6).digest()  # 48 bits: exact in a float
        return int.from_bytes(digest, "big") / 2**48

    by_draw = sorted((draw(document.name), document.name) for document in documents)
    chosen = sum(drawn < validation_fraction for drawn, _ in by_draw)
    validation = {name for _, name in by_draw[: min(max(chosen, 1), len(documents) - 1)]}
    return TrainValidationSplit(
        tuple(document for document in documents if document.name not in validation),
        tuple(document for document in documents if document.name in validation),
    )
