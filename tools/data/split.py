"""Which documents are for validation: those whose text has a hash below the fraction asked for. Equal texts go to the
same part, and a document that is added, moved or renamed moves no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from parallel3d.data.token_files import Part
from parallel3d.errors import ConfigError
from parallel3d.tools.data.chunks import Chunk
from parallel3d.tools.data.inputs import InputError


@dataclass(frozen=True)
class ValidationSplit:
    """The border of hashes, or the share of a single document's tokens, for validation."""

    below: int  # documents with a smaller hash are for validation
    tail: float = 0.0  # of the only document

    @classmethod
    def of(cls, chunks: list[Path], fraction: float) -> ValidationSplit:
        """Returns the split in which neither part is empty, unless `fraction` is 0. Where few documents leave a part
        empty, the one whose hash is nearest to the border goes there; a single document gives its end to validation.
        Raises InputError where there is no document, ConfigError where all texts are equal."""
        below = int(fraction * 2**64)
        total = chosen = greatest = 0
        least = 2**64
        for path in chunks:
            hashes = Chunk.read_hashes(path)
            if len(hashes):
                total, chosen = total + len(hashes), chosen + int((hashes < below).sum())
                least, greatest = min(least, int(hashes.min())), max(greatest, int(hashes.max()))
        if not total:
            raise InputError("the inputs hold no text: every document is empty; try other files")
        if not fraction:
            return cls(0)
        if total == 1:
            return cls(0, tail=fraction)
        if least == greatest:
            raise ConfigError(
                f"--validation-fraction {fraction}: all {total} documents have the same text; "
                "try --validation-fraction 0"
            )
        return cls(least + 1 if not chosen else greatest if chosen == total else below)

    def parts(self, chunk: Chunk) -> Iterator[tuple[Part, Chunk]]:
        """Yields what a chunk has for each part of the data."""
        if self.tail and len(chunk.lengths):
            held_out = min(max(round((len(chunk.ids) - 1) * self.tail), 1), len(chunk.ids) - 1)
            first = np.append(chunk.ids[: -1 - held_out], chunk.ids[-1:])
            yield "train", replace(chunk, ids=first, lengths=np.array([len(first)]))
            yield "validation", replace(chunk, ids=chunk.ids[-1 - held_out :], lengths=np.array([held_out + 1]))
            return
        held = chunk.hashes < self.below
        parts: tuple[tuple[Part, np.ndarray], ...] = (("train", ~held), ("validation", held))
        for part, chosen in parts:
            if chosen.any():
                ids = chunk.ids[np.repeat(chosen, chunk.lengths)]
                yield part, replace(chunk, ids=ids, lengths=chunk.lengths[chosen])
