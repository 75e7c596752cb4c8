"""The record of a pipeline rank's memory: bytes at the fullest moment of a step, by kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MemoryKind = Literal["allocated", "reserved", "device"]
_BESIDE_STATES = ("activations", "logits", "buffers", "temporary", "fragmentation", "context")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on each device of one pipeline rank at its peak; the fields up to `context` add up to
    `total`."""

    rank: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float  # parameters gathered and gradients on their way (FSDP), received activations
    temporary: float  # a block under recompute, the optimizer's temporaries
    fragmentation: float = 0.0  # reserved by the allocator and not allocated
    context: float = 0.0  # CUDA, cuBLAS and NCCL, outside the allocator
    moment: str = ""  # of a step, at which a parallel3d run holds so much

    @property
    def allocated(self) -> float:
        """What `torch.cuda.max_memory_allocated` says."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers + self.temporary

    @property
    def total(self) -> float:
        """What the device has in use (`nvidia-smi`)."""
        return self.allocated + self.fragmentation + self.context

    def with_beside_states(self, scale: float) -> RankMemory:
        """Returns the memory with everything so many times as large that is neither a parameter nor
        a gradient nor an optimizer's state."""
        return replace(self, **{kind: scale * getattr(self, kind) for kind in _BESIDE_STATES})

    def of_kind(self, kind: MemoryKind) -> float:
        """`reserved` is what `torch.cuda.max_memory_reserved` says."""
        return {
            "allocated": self.allocated,
            "reserved": self.total - self.context,
            "device": self.total,
        }[kind]
