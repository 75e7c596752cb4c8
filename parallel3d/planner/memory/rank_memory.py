"""The record of a pipeline rank's memory: bytes at the fullest moment of a step, by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MemoryKind = Literal["allocated", "allocated in the first step", "reserved", "device"]
_MOMENTS = 2 / 3  # Adam's moments are two of three states, the third is a float32 copy of the weights


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on each device of one pipeline rank at its peak; the fields up to `fragmentation` add up to `total`."""

    rank: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float  # parameters gathered and gradients on their way (FSDP), received activations
    temporary: float  # a block under recompute, the optimizer's temporaries
    fragmentation: float  # reserved by the allocator and not allocated
    context: float  # CUDA, cuBLAS and NCCL, outside the allocator
    moment: str = ""  # of a step, at which a parallel3d run holds so much

    @property
    def allocated(self) -> float:
        """What `torch.cuda.max_memory_allocated` says."""
        return self.total - self.fragmentation - self.context

    @property
    def reserved(self) -> float:
        """What `torch.cuda.max_memory_reserved` says."""
        return self.total - self.context

    @property
    def total(self) -> float:
        """What the device has in use (`nvidia-smi`)."""
        states = self.parameters + self.gradients + self.optimizer
        at_work = self.activations + self.logits + self.buffers + self.temporary
        return states + at_work + self.fragmentation + self.context

    @property
    def allocated_in_first_step(self) -> float:
        """`allocated` while the optimizer has not made its moments, which come after the backward's peak."""
        states = self.parameters + self.gradients + self.optimizer
        return max(states, self.allocated - self.optimizer * _MOMENTS)

    def of_kind(self, kind: MemoryKind) -> float:
        return {
            "allocated": self.allocated,
            "allocated in the first step": self.allocated_in_first_step,
            "reserved": self.reserved,
            "device": self.total,
        }[kind]
