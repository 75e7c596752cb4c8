"""Divides the documents into those for training and those for validation.

Each file's own name decides (a hash of it against the fraction), so that a file added to a corpus moves no other across
the border, and a run that is resumed on a larger corpus does not validate on what it was trained on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel3d.data.source import Document
from parallel3d.errors import ConfigError


@dataclass(frozen=True)
class TrainValidationSplit:
    """The documents of a corpus, divided into two parts."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]


def split_documents(documents: Sequence[Document], validation_fraction: float) -> TrainValidationSplit:
    """Divides `documents` into two parts that are not empty, each in the order of `documents`.

    Of a single document the last `validation_fraction` of the bytes is for validation. Where few documents leave a part
    empty, the one whose hash is nearest to the border goes there (the only case where adding a file may move another).
    Raises ConfigError where the fraction is not between 0 and 1.
    """
    if not 0.0 < validation_fraction < 1.0:
        raise ConfigError(f"data.validation_fraction = {validation_fraction}: must lie between 0 and 1; try 0.05")
    if len(documents) == 1:
        return _split_one(documents[0], validation_fraction)
    by_draw = sorted(documents, key=lambda document: (_draw(document.name), document.name))
    chosen = sum(_draw(document.name) < validation_fraction for document in documents)
    chosen = min(max(chosen, 1), len(documents) - 1)
    validation = frozenset(document.name for document in by_draw[:chosen])
    return TrainValidationSplit(
        train=tuple(document for document in documents if document.name not in validation),
        validation=tuple(document for document in documents if document.name in validation),
    )


def _split_one(document: Document, validation_fraction: float) -> TrainValidationSplit:
    size = document.stop - document.start
    border = document.stop - min(max(round(size * validation_fraction), 1), max(size - 1, 1))
    return TrainValidationSplit(train=(replace(document, stop=border),), validation=(replace(document, start=border),))


def _draw(name: str) -> float:
    """Returns a number in [0, 1) that depends on the name alone, and is the same on every machine."""
    digest = hashlib.blake2b(os.fsencode(name), digest_size=6).digest()  # 48 bits: exact in a float
    return int.from_bytes(digest, "big") / 2**48
