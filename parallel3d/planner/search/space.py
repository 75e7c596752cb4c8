"""The space that a search goes through: every layout that the rules of `config.rules`, what the
user has fixed and the number of devices allow.

A layout is left out only if another one is never slower and never needs more memory: sequence
parallelism is used wherever tp > 1 allows it, and 1F1B stands for GPipe. Layouts that differ only
in recompute and in how the data ranks are used are a *family*: they run one pipeline, and their
activations are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
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
from parallel3d.schedules.registry import SCHEDULES
from parallel3d.shard_sizes import divisors

MOST_MICROBATCH = 64  # sequences
MOST_VIRTUAL = 12  # stages of a rank that are tried if none is fixed: no published run has more
_CHECKED = (
    "pp",
    "tp",
    "virtual_stages",
    "schedule",
    "microbatch_size",
    "sequence_parallel",
)  # keys of a layout that are checked before a search
_EVERY = (8, 4, 3, 2)  # blocks of which one is recomputed, from the fastest to the lowest memory


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
    recipe = _recipe(request, parallel)
    out_of_range = range_errors(recipe)
    yield from out_of_range or _rule_errors(request, recipe)


def _recipe(request: PlanRequest, parallel: ParallelConfig) -> Recipe:
    shape = request.planned_shape(parallel.tp)
    model = ModelConfig(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=None if shape.kv_heads == shape.heads else shape.kv_heads,
        head_dim=shape.head_dim,
        ffn_hidden=shape.ffn_hidden,
        vocab=shape.vocab,
    )
    train = TrainConfig(
        steps=1, global_batch_size=request.global_batch_size, seq_len=request.seq_len
    )
    return Recipe(model=model, train=train, parallel=parallel)


def _rule_errors(request: PlanRequest, recipe: Recipe) -> Iterator[str]:
    for rule in (parallel_errors, model_errors, schedule_errors, batch_errors):
        yield from rule(recipe)
    tp = recipe.parallel.tp
    yield from sharding_errors(recipe.parallel)
    kv_heads = request.shape.kv_heads
    if not request.framework.is_parallel3d and kv_heads % tp:
        tries = any_of(nearest(divisors(kv_heads), tp))
        must = f"must divide model.kv_heads = {kv_heads} in {request.framework.name}"
        yield f"parallel.tp = {tp}: {must}; try {tries}"


def families(request: PlanRequest) -> dict[tuple[int, int], list[ParallelConfig]]:
    """Returns, for each tp x pp that no rule forbids, one layout of each family: of each schedule
    and microbatch."""
    fixed = request.fixed
    found: dict[tuple[int, int], list[ParallelConfig]] = defaultdict(list)
    for tp, pp in product(divisors(request.gpus), repeat=2):
        is_small = tp <= (fixed.max_tp or tp) and pp <= (fixed.max_pp or pp)
        if request.gpus % (tp * pp) == 0 and is_small and fixed.allows(tp=tp, pp=pp):
            for plain in _plain_layouts(request, tp, pp):
                found[tp, pp] += _families_of(request, plain)
    return {sizes: own for sizes, own in found.items() if own}


def _plain_layouts(request: PlanRequest, tp: int, pp: int) -> Iterator[ParallelConfig]:
    """Yields a layout for each cp and ep that no rule forbids."""
    sequence_parallel = request.fixed.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = request.seq_len % tp == 0
    for cp, ep in request.other_axes(tp, pp):
        plain = ParallelConfig(
            pp=pp,
            dp_shard=request.gpus // (tp * pp * cp),
            tp=tp,
            sequence_parallel=sequence_parallel and tp > 1,
            offload=bool(request.fixed.offload),
        )
        if next(_rule_errors(request, _recipe(request, plain)), None) is None:
            if request.framework.axes:
                plain = FrameworkLayout(**vars(plain), cp=cp, ep=ep)
            yield plain


def _families_of(request: PlanRequest, plain: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields a layout of each microbatch, schedule and number of stages on each rank."""
    fixed = request.fixed
    pp = plain.pp
    layers = request.shape.layers
    sequences = request.global_batch_size // plain.dp
    names = request.schedules if fixed.schedule is None else (fixed.schedule,)
    sizes = [size for size in divisors(sequences) if size <= MOST_MICROBATCH]
    for size, name in product(sizes, names):
        stages = SCHEDULES[name].stages
        counts = [1]
        if stages.usual > 1:
            # Every number that divides the layers is tried, or if none does all up to 8.
            most = min(layers // pp, fixed.virtual_stages or MOST_VIRTUAL)
            counts = list(range(2, (stages.most or most) + 1)) if pp > 1 and most > 1 else []
            counts = [count for count in counts if layers % (pp * count) == 0] or counts[:7]
        for virtual in counts:
            choice = dict(virtual_stages=virtual, microbatch_size=size)
            if fixed.allows(**choice) and (virtual == 1 or sequences // size % pp == 0):
                yield varied(plain, schedule=name, **choice)


def recompute_choices(request: PlanRequest, pp: int) -> list[RecomputeChoice]:
    """The choices of recompute that the request allows, from the least that is saved to the most.
    Which of selective and every_n is faster is the model's to say."""
    fixed = request.fixed
    asked = fixed.recompute
    every = [n for n in _EVERY if n <= max(2, request.shape.layers // pp)]
    if fixed.recompute_every is not None:
        asked = "every_n"
        every = [fixed.recompute_every]
    choices = [RecomputeChoice("none"), RecomputeChoice("selective")]
    choices += [RecomputeChoice("every_n", n) for n in every]
    choices.append(RecomputeChoice("full"))
    return [choice for choice in choices if asked in (None, choice.recompute)]


def leaner_choices(
    choices: list[RecomputeChoice], choice: RecomputeChoice
) -> list[RecomputeChoice]:
    """Returns what may fit if a choice does not, each slower than that choice: after none both
    selective and the next one, after selective nothing, because that next one is tried as well."""
    after = choices[choices.index(choice) + 1 :]
    if choice.recompute == "selective":
        return []
    return after[: 2 if after and after[0].recompute == "selective" else 1]


def data_axis_splits(request: PlanRequest, family: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields the uses of a family's data-parallel ranks, without recompute, that gather and reduce
    once a step: each split with each strategy of `sharding/` that differs there.

    FULL_SHARD that keeps its parameters for a step does what SHARD_GRAD_OP does. SHARD_OPTIMIZER
    splits over all data-parallel ranks, and NO_SHARD splits nothing. Other frameworks split
    everything over dp_shard, or only the optimizer over all ranks, unless dp_shard is fixed."""
    fixed = request.fixed
    dp = family.dp_shard
    for shards in divisors(dp):
        replicas = dp // shards
        if not fixed.allows(dp_shard=shards, dp_replicate=replicas):
            continue
        for strategy in _strategies(request, shards, replicas):
            layout = varied(
                family,
                dp_shard=shards,
                dp_replicate=replicas,
                sharding=strategy,
                gather=fixed.gather,
                reduce=fixed.reduce or "step",
                offload=bool(fixed.offload),
            )
            several = request.global_batch_size > dp * layout.microbatch_size
            is_own = request.framework.is_parallel3d and dp > 1
            if is_own and several and not fixed.gather and layout.gather_cadence == "microbatch":
                layout = varied(layout, gather="step")
            if next(sharding_errors(layout), None) is None:
                yield layout


def _strategies(request: PlanRequest, shards: int, replicas: int) -> list[ShardingName | None]:
    """Returns the strategies that differ with so many shards and replicas."""
    fixed = request.fixed
    framework = request.framework
    is_hybrid = replicas > 1
    if framework.is_parallel3d and shards * replicas > 1:
        names: list[ShardingName] = ["NO_SHARD"]
        if fixed.sharding is not None:
            names = [fixed.sharding]
        elif shards > 1:
            names = ["FULL_SHARD"] if is_hybrid else ["FULL_SHARD", "SHARD_OPTIMIZER"]
        if is_hybrid:
            return [HYBRID_OF.get(name, name) for name in names]
        return [name for name in names if name not in HYBRID_OF.values()]
    takes_all = framework.splits_optimizer_alone and fixed.sharding is None
    if shards * replicas == 1 or not takes_all or fixed.dp_shard == 1:
        return [None]
    if is_hybrid and fixed.dp_shard is None:
        return []
    return ["SHARD_OPTIMIZER"]


def per_microbatch_variant(request: PlanRequest, layout: ParallelConfig) -> ParallelConfig | None:
    """Returns the layout that gathers parameters and reduces gradients for each microbatch, or None
    if that is the same one.

    It needs less memory and is never faster, so it is tried if the layout itself does not fit."""
    fixed = request.fixed
    is_own = request.framework.is_parallel3d
    several = request.global_batch_size > layout.dp * layout.microbatch_size
    can = is_own and several and layout.dp_shard > 1 and layout.sharding not in REPLICATED
    if not can or SCHEDULES[layout.schedule].splits_backward or fixed.gather or fixed.reduce:
        return None
    return varied(layout, gather="microbatch", reduce="microbatch")


def check_fixed(request: PlanRequest) -> None:
    """Raises ConfigError for the first value that no layout can have, whatever the memory."""
    fixed = request.fixed
    gpus = request.gpus
    for error in (*_other_axes_errors(request), *layout_errors(request, _least_layout(request))):
        raise ConfigError(error)
    for name in ("tp", "pp"):
        value = getattr(fixed, name)
        most = getattr(fixed, f"max_{name}")
        if None not in (value, most) and value > most:
            raise ConfigError(f"{name} = {value}: more than --max-{name} {most}; drop one of them")
    if fixed.sequence_parallel and fixed.tp == 1:
        raise ConfigError("sequence_parallel = true: divides over tp, and tp = 1; try tp=2")
    axes = ["pp", "dp_replicate", "dp_shard", "tp"]
    if request.framework.axes:
        axes.append("cp")
    sizes = {axis: getattr(fixed, axis) for axis in axes if getattr(fixed, axis) is not None}
    size = prod(sizes.values())
    text = " x ".join(f"{axis} = {value}" for axis, value in sizes.items())
    if gpus % size:
        near = ceil(gpus / size) * size
        raise ConfigError(f"{text}: must divide gpus = {gpus}; try --gpus {near}")
    if len(sizes) == len(axes) and size != gpus:
        raise ConfigError(f"{text}: must be gpus = {gpus}; leave one of them free")


def _other_axes_errors(request: PlanRequest) -> Iterator[str]:
    """Yields a line for a cp or an ep that the framework or the model does not have."""
    name = request.framework.name
    experts = request.shape.experts
    divided = {"cp": request.seq_len // 2}
    if experts is not None:
        divided["ep"] = experts.count
    for axis in ("cp", "ep"):
        size = getattr(request.fixed, axis)
        if size is None:
            continue
        if axis not in request.framework.axes or axis not in divided:
            tries = "leave it out, or try --framework megatron-core with a model that can use it"
            yield f"{axis} = {size}: is not an axis of {name} for {request.shape.name}; {tries}"
        elif divided[axis] % size:
            whole = {"cp": "half of --seq-len", "ep": "the experts"}[axis]
            tries = any_of(nearest(divisors(divided[axis]), size))
            yield f"{axis} = {size}: must divide {whole} ({divided[axis]}); try {tries}"


def _least_layout(request: PlanRequest) -> ParallelConfig:
    """Returns what is fixed as a layout, with the least of everything else."""
    fixed = request.fixed
    values = {key: getattr(fixed, key) for key in _CHECKED if getattr(fixed, key) is not None}
    if values.get("virtual_stages", 1) > 1:
        values.setdefault("schedule", "interleaved_1f1b")
    # The batch is divided over all data ranks if tp and pp leave no other number of them.
    if fixed.tp and fixed.pp and not request.framework.axes:
        values["dp_shard"] = max(1, request.gpus // (fixed.tp * fixed.pp))
    stages = SCHEDULES[values.get("schedule", "1f1b")].stages.usual
    layout = ParallelConfig(**{"pp": min(stages, 2), "virtual_stages": stages} | values)
    choice, *_ = [*recompute_choices(request, 1), RecomputeChoice("none")]
    return choice.of(layout)
