"""The memory of a planned run's pipeline ranks, and the rank that needs most."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from parallel3d.planner.memory.moments import moments
from parallel3d.planner.memory.published import published_memory
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.memory.rank_state import RankState
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.schedules.registry import schedule_traits


def memory_by_rank(run: PlannedRun) -> list[RankMemory]:
    """The memory of every pipeline rank; the ranks of the other axes have the same."""
    return [_rank_memory(run, rank) for rank in range(run.layout.pp)]


def needed_bytes(run: PlannedRun, ranks: Iterable[RankMemory]) -> float:
    """Returns what the fullest of a run's ranks cannot do without: the framework's allocator frees
    the rest."""
    freed = run.framework.gives_way
    return max(memory.total - freed * memory.fragmentation for memory in ranks)


def worst_rank(run: PlannedRun) -> RankMemory:
    """The memory of the pipeline rank that needs most."""
    is_known = run.runs_parallel3d and not schedule_traits(run.layout.schedule).splits_backward
    ranks: Iterable[int] = range(run.layout.pp)
    if is_known:
        ranks = _candidates(run)
    memories = [_rank_memory(run, rank) for rank in ranks]
    return max(memories, key=lambda memory: memory.total)


def quick_worst_bytes(run: PlannedRun, *, enough: float = inf) -> float:
    """Returns `worst_rank(run).total` of the few ranks that usually hold most; where one of them
    holds more than `enough`, that rank's."""
    most = 0.0
    for rank in _candidates(run):
        most = max(most, _rank_memory(run, rank).total)
        if most > enough:
            break
    return most


def _candidates(run: PlannedRun) -> Iterable[int]:
    """The ranks that can be the fullest: where a person has cut the stages, every rank. Else the
    first, which holds most microbatches; the last, which has the logits; the first of those with
    most layers; and those behind the first, which may have fewer recomputed blocks where one of
    several is recomputed."""
    pp = run.layout.pp
    if run.layout.stage_boundaries is not None:
        return range(pp)
    layers = [part.layers for part in run.ranks]
    # A mixture's first layers have no experts: the first rank with most of those that have may hold
    # more.
    routed = [part.layers - part.dense for part in run.ranks]
    most_layers = layers.index(max(layers))
    most_routed = routed.index(max(routed))
    end = max(2, run.layout.recompute_every)
    behind_first = range(1, min(pp, end))
    return dict.fromkeys((0, pp - 1, most_layers, most_routed, *behind_first))


def _rank_memory(run: PlannedRun, rank: int) -> RankMemory:
    """A rank's memory, with what was measured of it on the cluster."""
    count = parallel3d_memory if run.runs_parallel3d else published_memory
    counted = count(run, rank)
    scale = run.cluster.scales.memory
    if scale == 1:
        return counted
    return counted.with_beside_states(scale)


def parallel3d_memory(run: PlannedRun, rank: int) -> RankMemory:
    """Returns the memory of a rank of this project's own framework, at the fullest moment of a
    step, as it is counted."""
    state = RankState(run, rank)
    scale = run.cluster.scales.memory
    fullest = max(
        moments(state),
        key=lambda moment: moment.gradients + scale * (moment.total - moment.gradients),
    )
    parameters, gradients, optimizer = state.at_rest
    fragmentation = 0.0
    context = 0.0
    if not run.on_cpu:
        at_work = fullest.total - fullest.gradients
        fragmentation = run.framework.fragmentation * at_work + run.framework.cache_bytes
        context = run.framework.context_bytes
    return RankMemory(
        rank=rank,
        parameters=parameters,
        gradients=gradients + fullest.gradients,
        optimizer=optimizer,
        activations=fullest.activations,
        logits=fullest.logits,
        buffers=fullest.buffers,
        temporary=fullest.temporary,
        fragmentation=fragmentation,
        context=context,
        moment=fullest.moment,
    )
