"""How many blocks of a transformer each pipeline stage gets, by what they cost. No torch here.

Costs are the floating-point operations of a token's forward; a backward takes about twice as many of each, so that the
proportions are those of a step. The planner prices stages by the same cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel3d.config.recipe import ModelConfig


@dataclass(frozen=True, kw_only=True)
class PartCosts:
    """Of the model's parts, in any unit that all share."""

    embedding: float
    block: float
    head: float

    @classmethod
    def of(cls, *, block_weights: int, hidden: int, vocab: int, seq_len: int) -> PartCosts:
        """Two operations for each weight of a matrix, and causal attention's products with half of seq_len keys on
        average. An embedding is looked up and not multiplied: what it costs is to read and write `hidden` numbers,
        which is as nothing beside a block."""
        attention = 2.0 * hidden * seq_len
        return cls(embedding=2.0 * hidden, block=2.0 * block_weights + attention, head=2.0 * hidden * vocab)


def part_costs(model: ModelConfig, seq_len: int) -> PartCosts:
    """Of a recipe's model. A caller with numbers of its own makes them by `PartCosts.of`."""
    kv = model.key_value_heads * model.head_dim
    mlp_matrices = 2 if model.architecture == "gpt" else 3  # without a gate, and with
    weights = 2 * model.hidden**2 + 2 * model.hidden * kv + mlp_matrices * model.hidden * model.ffn_hidden
    return PartCosts.of(block_weights=weights, hidden=model.hidden, vocab=model.vocab, seq_len=seq_len)


def balanced_cut(blocks: int, stages: int, costs: PartCosts) -> list[int]:
    """The blocks of each stage, so that the costliest stage, embedding and head included, costs as little as can be.

    Each stage but the last has at least one block; a head that costs more than the others have blocks may stand alone.
    Equals go to the middle first. Raises ValueError where there are more stages than blocks.
    """
    if stages > blocks:
        raise ValueError(f"{blocks} layers cannot fill {stages} stages")
    sizes = [1] * stages
    extra = [0.0] * stages
    extra[0] += costs.embedding
    extra[-1] += costs.head
    if stages > 1:
        sizes[-1] = 0
    middle = (stages - 1) / 2

    def priority(stage: int) -> tuple[float, float]:
        # Rounded: an embedding's trifle is no reason to leave the even cut.
        return round(sizes[stage] + extra[stage] / costs.block, 2), abs(stage - middle)

    # A block to the cheapest stage, again and again: optimal, because all blocks cost the same.
    heap = [(*priority(stage), stage) for stage in range(stages)]
    heapq.heapify(heap)
    for _ in range(blocks - sum(sizes)):
        stage = heap[0][-1]
        sizes[stage] += 1
        heapq.heapreplace(heap, (*priority(stage), stage))
    return sizes


def cut_points(sizes: Sequence[int]) -> tuple[int, ...]:
    """The first block of each stage after the first: [2, 3, 3] -> (2, 5)."""
    points, end = [], 0
    for size in sizes[:-1]:
        end += size
        points.append(end)
    return tuple(points)


def sizes_between(points: Sequence[int], blocks: int) -> list[int]:
    """The inverse of `cut_points`."""
    return [end - start for start, end in pairwise((0, *points, blocks))]


def faults_of_boundaries(points: Sequence[int], blocks: int, stages: int) -> str | None:
    """What is wrong with boundaries that a user gives, or None. The first stage may be the embedding alone and the last
    the head alone; a stage between them has blocks."""
    if len(points) != stages - 1:
        return f"must be {stages - 1} numbers, the first block of each of the {stages} stages but the first"
    if not all(0 <= point <= blocks for point in points):
        return f"must lie between 0 and model.layers = {blocks}"
    if any(size <= 0 for size in sizes_between(points, blocks)[1:-1]):
        return "must rise from one to the next: a stage between the first and the last has at least one block"
    return None
