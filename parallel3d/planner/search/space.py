"""The space that a search goes through: every layout that the rules of `config.rules`, what the
user has fixed and the number of devices allow.

A layout is left out only where another one is never slower and never needs more memory: sequence
parallelism is used wherever tp > 1 allows it, and 1F1B stands for GPipe. Layouts that differ only
in recompute and in how the data ranks are used are a *family*: they run one pipeline, and their
activations are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import ceil, prod
from typing import NamedTuple

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, Recompute, TrainConfig
from parallel3d.config.rules_layout import (
    batch_errors,
    model_errors,
    parallel_errors,
    schedule_errors,
    sharding_errors,
)
from parallel3d.config.schema import range_errors
from parallel3d.config.sharding_strategies import HYBRID_OF, REPLICATED, ShardingName
from parallel3d.config.suggestions import any_of, nearest
from parallel3d.errors import ConfigError
from parallel3d.planner.model.planned_run import FrameworkLayout, varied
from parallel3d.planner.search.request import PlanRequest
from parallel3d.schedules.registry import SCHEDULES, ScheduleName
from parallel3d.shard_sizes import divisors

MOST_MICROBATCH = 64  # sequences
MOST_VIRTUAL = 12  # stages of a rank that are tried where none is fixed: no published run has more
_EVERY = (8, 4, 3, 2)  # blocks of which one is recomputed, from the fastest to the leanest


class RecomputeChoice(NamedTuple):
    """The two keys of a recipe that say what is recomputed."""

    recompute: Recompute
    recompute_every: int | None = None

    def of(self, parallel: ParallelConfig) -> ParallelConfig:
        """Returns the layout with this recompute."""
        return varied(parallel, recompute=self.recompute, recompute_every=self.recompute_every)


def layout_errors(request: PlanRequest, parallel: ParallelConfig) -> Iterator[str]:
    """Yields a line for each rule that a layout breaks, in the trainer's words, first those of
    ranges alone."""
    shape = request.planned_shape(parallel.tp)
    numbers = {
        key: getattr(shape, key) for key in ("layers", "hidden", "heads", "ffn_hidden", "vocab")
    }
    model = ModelConfig(
        **numbers,
        kv_heads=None if shape.kv_heads == shape.heads else shape.kv_heads,
        head_dim=None if shape.query_hidden == shape.hidden else shape.head_dim,
    )
    keys = [key.name for key in fields(ParallelConfig)]  # without those of FrameworkLayout
    parallel = ParallelConfig(**{key: getattr(parallel, key) for key in keys})
    train = TrainConfig(
        steps=1, global_batch_size=request.global_batch_size, seq_len=request.seq_len
    )
    recipe = Recipe(model=model, train=train, parallel=parallel)
    if out_of_range := range_errors(recipe):
        yield from out_of_range
        return
    for rule in (parallel_errors, model_errors, schedule_errors, batch_errors):
        yield from rule(recipe)
    yield from sharding_errors(parallel)
    if not request.framework.is_parallel3d and shape.kv_heads % parallel.tp:
        tries = any_of(nearest(divisors(shape.kv_heads), parallel.tp))
        must = f"must divide model.kv_heads = {shape.kv_heads} in {request.framework.name}"
        yield f"parallel.tp = {parallel.tp}: {must}; try {tries}"


def families(request: PlanRequest) -> dict[tuple[int, int], list[ParallelConfig]]:
    """Returns, for each tp x pp that no rule forbids, one layout of each family: of each schedule
    and microbatch."""
    found = {}
    for tp in divisors(request.gpus):
        for pp in divisors(request.gpus // tp):
            own = [*_families_of(request, tp, pp)]
            if own:
                found[tp, pp] = own
    return found


def _families_of(request: PlanRequest, tp: int, pp: int) -> Iterator[ParallelConfig]:
    fixed = request.fixed
    sizes = (
        (tp, fixed.tp, fixed.max_tp),
        (pp, fixed.pp, fixed.max_pp),
    )
    for size, asked, most in sizes:
        if not _allowed(size, asked) or size > (most or size):
            return
    sequence_parallel = request.seq_len % tp == 0
    if fixed.sequence_parallel is not None:
        sequence_parallel = fixed.sequence_parallel
    for cp, ep in request.axes_beside(tp, pp):
        dp = request.gpus // (tp * pp * cp)
        plain = ParallelConfig(
            pp=pp,
            dp_shard=dp,
            tp=tp,
            sequence_parallel=sequence_parallel and tp > 1,
            offload=bool(fixed.offload),
        )
        if next(layout_errors(request, plain), None) is not None:
            continue
        if request.framework.axes:
            plain = FrameworkLayout(**vars(plain), cp=cp, ep=ep)
        for microbatch in divisors(request.global_batch_size // dp):
            if microbatch > MOST_MICROBATCH or not _allowed(microbatch, fixed.microbatch_size):
                continue
            microbatches = request.global_batch_size // (dp * microbatch)
            for name, virtual in _schedules(request, pp, microbatches):
                yield varied(
                    plain, schedule=name, virtual_stages=virtual, microbatch_size=microbatch
                )


def _schedules(
    request: PlanRequest, pp: int, microbatches: int
) -> Iterator[tuple[ScheduleName, int]]:
    """Yields each schedule with each number of stages per rank; one rank needs 1F1B alone, to
    accumulate gradients."""
    fixed = request.fixed
    layers = request.shape.layers
    if fixed.schedule is not None:
        names: Sequence[ScheduleName] = (fixed.schedule,)
    elif pp > 1:
        names = request.schedules
    else:
        names = ("1f1b",)
    for name in names:
        stages = SCHEDULES[name].stages
        deepest = layers // pp
        if stages.usual == 1:
            counts = [1]
        elif pp == 1 or deepest < 2:
            counts = []
        elif stages.most is not None:
            counts = [stages.usual]
        else:  # every number that divides the layers, or all up to 8 where none does
            most = deepest
            if fixed.virtual_stages is None:
                most = min(deepest, MOST_VIRTUAL)
            even = [v for v in range(2, most + 1) if layers % (pp * v) == 0]
            counts = even or list(range(2, min(deepest, 8) + 1))
        for virtual in counts:
            if _allowed(virtual, fixed.virtual_stages) and (virtual == 1 or microbatches % pp == 0):
                yield name, virtual


def recompute_choices(request: PlanRequest, pp: int) -> list[RecomputeChoice]:
    """The choices of recompute that the request allows, from the least that is saved to the most.
    Which of selective and every_n is faster is the model's to say."""
    fixed = request.fixed
    of_rank = max(1, request.shape.layers // pp)
    often: tuple[int, ...] = _EVERY
    if fixed.recompute_every is not None:
        often = (fixed.recompute_every,)
    every = [
        RecomputeChoice("every_n", n) for n in often if n <= of_rank or n == fixed.recompute_every
    ]
    choices = [
        RecomputeChoice("none"),
        RecomputeChoice("selective"),
        *every,
        RecomputeChoice("full"),
    ]
    asked = "every_n" if fixed.recompute_every else fixed.recompute
    return [choice for choice in choices if _allowed(choice.recompute, asked)]


def leaner_choices(
    choices: list[RecomputeChoice], choice: RecomputeChoice
) -> list[RecomputeChoice]:
    """Returns what may fit where a choice does not, each slower than that choice: after none both
    selective and the next one, after selective nothing, because the next one is tried beside it."""
    after = choices[choices.index(choice) + 1 :]
    if choice.recompute == "selective":
        return []
    return after[: 2 if after and after[0].recompute == "selective" else 1]


def data_axis_splits(request: PlanRequest, family: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields a family's ways of using its data ranks, without recompute, that gather and reduce
    once a step: each split with each strategy of `sharding/` that differs there.

    FULL_SHARD that keeps its parameters for a step does what SHARD_GRAD_OP does. SHARD_OPTIMIZER
    splits over all data ranks, and NO_SHARD splits nothing. Other frameworks split all over
    dp_shard, or the optimizer over all, unless dp_shard is fixed."""
    fixed = request.fixed
    dp = family.dp_shard
    for shards in divisors(dp):
        replicas = dp // shards
        if not (_allowed(shards, fixed.dp_shard) and _allowed(replicas, fixed.dp_replicate)):
            continue
        if not request.framework.is_parallel3d or dp == 1:
            way = varied(family, dp_shard=shards, dp_replicate=replicas)
            is_zero_1 = request.framework.splits_optimizer_alone and fixed.sharding is None
            if not is_zero_1 or dp == 1 or (fixed.dp_shard == 1 and replicas > 1):
                yield way
            elif replicas == 1 or (fixed.dp_shard is not None and shards > 1):
                yield varied(way, sharding="SHARD_OPTIMIZER")
            continue
        names: list[ShardingName] = ["NO_SHARD"]
        if fixed.sharding is not None:
            names = [fixed.sharding]
        elif shards > 1:
            names = ["FULL_SHARD"]
            if replicas == 1:
                names.append("SHARD_OPTIMIZER")
        for name in names:
            if replicas == 1 and name in HYBRID_OF.values():
                continue  # nothing is repeated
            strategy = name
            if replicas > 1:
                strategy = HYBRID_OF.get(name, name)
            way = varied(family, dp_shard=shards, dp_replicate=replicas, sharding=strategy)
            several = request.global_batch_size > way.dp * way.microbatch_size
            if several and way.gather_cadence == "microbatch":
                way = varied(way, gather="step")
            if fixed.gather or fixed.reduce or fixed.offload:
                gather = fixed.gather or way.gather
                way = varied(way, gather=gather, reduce=fixed.reduce or "step")
                if next(sharding_errors(way), None) is not None:
                    continue
            yield way


def per_microbatch_variant(request: PlanRequest, way: ParallelConfig) -> ParallelConfig | None:
    """The layout that gathers parameters and reduces gradients for each microbatch, None where that
    is the same one.

    It is leaner and never faster, so it is tried where the layout itself does not fit."""
    fixed = request.fixed
    is_own = request.framework.is_parallel3d
    several = request.global_batch_size > way.dp * way.microbatch_size
    can = is_own and several and way.dp_shard > 1 and way.sharding not in REPLICATED
    if not can or SCHEDULES[way.schedule].splits_backward or fixed.gather or fixed.reduce:
        return None
    return varied(way, gather="microbatch", reduce="microbatch")


def _allowed(value: object, fixed: object) -> bool:
    return fixed is None or value == fixed


def check_fixed(request: PlanRequest) -> None:
    """Raises ConfigError for the first value that no layout can have, whatever the memory."""
    fixed = request.fixed
    gpus = request.gpus
    _check_other_axes(request)
    for name in ("tp", "pp"):
        value = getattr(fixed, name)
        most = getattr(fixed, f"max_{name}")
        if value is not None and most is not None and value > most:
            rule = f"more than --max-{name} {most}; drop one of the two"
            raise ConfigError(f"{name} = {value}: {rule}")
    said = {}
    for name in ("pp", "dp_replicate", "dp_shard", "tp", "cp"):
        value = getattr(fixed, name)
        if value is not None:
            said[name] = value
    product = prod(said.values())
    text = " x ".join(f"{name} = {value}" for name, value in said.items())
    if error := next(layout_errors(request, _least_layout(request)), None):
        raise ConfigError(error)
    if fixed.sequence_parallel and fixed.tp == 1:
        raise ConfigError("sequence_parallel = true: divides over tp, and tp = 1; try tp=2")
    if gpus % product:
        near = ceil(gpus / product) * product
        raise ConfigError(f"{text}: must divide gpus = {gpus}; try --gpus {near}")
    needed = {"pp", "dp_replicate", "dp_shard", "tp"}
    if request.framework.axes:
        needed.add("cp")
    if needed <= {*said} and product != gpus:
        raise ConfigError(f"{text}: must be gpus = {gpus}; leave one of them free")


def _check_other_axes(request: PlanRequest) -> None:
    """Raises ConfigError for a cp or an ep that the framework or the model does not have."""
    fixed = request.fixed
    framework = request.framework
    experts = request.shape.experts
    if fixed.cp is not None and "cp" not in framework.axes:
        has = "--framework megatron-core has it, and prices it"
        raise ConfigError(
            f"cp = {fixed.cp}: context parallelism is not among the axes of {framework.name}; {has}"
        )
    if fixed.cp is not None and request.seq_len % (2 * fixed.cp):
        rule = f"twice as much must divide --seq-len {request.seq_len}"
        raise ConfigError(f"cp = {fixed.cp}: {rule}; try cp=2")
    if fixed.ep is not None and (experts is None or "ep" not in framework.axes):
        rule = f"{framework.name} divides no experts of {request.shape.name}; leave it out"
        raise ConfigError(f"ep = {fixed.ep}: {rule}")
    if fixed.ep is not None and experts is not None and experts.count % fixed.ep:
        tries = any_of(nearest(divisors(experts.count), fixed.ep))
        rule = f"must divide {request.shape.name}'s {experts.count} experts; try {tries}"
        raise ConfigError(f"ep = {fixed.ep}: {rule}")


def _least_layout(request: PlanRequest) -> ParallelConfig:
    """Returns what is fixed as a layout, with the least of everything else."""
    fixed = request.fixed
    dp = 1
    schedule = fixed.schedule or "1f1b"
    if fixed.schedule is None and (fixed.virtual_stages or 1) > 1:
        schedule = "interleaved_1f1b"
    stages = SCHEDULES[schedule].stages.usual
    every = fixed.recompute_every
    if fixed.recompute == "every_n" and every is None:
        every = _EVERY[-1]
    # The batch is divided over all data ranks if tp and pp leave no other number of them.
    if fixed.tp is not None and fixed.pp is not None and not request.framework.axes:
        dp = max(1, request.gpus // (fixed.tp * fixed.pp))
    return ParallelConfig(
        pp=fixed.pp or min(stages, 2),
        dp_shard=dp,
        tp=fixed.tp or 1,
        virtual_stages=fixed.virtual_stages or stages,
        schedule=schedule,
        microbatch_size=fixed.microbatch_size or 1,
        sequence_parallel=bool(fixed.sequence_parallel) and (fixed.tp or 2) > 1,
        recompute=fixed.recompute or ("every_n" if every else "none"),
        recompute_every=every,
    )
