"""Start and end times of the actions of a schedule, simulated or measured, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parallel3d.schedules.schedule import Action


class Span(NamedTuple):
    """One action with its start and end."""

    rank: int
    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans of all ranks, ordered by start within each rank. Simulated times can be in any unit."""

    name: str
    ranks: int
    spans: tuple[Span, ...]

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        rows: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return tuple(map(tuple, rows))

    @cached_property
    def start_s(self) -> float:
        return min((span.start_s for span in self.spans), default=0.0)

    @cached_property
    def makespan_s(self) -> float:
        """Time from the start of the first action to the end of the last."""
        return max((span.end_s for span in self.spans), default=0.0) - self.start_s

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Compute time of each rank."""
        return tuple(sum(span.duration_s for span in spans) for spans in self.by_rank)

    @property
    def bubble_fraction(self) -> float:
        """Idle fraction of total rank-time, which is ranks x makespan."""
        total_s = self.ranks * self.makespan_s
        return max(0.0, 1.0 - sum(self.busy_s) / total_s) if total_s else 0.0
