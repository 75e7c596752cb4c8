"""The seconds of a training step, by cause."""

from __future__ import annotations

from dataclasses import dataclass, fields


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
