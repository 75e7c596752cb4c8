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
    """Returns what the fullest of a run's ranks cannot do without: the program's allocator frees
    the rest."""
    return max(memory.total - run.program.gives_way * memory.fragmentation for memory in ranks)


def worst_rank(run: PlannedRun) -> RankMemory:
    """The memory of the pipeline rank that needs most."""
    is_known = run.runs_parallel3d and not schedule_traits(run.layout.schedule).splits_backward
    ranks = _candidates(run) if is_known else range(run.layout.pp)
    return max((_rank_memory(run, rank) for rank in ranks), key=lambda memory: memory.total)


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
    """The ranks that can be the fullest: where a person has cut the stages, every rank."""
    if run.layout.stage_boundaries is not None:
        return range(run.layout.pp)
    return dict.fromkeys(
        (*_usual_candidates(run), *_next_candidates(run, run.layout.recompute_every))
    )


def _usual_candidates(run: PlannedRun) -> tuple[int, ...]:
    """The ranks that can be the fullest where the planner cuts the stages: the first, which holds
    most microbatches; the last, which has the logits; and the first of those with most layers."""
    layers = [part.layers for part in run.ranks]
    # A mixture's first layers have no experts: the first rank with most of those that have may hold
    # more.
    routed = [part.layers - part.dense for part in run.ranks]
    return 0, run.layout.pp - 1, layers.index(max(layers)), routed.index(max(routed))


def _next_candidates(run: PlannedRun, every: int) -> range:
    """The ranks behind the first, which may have fewer recomputed blocks where one of several is
    recomputed."""
    return range(1, min(run.layout.pp, max(2, every)))


def _rank_memory(run: PlannedRun, rank: int) -> RankMemory:
    """A rank's memory, with what was measured of it on the cluster."""
    counted = parallel3d_memory(run, rank) if run.runs_parallel3d else published_memory(run, rank)
    scale = run.cluster.scales.memory
    return counted if scale == 1 else counted.with_beside_states(scale)


def parallel3d_memory(run: PlannedRun, rank: int) -> RankMemory:
    """Returns the memory of a rank of this project's own program, at the fullest moment of a step,
    as it is counted."""
    state = RankState(run, rank)
    scale = run.cluster.scales.memory
    fullest = max(
        moments(state),
        key=lambda moment: moment.gradients + scale * (moment.total - moment.gradients),
    )
    parameters, gradients, optimizer = state.at_rest
    program = run.program
    at_work = fullest.total - fullest.gradients
    return RankMemory(
        rank=rank,
        parameters=parameters,
        gradients=gradients + fullest.gradients,
        optimizer=optimizer,
        activations=fullest.activations,
        logits=fullest.logits,
        buffers=fullest.buffers,
        temporary=fullest.temporary,
        fragmentation=0.0 if run.on_cpu else program.fragmentation * at_work + program.cache_bytes,
        context=0.0 if run.on_cpu else program.context_bytes,
        moment=fullest.moment,
    )
