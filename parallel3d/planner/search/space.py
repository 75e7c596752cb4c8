"""The space that a search goes through: every layout that the rules of `config.rules` allow.

A layout is left out only where another one is never slower and never needs more memory: sequence parallelism is used
wherever tp > 1 allows it, and 1F1B stands for GPipe. Layouts that differ only in recompute and in how the data ranks
are used are a *family*: they run one pipeline, and their activations are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parallel3d.config.recipe import ParallelConfig, Recompute
from parallel3d.config.rules_layout import sharding_errors
from parallel3d.config.sharding_strategies import HYBRID_OF, REPLICATED, ShardingName
from parallel3d.planner.search.constraints import size_error
from parallel3d.planner.search.question import Question
from parallel3d.row_split import divisors
from parallel3d.schedules.registry import SCHEDULES, ScheduleName

MOST_MICROBATCH = 64  # sequences
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # from the fastest to the leanest


def families(question: Question) -> dict[tuple[int, int], list[ParallelConfig]]:
    """Returns, for each tp x pp that no rule forbids, one layout of each family: of each schedule and microbatch."""
    return {
        (tp, pp): list(_families_of(question, tp, pp))
        for tp in divisors(question.gpus)
        for pp in divisors(question.gpus // tp)
        if size_error(question, tp, pp) is None
    }


def _families_of(question: Question, tp: int, pp: int) -> Iterator[ParallelConfig]:
    fixed, dp = question.fixed, question.gpus // (tp * pp)
    usual = tp > 1 and question.seq_len % tp == 0
    for microbatch in divisors(question.global_batch_size // dp):
        if microbatch > MOST_MICROBATCH or not _allowed(microbatch, fixed.microbatch_size):
            continue
        microbatches = question.global_batch_size // (dp * microbatch)
        for schedule, virtual in _schedules(question, pp, microbatches):
            yield ParallelConfig(
                pp=pp,
                dp_shard=dp,
                tp=tp,
                virtual_stages=virtual,
                schedule=schedule,
                microbatch_size=microbatch,
                sequence_parallel=usual if fixed.sequence_parallel is None else fixed.sequence_parallel and tp > 1,
            )


def _schedules(question: Question, pp: int, microbatches: int) -> Iterator[tuple[ScheduleName, int]]:
    """Yields each schedule with each number of stages per rank; a pipeline of one rank needs 1F1B alone, which then
    accumulates gradients."""
    fixed = question.fixed
    names = (fixed.schedule,) if fixed.schedule is not None else question.schedules if pp > 1 else ("1f1b",)
    for name in names:
        for virtual in _stages_per_rank(name, question.shape.layers, pp):
            if _allowed(virtual, fixed.virtual_stages) and (virtual == 1 or microbatches % pp == 0):
                yield name, virtual


def _stages_per_rank(name: ScheduleName, layers: int, pp: int) -> list[int]:
    """The numbers of stages that a rank may hold: the schedule's own where it is fixed, else every number that divides
    the layers, or all up to 8 where none does."""
    traits, deepest = SCHEDULES[name], layers // pp
    if traits.stages.usual == 1:
        return [1]
    if pp == 1 or deepest < 2:
        return []
    if traits.stages.most is not None:
        return [traits.stages.usual]
    even = [v for v in range(2, deepest + 1) if layers % (pp * v) == 0]
    return even or list(range(2, min(deepest, 8) + 1))


def recompute_choices(question: Question) -> list[Recompute]:
    """The choices of recompute that the question allows, from the fastest to the leanest."""
    return [kind for kind in _RECOMPUTE if _allowed(kind, question.fixed.recompute)]


def data_axis_splits(question: Question, family: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields a family's ways of using its data ranks, without recompute, that gather and reduce once a step: each split
    with each strategy of `sharding/` that differs there.

    FULL_SHARD that keeps its parameters for a step does what SHARD_GRAD_OP does. SHARD_OPTIMIZER splits over all data
    ranks, and NO_SHARD splits nothing. Other programs' runs are told apart by dp_shard alone."""
    fixed, dp = question.fixed, family.dp_shard
    for shards in divisors(dp):
        replicas = dp // shards
        if not (_allowed(shards, fixed.dp_shard) and _allowed(replicas, fixed.dp_replicate)):
            continue
        split = replace(family, dp_shard=shards, dp_replicate=replicas)
        if not question.program.is_parallel3d or dp == 1:
            yield split
            continue
        names: list[ShardingName] = ["FULL_SHARD"] if shards > 1 else ["NO_SHARD"]
        if shards > 1 and replicas == 1:
            names.append("SHARD_OPTIMIZER")
        for name in names if fixed.sharding is None else [fixed.sharding]:
            if replicas == 1 and name in HYBRID_OF.values():
                continue  # nothing is repeated
            way = replace(split, sharding=HYBRID_OF.get(name, name) if replicas > 1 else name)
            if fixed.gather or fixed.reduce:
                way = replace(way, gather=fixed.gather or "step", reduce=fixed.reduce or "step")
                if next(sharding_errors(way), None) is not None:
                    continue
            yield way


def per_microbatch_variant(question: Question, way: ParallelConfig) -> ParallelConfig | None:
    """The layout that gathers parameters and reduces gradients for each microbatch, None where that is the same one.

    It is leaner and never faster, so it is tried where the layout itself does not fit."""
    fixed, is_own = question.fixed, question.program.is_parallel3d
    several = question.global_batch_size > way.dp * way.microbatch_size
    can = is_own and several and way.dp_shard > 1 and way.sharding not in REPLICATED
    if not can or SCHEDULES[way.schedule].splits_backward or fixed.gather or fixed.reduce:
        return None
    return replace(way, gather="microbatch", reduce="microbatch")


def _allowed(value: object, fixed: object) -> bool:
    return fixed is None or value == fixed
