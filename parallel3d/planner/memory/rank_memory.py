"""Peak memory of a pipeline rank, by kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MemoryKind = Literal["allocated", "reserved", "device"]
_BESIDE_STATES = ("activations", "logits", "buffers", "temporary", "fragmentation", "context")


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes per device of one pipeline rank at its peak. Fields up to `context` add up to
    `total`."""

    rank: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float  # all-gathered parameters, messages; for other frameworks, their gradients
    temporary: float  # operators, a recomputed block, or the optimizer step
    fragmentation: float = 0.0  # Memory that the allocator has reserved but not allocated.
    context: float = 0.0  # CUDA, cuBLAS and NCCL, outside the allocator
    moment: str = ""  # Phase of the step at the peak. Only for parallel3d.

    @property
    def allocated(self) -> float:
        """Estimate of `torch.cuda.max_memory_allocated`."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers + self.temporary

    @property
    def total(self) -> float:
        """Memory used on the device, as shown by `nvidia-smi`."""
        return self.allocated + self.fragmentation + self.context

    def with_beside_states(self, scale: float) -> RankMemory:
        """Returns a copy with all fields scaled except parameters, gradients and optimizer
        states."""
        return replace(self, **{kind: scale * getattr(self, kind) for kind in _BESIDE_STATES})

    def of_kind(self, kind: MemoryKind) -> float:
        """Returns the bytes of a kind: "reserved" estimates `torch.cuda.max_memory_reserved`."""
        return {
            "allocated": self.allocated,
            "reserved": self.total - self.context,
            "device": self.total,
        }[kind]
