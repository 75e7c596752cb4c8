"""What one rank does in a step of training. No torch here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Operand:
    """A tensor that a collective reads or writes."""

    dtype: str
    numel: int
    device: str
    is_contiguous: bool


@dataclass(frozen=True)
class Sent:
    """One call of a collective, a send or a receive."""

    op: str  # the name in the namespace c10d, such as "allreduce_"
    group: str
    ranks: tuple[int, ...]
    peer: int | None  # the other rank of a send or a receive
    operands: tuple[Operand, ...]
    place: str

    @property
    def content(self) -> str:
        """Dtype and size of each tensor, which are the same on all members of the group. The parts
        of an all-to-all may have any size."""
        if self.op == "alltoall_base_":
            return " ".join(each.dtype for each in self.operands)
        return " ".join(f"{each.dtype}[{each.numel}]" for each in self.operands)


@dataclass
class Program:
    """The step of one rank of a layout. Places are lines of the project."""

    layout: str
    rank: int
    error: str = ""
    waits: Counter[str] = field(default_factory=Counter)  # of the host for the device, by place
    copies: Counter[str] = field(default_factory=Counter)  # to the device, by place
    misplaced: list[str] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
