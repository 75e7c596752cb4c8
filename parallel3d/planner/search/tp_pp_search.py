"""Finds the layouts of one tp x pp that fit, in the order of step time.

Memory takes longer to compute than time, so it is computed only for layouts at the top of a heap.
Entries are ordered by lower bounds of the step time. A group of families with the same microbatch
is replaced by its families, and a family by its layouts. If the layout at the top fits, none of the
others is faster. Otherwise, variants that need less memory replace it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import count, product
from math import inf
from operator import attrgetter
from typing import NamedTuple

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.memory.estimate import RankEstimate
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.planned_run import varied
from parallel3d.planner.search.request import Candidate, PlanRequest
from parallel3d.planner.search.space import (
    RecomputeChoice,
    data_axis_splits,
    data_layouts,
    more_recompute,
    per_microbatch_variant,
    recompute_choices,
)
from parallel3d.planner.time.step import (
    BlockTimeCache,
    CostCache,
    least_step_s,
    least_work_s,
    step_cost,
)
from parallel3d.schedules.registry import schedule_traits

# Attributes of a layout that determine the memory of its states.
_STATE_KEYS = attrgetter("schedule", "virtual_stages", "strategy", "shard_ranks", "ep", "gather")


@dataclass(eq=False)
class _Family:
    """Layouts that differ in recompute and data parallelism.

    `first` has the recompute choices that were tried first.
    """

    parallel: ParallelConfig
    known: CostCache
    first: set[RecomputeChoice] = field(default_factory=set)
    # Bytes of the worst rank, keyed by recompute and data-parallel layout.
    bytes: dict[object, float] = field(default_factory=dict)


class _Waiting(NamedTuple):
    """A heap entry: families with equal microbatch times, one family with a `recompute`, or one
    layout."""

    least_s: float  # lower bound of the step time, or the closed-form step time of a layout
    order: int  # tie-breaker: first in, first out
    families: list[_Family]
    layout: ParallelConfig | None = None
    recompute: RecomputeChoice | None = None


class TpPpSearch:
    """Searches the layouts of one tp x pp.

    `checked` counts the layouts whose memory was computed. `priced` has those of `fastest`, also if
    they do not fit. `waiting` has the heap entries that `fastest` has not reached yet.
    """

    def __init__(
        self, request: PlanRequest, families: list[ParallelConfig], blocks: BlockTimeCache
    ) -> None:
        """`blocks` is a cache that searches for the same model and cluster share."""
        pp = families[0].pp
        self.checked = 0
        self.priced: list[Candidate] = []
        self._request = request
        self._families = [_Family(parallel, CostCache(blocks)) for parallel in families]
        self._recompute_choices = recompute_choices(request, pp)
        self._has_single_blocks = request.shape.layers <= pp  # one block per rank
        self._pushed = count()
        self._states: dict[object, float] = {}
        self._activations = cache(self._least_activations)

    @property
    def least_s(self) -> float:
        """Lower bound of the step time of all remaining layouts."""
        return self.waiting[0].least_s

    @cached_property
    def waiting(self) -> list[_Waiting]:
        """The heap. Initially, an entry has all families with equal microbatch times."""
        groups = defaultdict(list)
        for family in self._families:
            parallel = family.parallel
            groups[parallel.microbatch_size, parallel.cp, parallel.ep].append(family)
        entries = [
            _Waiting(self._least_work_s(group), next(self._pushed), group)
            for group in groups.values()
        ]
        return sorted(entries)

    def fastest(self, *, within_s: float = inf) -> Iterator[Candidate]:
        """Yields the layouts that fit, in ascending order of step time, up to `within_s`.

        A data-parallel layout appears with the least recompute that fits. Selective and every_n
        may both appear.
        """
        while self.waiting and self.least_s <= within_s:
            least_s, _, families, layout, recompute = heappop(self.waiting)
            for family in families:
                if recompute is None:
                    self._push(family, self._recompute_choices[0])
                elif layout is None:
                    family.first.add(recompute)
                    for way in data_axis_splits(self._request, family.parallel):
                        self._push(family, recompute, way)
                else:
                    self.checked += 1
                    usable = self._request.usable_bytes
                    run = self._request.planned_run(layout)
                    bytes_ = worst_rank(run, enough=usable).total
                    priced = Candidate(layout, least_s, bytes_)
                    self.priced.append(priced)
                    if bytes_ <= usable:
                        yield priced
                    else:
                        self._push_less_memory(family, recompute, layout)

    def _push(
        self, family: _Family, kind: RecomputeChoice, way: ParallelConfig | None = None
    ) -> None:
        """Pushes a family or one of its layouts, or variants if its memory bound is too high."""
        if self._lower_bound(family, kind, way) > self._request.usable_bytes:
            self._push_less_memory(family, kind, way)
            return
        layout = kind.of(way or family.parallel)
        run = self._request.planned_run(layout)
        if way is None:
            least_s = least_step_s(run, known=family.known)
        else:
            least_s = step_cost(run, exact=False, known=family.known).step_time_s
        entry = _Waiting(least_s, next(self._pushed), [family], way and layout, kind)
        heappush(self.waiting, entry)

    def _push_less_memory(
        self, family: _Family, kind: RecomputeChoice, way: ParallelConfig | None
    ) -> None:
        """Pushes variants with more recompute and, for a layout, with gathers per microbatch."""
        choices = self._recompute_choices
        # With one block per rank, recompute needs more memory, so do not prune by the last choice.
        is_single = way is None and self._has_single_blocks
        if is_single or self._lower_bound(family, choices[-1], way) <= self._request.usable_bytes:
            for more in more_recompute(choices, kind):
                self._push(family, more, way)
        if way and kind in family.first:
            variant = per_microbatch_variant(self._request, way)
            if variant and variant != way:
                self._push(family, kind, variant)

    def lowest_memory(self, *, within: float = inf, is_any: bool = False) -> Candidate | None:
        """Returns the layout with the lowest memory, at most `within` bytes, or None.

        If `is_any`, returns the first one found within the limit.
        """
        # With several blocks per rank, the last choice always needs the least memory, so only it
        # is checked. With one block, recompute can need more memory than no recompute.
        choices = self._recompute_choices
        if not self._has_single_blocks:
            choices = choices[-1:]
        pairs = product(self._families, choices)
        found: Candidate | None = None
        for family, kind in sorted(pairs, key=lambda pair: self._lower_bound(*pair)):
            if self._lower_bound(family, kind) > within:
                break
            ways: Iterable[ParallelConfig] = data_layouts(self._request, family.parallel)
            if not is_any:  # Start with low bounds to exclude the others early.
                ways = sorted(ways, key=lambda way: self._lower_bound(family, kind, way))
            for way in ways:
                if self._lower_bound(family, kind, way) > within:
                    continue
                bytes_ = self._layout_bytes(family, kind, way)
                if bytes_ < within or (found is None and bytes_ == within):
                    found = Candidate(kind.of(way), inf, bytes_)
                    within = bytes_
                    if is_any:
                        return found
        return found

    def _layout_bytes(self, family: _Family, kind: RecomputeChoice, way: ParallelConfig) -> float:
        """Returns the bytes of the worst rank of a layout with this recompute, cached."""
        key = kind, way.dp_shard, way.sharding, way.gather
        if key not in family.bytes:
            self.checked += 1
            family.bytes[key] = worst_rank(self._request.planned_run(kind.of(way))).total
        return family.bytes[key]

    def _least_work_s(self, group: list[_Family]) -> float:
        first = group[0]
        run = self._request.planned_run(self._recompute_choices[0].of(first.parallel))
        layouts = [family.parallel for family in group]
        turns = max(
            each.virtual_stages if schedule_traits(each.schedule).ramp_bubble else inf
            for each in layouts
        )
        return least_work_s(run, known=first.known, turns=turns)

    def _lower_bound(
        self, family: _Family, kind: RecomputeChoice, way: ParallelConfig | None = None
    ) -> float:
        """Returns a lower bound of the bytes of a layout with this recompute, or of all layouts of
        the family.

        For other frameworks, whose memory is faster to compute than time, it is exact for a layout
        and 0 for a family.
        """
        if not self._request.framework.is_parallel3d:
            return self._layout_bytes(family, kind, way) if way else 0.0
        way = way or _all_sharded(family.parallel)
        key = _STATE_KEYS(way)
        if key not in self._states:
            run = self._request.planned_run(way)
            self._states[key] = RankEstimate(run, 0).least_states
        return self._states[key] + self._activations(family, kind)

    def _least_activations(self, family: _Family, kind: RecomputeChoice) -> float:
        run = self._request.planned_run(kind.of(_all_sharded(family.parallel)))
        return RankEstimate(run, 0).least_activations


def _all_sharded(parallel: ParallelConfig) -> ParallelConfig:
    """Returns the layout of a family that is fully sharded and gathered per microbatch."""
    return varied(parallel, sharding="FULL_SHARD", gather="microbatch")
