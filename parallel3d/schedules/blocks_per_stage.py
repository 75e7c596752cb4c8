"""Distributes transformer blocks evenly over pipeline stages, without torch.

Costs are floating-point operations per token in the forward pass. The backward pass takes about
twice as many for every part, so the proportions hold for a full step. The planner uses the same
distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """Cost of each part of a model, in any common unit."""

    embedding: float
    block: float
    head: float
    dense_blocks: int = 0  # Number of leading blocks that cost `dense_block` instead of `block`.
    dense_block: float = 0.0

    @classmethod
    def of(
        cls,
        *,
        block_weights: float,
        hidden: int,
        query_hidden: int,
        vocab: int,
        seq_len: int,
        dense_blocks: int = 0,
        dense_weights: float = 0.0,
    ) -> PartCosts:
        """Computes costs in floating-point operations per token.

        Each of the `block_weights` parameters of a block's matmuls costs two operations. Causal
        attention multiplies with `seq_len / 2` keys on average. An embedding lookup reads and
        writes `hidden` numbers, which is negligible compared with a block.
        """
        attention = 2.0 * query_hidden * seq_len
        return cls(
            embedding=2.0 * hidden,
            block=2.0 * block_weights + attention,
            head=2.0 * hidden * vocab,
            dense_blocks=dense_blocks,
            dense_block=2.0 * dense_weights + attention,
        )


def blocks_per_stage(blocks: int, stages: int, costs: PartCosts) -> list[int]:
    """Returns the number of blocks per stage that minimizes the cost of the most expensive stage.

    Each stage except the last has at least one block. The last may hold only the head if the head
    is expensive. Of stages with equal cost, those in the middle get a block first. Raises
    ValueError if there are more stages than blocks.
    """
    if stages > blocks:
        raise ValueError(f"{blocks} layers cannot fill {stages} stages; use fewer stages")
    if costs.dense_blocks:
        return _cut_of_two_costs(blocks, stages, costs)
    sizes = [1] * stages
    extra = [0.0] * stages
    extra[0] += costs.embedding
    extra[-1] += costs.head
    if stages > 1:
        sizes[-1] = 0

    def priority(stage: int) -> tuple[float, float]:
        # Rounded, so that the small cost of the embedding does not change an even distribution.
        cost = round(sizes[stage] + extra[stage] / costs.block, 2)
        return cost, abs(stage - (stages - 1) / 2)

    # Giving each block to the cheapest stage is optimal because all blocks cost the same.
    for _ in range(blocks - sum(sizes)):
        cheapest = min(range(stages), key=priority)
        sizes[cheapest] += 1
    return sizes


def _cut_of_two_costs(blocks: int, stages: int, costs: PartCosts) -> list[int]:
    """Returns a cut whose boundaries are close to those of stages of equal cost.

    Each stage has at least one block.
    """
    each = [costs.dense_block] * costs.dense_blocks
    each += [costs.block] * (blocks - costs.dense_blocks)
    sums = list(accumulate(each, initial=costs.embedding))
    total = sums[-1] + costs.head
    points: list[int] = []
    for stage in range(1, stages):
        nearest = min(range(blocks + 1), key=lambda at: abs(sums[at] - total * stage / stages))
        least = points[-1] + 1 if points else 1
        points.append(max(least, min(nearest, blocks - (stages - stage))))
    return sizes_between(points, blocks)


def sizes_between(points: Sequence[int], blocks: int) -> list[int]:
    """Returns the number of blocks per stage, given the first block of each stage except the first.

    For example, (2, 5) with 8 blocks gives [2, 3, 3].
    """
    return [end - start for start, end in pairwise((0, *points, blocks))]


def faults_of_boundaries(points: Sequence[int], blocks: int, stages: int) -> str | None:
    """Returns the rule that the user's boundaries break, or None if they are valid.

    The first stage may hold only the embedding and the last only the head. Every other stage needs
    at least one block.
    """
    sizes = sizes_between(points, blocks)
    if len(sizes) == stages and min(sizes) >= 0 and all(sizes[1:-1]):
        return None
    return (
        f"must be {stages - 1} rising numbers from 0 to model.layers = {blocks}: the first block "
        f"of each of the {stages} stages except the first"
    )
