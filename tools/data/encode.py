"""Encodes a piece of the inputs into a file, so that a kill loses only the pieces under way."""

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

# encoded by one call: the library keeps some hundred bytes per token until it returns
_MOST_CHARACTERS = 1 << 20
# The end of a line without white space next to it: no pattern that splits a text into words joins
# what is cut here.
_LINE_END = re.compile(r"(?<=\S\n)(?=\S)")


@dataclass(frozen=True)
class TokenizerChoice:
    """The tokenizer that every worker builds for itself: bytes or the path of a tokenizer.json, and
    its end of text."""

    name: str
    mark: str | None = None

    def build(self) -> Tokenizer:
        """Returns the tokenizer, which a process reads once."""
        return _build(self)


@cache
def _build(choice: TokenizerChoice) -> Tokenizer:
    return build_tokenizer(choice.name, choice.mark, key="--tokenizer", mark_key="--end-of-text")


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Returns the tokenizer.json of a byte-level BPE (GPT-2's) that is trained on `texts`: 256
    bytes, an end of text, and merges until there are `vocab_size` ids or nothing is left to merge.
    Equal texts give equal files."""
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
    """Writes documents as ids, each with its end of text, into the file `path`, complete or not at
    all. Next to the ids are the length of each document and the hash of its text, which decides
    what is for validation."""
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
    """Cuts a long text at ends of lines, if that does not change its ids."""
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
    """Tells whether two lines have the same ids apart as together. Some tokenizers begin each text
    with a space."""
    encode = choice.build().encode
    first = "One line.\n"
    second = "And another one\n"
    return np.array_equal(encode(first + second), np.append(encode(first), encode(second)))
