"""A lower bound of a run's memory, which a search computes for thousands of layouts in the place of
the moments."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from parallel3d.config.recipe import Recompute
from parallel3d.planner.memory.rank_state import RankState
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.schedules.build import first_forwards, live_microbatches, live_with_all_gradients
from parallel3d.schedules.classic import group_sizes
from parallel3d.schedules.registry import SCHEDULES


class MemoryFloor(NamedTuple):
    """Bytes that a rank has at least, at rest and when most of its forwards are alive, or when it
    has all of its gradients, unreduced. Only `activations` and `amid` depend on recompute and on
    the size of a microbatch."""

    at_rest: float = 0.0
    gathered: float = 0.0
    activations: float = 0.0  # with logits
    gathered_amid: float = 0.0
    gradients: float = 0.0
    amid: float = -inf  # activations beside the gradients; no such moment is known


class RunFloors:
    """The floors of the first and the last pipeline rank of a parallel3d run, whatever it
    recomputes."""

    def __init__(self, run: PlannedRun) -> None:
        first_and_last = dict.fromkeys((0, run.layout.pp - 1))
        self._ranks = [RankState(run, rank) for rank in first_and_last]
        self._alive = [_most_alive(rank) for rank in self._ranks]

    @property
    def states(self) -> tuple[MemoryFloor, ...]:
        """The floors without activations."""
        return tuple(map(_rank_floor, self._ranks))

    def work(self, recompute: Recompute, every: int | None = None) -> tuple[MemoryFloor, ...]:
        """Returns what is at rest, and the activations with this recompute in the place of the
        run's own."""
        found = []
        for state, alive in zip(self._ranks, self._alive, strict=True):
            found.append(_with_forwards(state, alive, recompute, every or 1))
        return tuple(found)


def floor_bytes(
    run: PlannedRun, states: Sequence[MemoryFloor], work: Sequence[MemoryFloor]
) -> float:
    """A lower bound of `worst_rank(run).total`, from the states of one run and the activations
    of another that has them in common with it. Of `run` itself only the framework and the device
    count."""
    framework = run.framework
    scale = run.cluster.scales.memory
    around = 0.0
    if not run.on_cpu:
        around = scale * (framework.cache_bytes + framework.context_bytes)
    more = scale * (1.0 if run.on_cpu else 1 + framework.fragmentation)
    most = 0.0
    for has, does in zip(states, work, strict=True):
        fullest = more * (has.gathered + does.activations)
        amid = has.gradients + more * (has.gathered_amid + does.amid)
        most = max(most, has.at_rest + max(fullest, amid))
    return most + around


def _rank_floor(state: RankState) -> MemoryFloor:
    """Returns what does not depend on recompute."""
    gathered = float(sum(stage.gathered for stage in state.stages))
    if SCHEDULES[state.layout.schedule].splits_backward:
        return MemoryFloor(sum(state.at_rest), gathered)
    return MemoryFloor(
        at_rest=sum(state.at_rest),
        gathered=gathered,
        gathered_amid=0.0 if state.layout.gather_cadence == "microbatch" else gathered,
        gradients=sum(stage.whole_gradients for stage in state.stages),
    )


def _most_alive(state: RankState) -> tuple[int, int | None]:
    """Returns how many forwards of a rank are alive at once, at most and beside all of its
    gradients; where a forward may leave a part of what it keeps to the second half of its backward,
    how many come before any backward."""
    layout = state.layout
    name = layout.schedule
    numbers = {
        "pp": layout.pp,
        "rank": state.rank,
        "microbatches": layout.microbatches,
        "virtual_stages": layout.virtual_stages,
    }
    if SCHEDULES[name].splits_backward:
        return first_forwards(name, **numbers), None
    return live_microbatches(name, **numbers), live_with_all_gradients(name, **numbers)


def _with_forwards(
    state: RankState, alive: tuple[int, int | None], recompute: Recompute, every: int
) -> MemoryFloor:
    """Returns a floor of what is at rest, and of the activations that forwards keep under a
    recompute."""
    layout = state.layout
    live, amid = alive
    slices = [(part, first % every) for part, first in state.slices]
    of_slice = {each: state.kept_by_stage(*each, recompute, every) for each in {*slices}}
    kept = [of_slice[each] for each in slices]
    activations = live * min(kept)
    # the first are alive: groups of microbatches, stage after stage
    if SCHEDULES[layout.schedule].warm_up is not None:
        _, group = group_sizes(layout.pp, layout.microbatches)
        rounds, rest = divmod(live, group * len(kept))
        activations = rounds * group * sum(kept)
        in_last_round = 0.0
        for turn, each in enumerate(kept):
            in_last_round += min(max(rest - turn * group, 0), group) * each
        activations += in_last_round
    kept_amid = -inf
    if amid is not None:
        kept_amid = amid * min(kept)
    return MemoryFloor(sum(state.at_rest), activations=activations, amid=kept_amid)
