"""The seconds of a training step, and of one of its microbatches, by cause."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class TimeParts:
    """Seconds of a step on the busiest rank, by cause; they add up to the step."""

    compute: float
    recompute: float
    tp: float
    cp: float
    pp_bubble: float
    pp_p2p: float
    dp: float
    optimizer: float
    overhead: float

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True, kw_only=True)
class BlockParts:
    """Seconds of one block and one microbatch, by cause: in one direction, or in both."""

    compute: float
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    dp: float = 0.0
    overhead: float = 0.0

    @cached_property
    def total(self) -> float:
        return self.compute + self.recompute + self.tp + self.cp + self.dp + self.overhead


@dataclass(frozen=True, kw_only=True)
class MicrobatchTimes:
    """Seconds of one microbatch, forward and backward: of a block, and of the model's two ends."""

    forward: BlockParts
    backward: BlockParts
    weight_s: float  # the part of a block's backward that only weights' gradients need
    head_s: tuple[float, float]
    embedding_s: tuple[float, float]
    end_overhead_s: float = 0.0  # what the host adds to each end, included there

    @cached_property
    def block(self) -> BlockParts:
        """A block's seconds in both directions."""
        ways = (self.forward, self.backward)
        return BlockParts(**{part.name: sum(getattr(way, part.name) for way in ways) for part in fields(BlockParts)})
