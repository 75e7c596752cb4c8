"""How many blocks of a transformer each pipeline stage gets, by what the model's parts cost. No
torch here.

Costs are the floating-point operations of a token's forward. A backward takes about twice as many
for every part, so the proportions hold for a whole step. The planner prices stages by the same cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """What each part of a model costs, in any one unit."""

    embedding: float
    block: float
    head: float

    @classmethod
    def of(
        cls, *, block_weights: float, hidden: int, query_hidden: int, vocab: int, seq_len: int
    ) -> PartCosts:
        """Counts operations per token from the weights in a block's matrices. Each weight costs two
        operations, and causal attention multiplies with half of seq_len keys on average. An
        embedding is looked up: it reads and writes `hidden` numbers, next to nothing beside a
        block."""
        attention = 2.0 * query_hidden * seq_len
        return cls(
            embedding=2.0 * hidden, block=2.0 * block_weights + attention, head=2.0 * hidden * vocab
        )


def balanced_cut(blocks: int, stages: int, costs: PartCosts) -> list[int]:
    """The number of blocks of each stage such that the costliest stage, embedding and head
    included, costs as little as possible. Each stage but the last has at least one block; the last
    may be the head alone where the head is costly. Among equal stages those in the middle get a
    block first. Raises ValueError for more stages than blocks."""
    if stages > blocks:
        raise ValueError(f"{blocks} layers cannot fill {stages} stages")
    sizes = [1] * stages
    extra = [0.0] * stages
    extra[0] += costs.embedding
    extra[-1] += costs.head
    if stages > 1:
        sizes[-1] = 0

    def priority(stage: int) -> tuple[float, float]:
        # Rounded, so that the small cost of an embedding does not change an even cut.
        cost = round(sizes[stage] + extra[stage] / costs.block, 2)
        return cost, abs(stage - (stages - 1) / 2)

    # Giving each block to the cheapest stage is optimal, because all blocks cost the same.
    for _ in range(blocks - sum(sizes)):
        cheapest = min(range(stages), key=priority)
        sizes[cheapest] += 1
    return sizes


def sizes_between(points: Sequence[int], blocks: int) -> list[int]:
    """Returns how many blocks each stage has, from the first block of each stage after the first:
    (2, 5) and 8 blocks -> [2, 3, 3]."""
    return [end - start for start, end in pairwise((0, *points, blocks))]


def faults_of_boundaries(points: Sequence[int], blocks: int, stages: int) -> str | None:
    """What is wrong with the boundaries that a user gives, or None. The first stage may be the
    embedding alone and the last the head alone; every stage between them has blocks."""
    sizes = sizes_between(points, blocks)
    if len(sizes) == stages and min(sizes) >= 0 and all(sizes[1:-1]):
        return None
    return (
        f"must be {stages - 1} rising numbers from 0 to model.layers = {blocks}, the first block "
        f"of each of the {stages} stages but the first"
    )
