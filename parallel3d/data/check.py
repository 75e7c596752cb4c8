"""The check of the data before any worker starts: it exists, is long enough, and fits the model."""

from __future__ import annotations

from collections.abc import Iterable

from parallel3d.config.recipe import DataConfig
from parallel3d.data.source import Document, find_documents
from parallel3d.data.split import split_documents
from parallel3d.data.tokenizer import Tokenizer, build_tokenizer
from parallel3d.errors import ConfigError


def check_data(data: DataConfig, *, seq_len: int, vocab: int) -> None:
    """Raises ConfigError where a run on `data` could not train or validate, DataError for a file that cannot be read.

    It reads only as many files as fill one window of each part.
    """
    tokenizer = build_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > vocab:
        raise ConfigError(
            f"model.vocab = {vocab}: must be at least {tokenizer.vocab_size}, the size of data.tokenizer = "
            f"{data.tokenizer}; try {-(-tokenizer.vocab_size // 8) * 8}"  # a multiple of 8 divides by the usual tp
        )
    split = split_documents(find_documents(data), data.validation_fraction)
    more = {"training": "more text", "validation": "more text or a larger data.validation_fraction"}
    for part, documents in {"training": split.train, "validation": split.validation}.items():
        tokens = _count_tokens(documents, tokenizer, enough=seq_len + 1)
        if tokens <= seq_len:
            corpus = "data.source = stdlib" if data.path is None else f"data.path = {data.path}"
            would_do = f"train.seq_len={tokens - 1} or less, or {more[part]}" if tokens > 1 else more[part]
            raise ConfigError(
                f"train.seq_len = {seq_len}: a window is seq_len + 1 = {seq_len + 1} tokens, and {corpus} has {tokens} "
                f"for {part}; try {would_do}"
            )


def _count_tokens(documents: Iterable[Document], tokenizer: Tokenizer, *, enough: int) -> int:
    """Counts the tokens in `documents`, and stops at `enough`."""
    tokens = 0
    for document in documents:
        tokens += len(tokenizer.encode(document.read())) + 1  # its end_of_text
        if tokens >= enough:
            break
    return tokens
