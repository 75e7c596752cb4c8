"""A corpus: two streams of token ids, held in memory by every process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from parallel3d.config.recipe import DataConfig
from parallel3d.data.source import Document, find_documents
from parallel3d.data.split import split_documents
from parallel3d.data.tokenizer import TokenIds, Tokenizer, build_tokenizer


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids `[tokens]` of the documents, one after the other, each followed by `tokenizer.end_of_text`."""

    train: TokenIds
    validation: TokenIds
    tokenizer: Tokenizer


def load_corpus(config: DataConfig) -> Corpus:
    """Reads and tokenizes all documents that `config` names. Raises ConfigError and DataError as `find_documents`
    does."""
    tokenizer = build_tokenizer(config.tokenizer)
    split = split_documents(find_documents(config), config.validation_fraction)
    return Corpus(
        train=_stream(split.train, tokenizer),
        validation=_stream(split.validation, tokenizer),
        tokenizer=tokenizer,
    )


def _stream(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenIds:
    pieces: list[TokenIds] = []
    for document in documents:
        ids = tokenizer.encode(document.read())
        pieces += [ids, np.full(1, tokenizer.end_of_text, dtype=ids.dtype)]
    return np.concatenate(pieces)
