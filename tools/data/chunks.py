"""A piece of the inputs, encoded by one process and kept as a file, so that a kill loses only the
pieces under way."""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from parallel3d.data.tokenizers import Tokenizer, build_tokenizer, ids_dtype
from parallel3d.data.windows import TokenIds
from parallel3d.errors import DataError
from parallel3d.tools.data.inputs import InputPiece

# encoded by one call: the library keeps some hundred bytes per token until it returns
_BATCH_CHARACTERS = 1 << 20
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


@dataclass(frozen=True)
class ChunkSummary:
    """What a finished chunk holds, without its ids."""

    tokens: int
    documents: int
    hashes: tuple[int, int]  # the smallest and the largest
    empty: int  # documents without text, which are left out
    faulty: Counter[str]  # documents by file that are not UTF-8, which are skipped or repaired


@dataclass(frozen=True, eq=False)
class Chunk:
    """Documents as ids, one after the other, each with its end of text."""

    ids: TokenIds
    lengths: NDArray[np.int64]  # of each document, with its end of text
    hashes: NDArray[np.uint64]  # of each text, which decide what is for validation
    empty: NDArray[np.int64]
    faulty: NDArray[np.str_]  # a path for each document

    @classmethod
    def read(cls, path: Path) -> Chunk:
        """Raises DataError if the file has been damaged since it was written."""
        try:
            with np.load(path) as found:
                return cls(**found)
        except (ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise DataError(
                f"{path}: is damaged ({error}); delete it and give the same command again"
            ) from None

    def write(self, path: Path) -> None:
        """Writes the file, complete or not at all."""
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        with unfinished.open("wb") as file:
            np.savez(file, **vars(self))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    @property
    def summary(self) -> ChunkSummary:
        hashes = (2**64, 0)
        if len(self.hashes):
            hashes = int(self.hashes.min()), int(self.hashes.max())
        faulty = Counter[str](self.faulty.tolist())
        return ChunkSummary(len(self.ids), len(self.lengths), hashes, int(self.empty), faulty)


def encode_piece(documents: InputPiece, choice: TokenizerChoice, path: Path) -> ChunkSummary:
    """Encodes the documents of a piece into the file `path`. Raises DataError as the piece does."""
    tokenizer = choice.build()
    end = np.array([tokenizer.end_of_text], dtype=ids_dtype(tokenizer.vocab_size))
    ids, lengths, hashes, empty = [end[:0]], array("q"), array("Q"), 0
    faulty = Counter[str]()
    for texts in _batches(documents(faulty)):
        filled = [text for text in texts if text]
        empty += len(texts) - len(filled)
        slices = [_slices(text, choice) for text in filled]
        encoded = iter(tokenizer.encode_batch([each for document in slices for each in document]))
        for text, document in zip(filled, slices, strict=True):
            own = [next(encoded) for _ in document]
            ids += [*own, end]
            lengths.append(sum(map(len, own)) + 1)
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            hashes.append(int.from_bytes(digest, "big"))
    chunk = Chunk(
        ids=np.concatenate(ids),
        lengths=np.array(lengths),
        hashes=np.array(hashes),
        empty=np.array(empty),
        faulty=np.array([*faulty.elements()], dtype=str),
    )
    chunk.write(path)
    return chunk.summary


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    """Yields the documents in lists of about a million characters."""
    batch: list[str] = []
    characters = 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    yield batch


def _slices(text: str, choice: TokenizerChoice) -> list[str]:
    """Cuts a long text at ends of lines, if that does not change its ids."""
    slices, start = [], 0
    while len(text) - start > 2 * _BATCH_CHARACTERS and _may_cut(choice):
        found = _LINE_END.search(text, start + _BATCH_CHARACTERS)
        if found is None:
            break
        slices.append(text[start : found.start()])
        start = found.start()
    return [*slices, text[start:]]


@cache
def _may_cut(choice: TokenizerChoice) -> bool:
    """Tells whether two lines have the same ids apart as together. Some tokenizers begin each text
    with a space."""
    first, second = "One line.\n", "And another one\n"
    together, *apart = choice.build().encode_batch([first + second, first, second])
    return np.array_equal(together, np.concatenate(apart))
