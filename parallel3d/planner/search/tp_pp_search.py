"""One tp x pp of a question, and its layouts in the order of their time.

Time is cheap to bound and memory is not, so memory is asked for only of layouts whose turn it is: a heap is ordered by
the least time that a family, and then each of its layouts, can take. A layout that comes to its top either fits, and
nothing left is faster, or gives its place to itself with more recompute. A lower bound of a family's memory, its
floor, spares the layouts that cannot fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import inf

from parallel3d.config.recipe import ParallelConfig, Recompute
from parallel3d.planner.memory.floor import MemoryFloor, floor_bytes, memory_floors
from parallel3d.planner.memory.ranks import quick_worst_bytes
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.search.candidate import planned_run
from parallel3d.planner.search.question import Question
from parallel3d.planner.search.space import (
    data_axis_splits,
    leanest_recompute_choices,
    per_microbatch_variant,
    recompute_choices,
)
from parallel3d.planner.time.step import BlockTimeCache, CostCache, least_step_s, step_cost


@dataclass(frozen=True)
class Candidate:
    """A layout's memory, and its time by the closed form (infinite where nobody asks for it)."""

    parallel: ParallelConfig
    step_time_s: float
    bytes: float


@dataclass
class _Family:
    """Layouts that differ in recompute and in the use of the data ranks."""

    parallel: ParallelConfig
    known: CostCache
    held: dict[Recompute, tuple[MemoryFloor, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Waiting:
    """A layout whose memory is not known yet; where `is_family`, all layouts of a family with this recompute."""

    family: _Family
    parallel: ParallelConfig
    kind: int  # index of its recompute
    is_family: bool = False


class TpPpSearch:
    """A tp x pp of a question. `checked` counts the layouts whose memory was computed so far, `fitting` those that
    fit."""

    def __init__(
        self, question: Question, tp: int, pp: int, families: list[ParallelConfig], blocks: BlockTimeCache | None = None
    ) -> None:
        """`blocks` has the block times of other searches of the same model on the same cluster."""
        shared: BlockTimeCache = {} if blocks is None else blocks
        self.tp, self.pp, self.checked, self.fitting = tp, pp, 0, 0
        self._question = question
        self._families = [_Family(parallel, CostCache(shared)) for parallel in families]
        self._recompute_choices = recompute_choices(question)
        self._states: dict[object, tuple[MemoryFloor, ...]] = {}

    @property
    def size(self) -> int:
        """How many layouts it has, each with every recompute."""
        counts: dict[tuple[int, int, str], int] = {}  # the layouts of families that are used alike
        found = 0
        for each in (family.parallel for family in self._families):
            key = (each.dp, each.microbatch_size, each.schedule)
            if key not in counts:
                counts[key] = sum(
                    1 + (per_microbatch_variant(self._question, way) is not None)
                    for way in data_axis_splits(self._question, each)
                )
            found += counts[key] * len(self._recompute_choices)
        return found

    @cached_property
    def least_s(self) -> float:
        """Seconds of a step that none of its layouts goes below."""
        kind = self._recompute_choices[0]
        return min(self._least_s(family, replace(family.parallel, recompute=kind)) for family in self._families)

    def fastest(self, *, within_s: float = inf) -> Iterator[Candidate]:
        """Yields the layouts that fit in the order of time, each use of the data ranks with the least recompute that
        fits, and none that takes longer than `within_s`."""
        usable, order = self._question.usable_bytes, count()
        heap: list[tuple[float, int, _Waiting]] = []

        def push_family(family: _Family, kind: int) -> None:
            if kind < len(self._recompute_choices):
                parallel = replace(family.parallel, recompute=self._recompute_choices[kind])
                least_s = self._least_s(family, parallel)
                heappush(heap, (least_s, next(order), _Waiting(family, parallel, kind, is_family=True)))

        def push(family: _Family, way: ParallelConfig, kind: int) -> bool:
            """Pushes it with the first recompute from `kind` on that may fit; returns whether that is `kind` itself."""
            for index in range(kind, len(self._recompute_choices)):
                parallel = replace(way, recompute=self._recompute_choices[index])
                run = planned_run(self._question, parallel)
                if self._floor(family, run, parallel.recompute) <= usable:
                    seconds = step_cost(run, exact=False, known=family.known).step_time_s
                    heappush(heap, (seconds, next(order), _Waiting(family, parallel, index)))
                    return index == kind
            return False

        for family in self._families:
            push_family(family, 0)
        ready: list[Candidate] = []  # that take equally long
        while heap:
            least_s, _, at = heappop(heap)
            if least_s > within_s:
                break
            if ready and least_s > ready[0].step_time_s:
                yield from sorted(ready, key=lambda priced: priced.bytes)
                ready = []
            if not at.is_family:
                bytes_ = self._bytes(planned_run(self._question, at.parallel), enough=usable)
                if bytes_ <= usable:
                    self.fitting += 1
                    ready.append(Candidate(at.parallel, least_s, bytes_))
                    continue
                push(at.family, at.parallel, at.kind + 1)
                leaner = per_microbatch_variant(self._question, at.parallel) if at.kind == 0 else None
                if leaner is not None and leaner != at.parallel:
                    push(at.family, leaner, 0)
            elif self._family_floor(at.family, self._recompute_choices[at.kind]) > usable:
                push_family(at.family, at.kind + 1)
            else:
                for way in data_axis_splits(self._question, at.family.parallel):
                    fits_plain = push(at.family, way, at.kind) and at.kind == 0
                    leaner = (
                        None if fits_plain else per_microbatch_variant(self._question, way)
                    )  # else once it is known not to fit
                    if leaner is not None:
                        push(at.family, leaner, at.kind)
        yield from sorted(ready, key=lambda priced: priced.bytes)

    def leanest(self, *, enough: float | None = None) -> Candidate | None:
        """Returns the layout that needs least, whether it fits or not; with `enough` the first found that needs no more
        than so many bytes, and None where every layout needs more."""
        found: Candidate | None = None
        most = inf if enough is None else enough
        for floor, family, kind in self._by_floor():
            if floor > most:
                break
            for parallel in self._leanest_ways(family, kind):
                run = planned_run(self._question, parallel)
                if self._floor(family, run, kind) > most:
                    continue
                bytes_ = self._bytes(run, enough=most)
                if bytes_ < most or (enough is not None and bytes_ == most):
                    found, most = Candidate(parallel, inf, bytes_), bytes_
                    if enough is not None:
                        return found
        return found

    def _by_floor(self) -> list[tuple[float, _Family, Recompute]]:
        """Families with what may be their leanest recompute, in the order of their floors."""
        recompute_choices = leanest_recompute_choices(self._question, self.pp)
        found = [
            (self._family_floor(family, kind), family, kind) for family in self._families for kind in recompute_choices
        ]
        return sorted(found, key=lambda each: each[0])

    def _leanest_ways(self, family: _Family, kind: Recompute) -> Iterator[ParallelConfig]:
        for way in data_axis_splits(self._question, family.parallel):
            for each in (way, per_microbatch_variant(self._question, way)):
                if each is not None:
                    yield replace(each, recompute=kind)

    def _bytes(self, run: PlannedRun, *, enough: float) -> float:
        self.checked += 1
        return quick_worst_bytes(run, enough=enough)

    def _least_s(self, family: _Family, parallel: ParallelConfig) -> float:
        return least_step_s(planned_run(self._question, parallel), known=family.known)

    def _floor(self, family: _Family, run: PlannedRun, kind: Recompute) -> float:
        """Bytes that a family's layout holds at least with this recompute."""
        layout = run.layout
        data = (layout.strategy, layout.dp_shard, layout.gather, layout.reduce)
        key = (layout.schedule, layout.virtual_stages, data, layout.microbatches == 1)
        if key not in self._states:
            self._states[key] = memory_floors(run)
        return floor_bytes(run, self._states[key], self._work(family, kind))

    def _family_floor(self, family: _Family, kind: Recompute) -> float:
        """Bytes that every layout of a family with this recompute holds at least."""
        least = self._work(family, kind)
        at_rest = [MemoryFloor(at_rest=each.at_rest) for each in least]
        return floor_bytes(planned_run(self._question, family.parallel), at_rest, least)

    def _work(self, family: _Family, kind: Recompute) -> tuple[MemoryFloor, ...]:
        """What a family holds at least with everything split over all of its data ranks."""
        if kind not in family.held:
            parallel = family.parallel
            split = replace(parallel, dp_shard=parallel.dp, dp_replicate=1, sharding="FULL_SHARD", recompute=kind)
            family.held[kind] = memory_floors(planned_run(self._question, split))
        return family.held[kind]
