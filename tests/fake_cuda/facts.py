"""What one rank's step of training has done, as a line of JSON. No torch here."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Operand:
    """A tensor that a collective reads or writes."""

    dtype: str
    numel: int
    device: str
    is_contiguous: bool


@dataclass(frozen=True)
class Sent:
    """One call of a collective, a send or a receive, as the rank that made it saw it."""

    op: str  # its name in torch's namespace c10d, such as "allreduce_"
    group: str  # its ranks, and a number that tells it from other groups of the same ranks: "0,2 #1"
    peer: int | None  # the other rank of a send or a receive
    operands: tuple[Operand, ...]
    place: str
    # What an all-to-all sends to each member of the group and receives from it, in elements: (rank, received, sent).
    parts: tuple[tuple[int, int, int], ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members of the group, by their ranks in the world."""
        return tuple(int(rank) for rank in self.group.split(" ")[0].split(","))

    @property
    def content(self) -> str:
        """What has to be the same on all members of the group: the operation, and the dtype and size of each tensor, of
        which an all-to-all may have others on each."""
        sizes = ("" if self.parts else f"[{each.numel}]" for each in self.operands)
        return " ".join([self.op, *(f"{each.dtype}{size}" for each, size in zip(self.operands, sizes, strict=True))])


@dataclass
class Program:
    """The step of one rank of a layout. A place is a file and a function of the project, such as "training/trainer.py
    Trainer.train_step", and `lines` has the numbers of the lines in it."""

    layout: str
    rank: int
    faults: tuple[str, ...] = ()  # the planted ones
    error: str = ""
    waits: Counter[str] = field(default_factory=Counter)  # how often the host waited for the device, by place
    copies: Counter[str] = field(default_factory=Counter)  # how often it copied to the device, by place
    mixed: Counter[str] = field(default_factory=Counter)  # operators with tensors of both devices, by place
    strays: list[str] = field(default_factory=list)  # what the trainer holds beside the device
    sent: list[Sent] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.layout}, rank {self.rank}"

    def to_json(self) -> str:
        return json.dumps(vars(self) | {"sent": [asdict(each) for each in self.sent]})

    @classmethod
    def of_json(cls, text: str) -> Program:
        fields = json.loads(text)
        fields["faults"] = tuple(fields["faults"])
        for key in ("waits", "copies", "mixed"):
            fields[key] = Counter(fields[key])
        fields["sent"] = [
            Sent(
                **{
                    **each,
                    "operands": tuple(Operand(**operand) for operand in each["operands"]),
                    "parts": tuple(tuple(part) for part in each["parts"]),
                }
            )
            for each in fields["sent"]
        ]
        return cls(**fields)
