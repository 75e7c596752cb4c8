"""Encodes a piece of the inputs to a file. A killed process loses only the pieces in progress."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from parallel3d.data.tokenizers import (
    END_OF_TEXT_MARKS,
    Tokenizer,
    build_tokenizer,
    ids_dtype,
    import_extra,
)

# Minimum number of characters in a slice of a long text. Slices limit memory: the library needs a
# few hundred bytes per token until it returns.
_MOST_CHARACTERS = 1 << 20
# Line ends without adjacent white space. No tokenizer has a word that spans them.
_LINE_END = re.compile(r"(?<=\S\n)(?=\S)")


@dataclass(frozen=True)
class TokenizerChoice:
    """Tokenizer that every worker loads: `bytes` or the path of a tokenizer.json, and its
    end-of-text token."""

    name: str
    mark: str | None = None

    def build(self) -> Tokenizer:
        """Returns the tokenizer, which is loaded once per process."""
        return _build(self)


@cache
def _build(choice: TokenizerChoice) -> Tokenizer:
    return build_tokenizer(choice.name, choice.mark, key="--tokenizer", mark_key="--end-of-text")


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Trains a byte-level BPE like that of GPT-2 on `texts`, and returns its tokenizer.json.

    Its tokens are 256 bytes, an end-of-text token, and merges, until there are `vocab_size` tokens
    or nothing is left to merge. Equal texts give equal files.
    """
    library = import_extra("tokenizers", "a BPE")
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT_MARKS[0]],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer.to_str()


def encode_piece(texts: list[str], choice: TokenizerChoice, path: Path) -> None:
    """Writes the token IDs of documents to the file `path`, atomically.

    The file also has the length of each document and the hash of its text, which decides whether it
    is for validation."""
    tokenizer = choice.build()
    end = np.array([tokenizer.end_of_text], dtype=ids_dtype(tokenizer.vocab_size))
    ids = []
    lengths = []
    hashes = []
    for text in texts:
        slices = [tokenizer.encode(each) for each in _slices(text, choice)]
        ids += [*slices, end]
        lengths.append(sum(map(len, slices)) + 1)
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "big"))
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        hashes_of = np.array(hashes, dtype=np.uint64)
        np.savez(file, ids=np.concatenate(ids), lengths=np.array(lengths), hashes=hashes_of)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _slices(text: str, choice: TokenizerChoice) -> list[str]:
    """Splits a long text into slices at line ends, if that does not change its token IDs."""
    slices = []
    start = 0
    while len(text) - start > 2 * _MOST_CHARACTERS and _may_cut(choice):
        found = _LINE_END.search(text, start + _MOST_CHARACTERS)
        if found is None:
            break
        slices.append(text[start : found.start()])
        start = found.start()
    return [*slices, text[start:]]


@cache
def _may_cut(choice: TokenizerChoice) -> bool:
    """Returns True if encoding two lines separately gives the same token IDs. It does not if the
    tokenizer adds a space at the start of a text.
    """
    encode = choice.build().encode
    first = "One line.\n"
    second = "And another one\n"
    return np.array_equal(encode(first + second), np.append(encode(first), encode(second)))
