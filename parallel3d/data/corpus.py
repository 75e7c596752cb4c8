"""A corpus: two streams of token ids, for training and for validation, held in memory by every process. One tokenizer
is built in: bytes, which needs no vocabulary file and fits any text."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.recipe import DataConfig
from parallel3d.data.source import Document, find_documents
from parallel3d.data.windows import TokenIds, TokensInMemory, TokenStream
from parallel3d.errors import ConfigError


@dataclass(frozen=True)
class ByteTokenizer:
    """One token for each byte (ids 0 to 255), and `end_of_text` (256)."""

    vocab_size: int = 257  # one more than the largest id, `end_of_text` included
    end_of_text: int = 256  # ends every document; `encode` never gives it
    end_of_text_mark: str = "<|end_of_text|>"  # how `decode` shows it: a reader of a sample wants to see the border

    def encode(self, text: bytes | str) -> NDArray[np.uint16]:
        """Returns the bytes of `text` (UTF-8 where it is a str) as ids, `[bytes]`. Text that spells the mark stays
        text."""
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """Returns the text of `ids`. Broken UTF-8 and ids that a padded vocabulary adds become U+FFFD: a sample always
        prints."""
        flat = np.asarray(ids, dtype=np.int64).ravel()
        is_byte = (flat >= 0) & (flat < 256)
        raw = np.where(is_byte, flat, 0xFF).astype(np.uint8)  # 0xFF occurs in no UTF-8 text, so it decodes to U+FFFD
        ends = np.flatnonzero(flat == self.end_of_text)
        pieces = np.split(raw, ends)
        texts = [pieces[0], *(piece[1:] for piece in pieces[1:])]  # each later piece begins with the end_of_text
        return self.end_of_text_mark.join(piece.tobytes().decode(errors="replace") for piece in texts)


def build_tokenizer(name: str) -> ByteTokenizer:
    """Returns the tokenizer that `data.tokenizer` names. Raises ConfigError for an unknown name."""
    if name != "bytes":
        raise ConfigError(f"data.tokenizer = {name}: no such tokenizer; try bytes")
    return ByteTokenizer()


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of the documents, one after the other, each followed by `tokenizer.end_of_text`."""

    train: TokenStream
    validation: TokenStream
    tokenizer: ByteTokenizer


def load_corpus(config: DataConfig) -> Corpus:
    """Reads and tokenizes all documents that `config` names. Raises ConfigError and DataError as `find_documents`
    does."""
    tokenizer = build_tokenizer(config.tokenizer)

    def stream(documents: Iterable[Document]) -> TokensInMemory:
        pieces: list[TokenIds] = []
        for document in documents:
            ids = tokenizer.encode(document.read())
            pieces += [ids, np.full(1, tokenizer.end_of_text, dtype=ids.dtype)]
        return TokensInMemory(np.concatenate(pieces))

    train, validation = split_documents(find_documents(config), config.validation_fraction)
    return Corpus(train=stream(train), validation=stream(validation), tokenizer=tokenizer)


def check_data(data: DataConfig, *, seq_len: int, vocab: int) -> None:
    """Raises ConfigError where a run on `data` could not train or validate, DataError for a file that cannot be read.
    It is called before any worker starts, and reads only as many files as fill one window of each part."""
    tokenizer = build_tokenizer(data.tokenizer)
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
            tokens += len(tokenizer.encode(document.read())) + 1  # its end_of_text
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
