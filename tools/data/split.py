"""Which documents are for validation: those whose text has a hash below the fraction asked for.
Equal texts go to the same part, and a document that is added, moved or renamed moves no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parallel3d.data.token_files import Part
from parallel3d.data.windows import TokenIds
from parallel3d.errors import ConfigError
from parallel3d.tools.data.chunks import Chunk, ChunkSummary
from parallel3d.tools.data.inputs import InputError


@dataclass(frozen=True)
class ValidationSplit:
    """The border of hashes, or the share of a single document's tokens, for validation."""

    below: int  # documents with a smaller hash are for validation
    tail: float = 0.0  # of the only document

    @classmethod
    def choose(cls, chunks: Sequence[ChunkSummary], fraction: float) -> ValidationSplit:
        """Returns the split, in which neither part is empty unless `fraction` is 0. If few
        documents leave a part empty, the one whose hash is nearest to the border goes there; a
        single document gives its end to validation. Raises InputError if there is no document,
        ConfigError if all texts are equal."""
        documents = sum(chunk.documents for chunk in chunks)
        if not documents:
            raise InputError("the inputs hold no text: every document is empty; try other files")
        if not fraction:
            return cls(0)
        if documents == 1:
            return cls(0, tail=fraction)
        least = min(chunk.hashes[0] for chunk in chunks)
        greatest = max(chunk.hashes[1] for chunk in chunks)
        if least == greatest:
            raise ConfigError(
                f"--validation-fraction {fraction}: all {documents} documents have the same text; "
                "try --validation-fraction 0"
            )
        return cls(min(max(int(fraction * 2**64), least + 1), greatest))

    def parts(self, chunk: Chunk) -> Iterator[tuple[Part, TokenIds, NDArray[np.int64]]]:
        """Yields the ids and the lengths of documents that a chunk has for each part."""
        if self.tail and len(chunk.lengths):
            held_out = min(max(round((len(chunk.ids) - 1) * self.tail), 1), len(chunk.ids) - 1)
            first = np.append(chunk.ids[: -1 - held_out], chunk.ids[-1:])
            yield "train", first, np.array([len(first)])
            yield "validation", chunk.ids[-1 - held_out :], np.array([held_out + 1])
            return
        held = chunk.hashes < self.below
        parts: tuple[tuple[Part, NDArray[np.bool_]], ...] = (("train", ~held), ("validation", held))
        for part, chosen in parts:
            if chosen.any():
                ids = chunk.ids[np.repeat(chosen, chunk.lengths)]
                yield part, ids, chunk.lengths[chosen]
