"""The search space: the layouts allowed by a recipe's rules, the fixed options and the number of
devices.

Within the limits below, a layout is omitted only if another one is never slower and never needs
more memory. Sequence parallelism is on if tp > 1 divides the sequence, unless fixed off. A *family*
is a set of layouts that differ only in recompute and data parallelism.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, Recompute, TrainConfig
from parallel3d.config.rules_layout import (
    batch_errors,
    expert_errors,
    model_errors,
    parallel_errors,
    schedule_errors,
    sharding_errors,
)
from parallel3d.config.schema import range_errors
from parallel3d.config.sharding_strategies import FREED_BETWEEN_USES, HYBRID_OF, ShardingName
from parallel3d.errors import ConfigError
from parallel3d.planner.model.planned_run import varied
from parallel3d.planner.search.request import PlanRequest
from parallel3d.schedules.registry import SCHEDULES, ScheduleName
from parallel3d.shard_sizes import divisors

MOST_MICROBATCH = 64  # Largest microbatch to try, in sequences.
# Maximum number of virtual stages per rank unless fixed. No published run has more.
_MOST_VIRTUAL = 12
_SHORTEST_PART = 4096  # Minimum number of tokens of a sequence per cp rank, unless cp is fixed.
# Values of recompute_every, from the fastest to the one with the lowest memory.
_EVERY = (8, 4, 3, 2)


class RecomputeChoice(NamedTuple):
    """Values of the two recipe keys for recompute."""

    recompute: Recompute
    recompute_every: int | None = None

    def of(self, parallel: ParallelConfig) -> ParallelConfig:
        """Returns the layout with this recompute setting."""
        return varied(parallel, **self._asdict())


def layout_errors(request: PlanRequest, parallel: ParallelConfig) -> Iterator[str]:
    """Yields an error for each value out of range, or if there is none, for each broken rule."""
    yield from range_errors(_recipe(request, parallel)) or _rule_errors(request, parallel)


def _recipe(request: PlanRequest, parallel: ParallelConfig) -> Recipe:
    shape = request.planned_shape(parallel.tp)
    experts = shape.experts and ExpertsConfig(
        **{key.name: getattr(shape.experts, key.name) for key in fields(ExpertsConfig)}
    )
    model = ModelConfig(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        ffn_hidden=shape.ffn_hidden,
        vocab=shape.vocab,
        experts=experts,
    )
    train = TrainConfig(
        steps=1, global_batch_size=request.global_batch_size, seq_len=request.seq_len
    )
    return Recipe(model=model, train=train, parallel=parallel)


def _rule_errors(request: PlanRequest, parallel: ParallelConfig) -> Iterator[str]:
    recipe = _recipe(request, parallel)
    for rule in (parallel_errors, model_errors, schedule_errors, batch_errors):
        yield from rule(recipe)
    tp = parallel.tp
    kv_heads = request.shape.kv_heads
    if request.framework.is_parallel3d:
        yield from expert_errors(recipe)
    elif kv_heads % tp:
        must = f"must divide model.kv_heads = {kv_heads} in {request.framework.name}"
        yield f"parallel.tp = {tp}: {must}; try tp={gcd(kv_heads, tp)}"
    yield from sharding_errors(parallel)


def families(request: PlanRequest) -> Iterable[list[ParallelConfig]]:
    """Returns the valid families of each tp x pp. One layout represents each family."""
    found = defaultdict(list)
    for plain in _plain_layouts(request):
        for family in _families_of(request, plain):
            found[plain.tp, plain.pp].append(family)
    return found.values()


def _plain_layouts(request: PlanRequest) -> Iterator[ParallelConfig]:
    """Yields a layout for each valid combination of tp, pp, cp and ep."""
    fixed = request.fixed
    tps = _sizes(request, "tp", fixed.max_tp)
    for tp, pp in product(tps, _sizes(request, "pp", fixed.max_pp)):
        left, uneven = divmod(request.gpus, tp * pp)
        if uneven:
            continue
        for cp, ep in product(_context_sizes(request, left), _expert_sizes(request, tp, left)):
            dp = left // cp
            if request.global_batch_size % dp or not fixed.allows(cp=cp, ep=ep or fixed.ep):
                continue
            is_even = tp > 1 and request.seq_len // cp % tp == 0
            yield ParallelConfig(
                pp=pp,
                dp_shard=dp,
                cp=cp,
                tp=tp,
                ep=ep,
                sequence_parallel=is_even and fixed.allows(sequence_parallel=True),
                offload=bool(fixed.offload),
            )


def _sizes(request: PlanRequest, axis: str, most: int | None) -> list[int]:
    """Returns the allowed sizes of tp or pp, which do not depend on the other axes."""
    found = []
    for size in divisors(request.gpus):
        layout = varied(ParallelConfig(), **{axis: size})
        is_allowed = size <= (most or size) and request.fixed.allows(**{axis: size})
        if is_allowed and not any(_rule_errors(request, layout)):
            found.append(size)
    return found


def _context_sizes(request: PlanRequest, left: int) -> list[int]:
    """Returns the values of cp to try. They divide the `left` ranks (devices / (tp x pp))."""
    most = 1
    if "cp" in request.framework.axes:
        most = request.fixed.cp or max(1, request.seq_len // _SHORTEST_PART)
    return [cp for cp in divisors(gcd(left, request.seq_len // 2)) if cp <= most]


def _expert_sizes(request: PlanRequest, tp: int, left: int) -> list[int | None]:
    """Returns the values of ep to try: None without experts, else those that divide the experts and
    the ranks of a stage (devices / pp). For parallel3d, they are multiples of tp."""
    experts = request.shape.experts
    if experts is None:
        return [None]
    step = tp if request.framework.is_parallel3d else 1
    return [ep for ep in divisors(gcd(experts.count, left * tp)) if ep % step == 0]


def _families_of(request: PlanRequest, plain: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields a layout for each microbatch size, schedule and number of virtual stages."""
    fixed = request.fixed
    sequences = request.global_batch_size // plain.dp
    names = request.schedules if fixed.schedule is None else (fixed.schedule,)
    sizes = [size for size in divisors(sequences) if size <= MOST_MICROBATCH]
    # cp and a microbatch size with a common divisor send more than both divided by it, with dp
    # multiplied.
    is_free = fixed.allows(cp=None, microbatch_size=None, dp_shard=None, dp_replicate=None)
    for size, name in product(sizes, names):
        if is_free and gcd(size, plain.cp) > 1:
            continue
        if plain.ep is not None and size * request.seq_len // plain.cp % plain.tp:
            continue  # Each tp rank routes as many tokens.
        for virtual in _stage_counts(request, name, plain.pp):
            choice = dict(virtual_stages=virtual, microbatch_size=size)
            if fixed.allows(**choice) and (virtual == 1 or sequences // size % plain.pp == 0):
                yield varied(plain, schedule=name, **choice)


def _stage_counts(request: PlanRequest, name: ScheduleName, pp: int) -> Sequence[int]:
    """Returns the numbers of virtual stages per rank to try.

    If the schedule has virtual stages, these are the numbers from 2 that divide the layers evenly,
    or if none does, those up to 8, but nothing if pp is 1.
    """
    layers = request.shape.layers
    stages = SCHEDULES[name].stages
    if stages.usual == 1:
        return [1]
    if pp == 1:
        return []
    most = stages.most or request.fixed.virtual_stages or _MOST_VIRTUAL
    counts = range(2, min(layers // pp, most) + 1)
    return [count for count in counts if layers % (pp * count) == 0] or counts[:7]


def count_layouts(request: PlanRequest) -> int:
    """Counts the layouts of the search space."""
    found = 0
    for own in families(request):
        kinds = len(recompute_choices(request, own[0].pp))
        for family in own:
            found += kinds * len([*data_layouts(request, family)])
    return found


def recompute_choices(request: PlanRequest, pp: int) -> list[RecomputeChoice]:
    """Returns the allowed kinds of recompute from the least to the most recomputation.

    Whether selective or every_n is faster depends on the model.
    """
    fixed = request.fixed
    asked = fixed.recompute
    every = [n for n in _EVERY if n <= max(2, request.shape.layers // pp)]
    if fixed.recompute_every is not None:
        asked = "every_n"
        every = [fixed.recompute_every]
    choices = [RecomputeChoice("none"), RecomputeChoice("selective")]
    choices += [RecomputeChoice("every_n", n) for n in every]
    choices += [RecomputeChoice("full")]
    return [choice for choice in choices if asked in (None, choice.recompute)]


def more_recompute(
    choices: list[RecomputeChoice], choice: RecomputeChoice
) -> list[RecomputeChoice]:
    """Returns the next choices to try if `choice` does not fit. All of them are slower.

    After "none", these are the next two, such as selective and every_n. After selective, there are
    none, because the search already tries the one after it.
    """
    if choice.recompute == "selective":
        return []
    most = 2 if choice.recompute == "none" else 1
    after = choices.index(choice) + 1
    return choices[after : after + most]


def data_layouts(request: PlanRequest, family: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields the data-parallel layouts of a family, including per-microbatch variants."""
    for way in data_axis_splits(request, family):
        yield way
        variant = per_microbatch_variant(request, way)
        if variant:
            yield variant


def data_axis_splits(request: PlanRequest, family: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields the data-parallel layouts of a family that gather and reduce once per step.

    Fixed `gather` and `reduce` take precedence. SHARD_GRAD_OP is omitted unless fixed, because
    FULL_SHARD that all-gathers once per step is equivalent.
    """
    fixed = request.fixed
    dp = family.dp_shard
    frees = family.pp == 1 and request.global_batch_size > dp * family.microbatch_size
    # The ranks that share experts lie within dp_shard x cp x tp.
    step = 1
    if family.ep is not None and request.framework.is_parallel3d:
        step = family.ep // gcd(family.ep, family.cp * family.tp)
    for shards in divisors(dp):
        replicas = dp // shards
        if shards % step or not fixed.allows(dp_shard=shards, dp_replicate=replicas):
            continue
        for strategy in _strategies(request, shards, family.cp, replicas):
            gather = fixed.gather
            if frees and strategy in FREED_BETWEEN_USES:
                gather = gather or "step"
            layout = varied(
                family,
                dp_shard=shards,
                dp_replicate=replicas,
                sharding=strategy,
                gather=gather,
                reduce=fixed.reduce or "step",
            )
            if not any(sharding_errors(layout)):
                yield layout


def _strategies(
    request: PlanRequest, dp_shard: int, cp: int, replicas: int
) -> list[ShardingName | None]:
    """Returns the sharding strategies to try for these sizes.

    Other frameworks use the fixed strategy, or shard everything (None), or shard only the
    optimizer, which they do over all data-parallel ranks unless dp_shard is fixed.
    """
    fixed = request.fixed
    framework = request.framework
    asked = fixed.sharding
    shards = dp_shard * cp
    if shards * replicas == 1:
        return [None]
    if not framework.is_parallel3d:
        if asked or not framework.splits_optimizer_alone:
            return [asked]
        return ["SHARD_OPTIMIZER"] if replicas == 1 or fixed.dp_shard is not None else []
    if asked:
        if replicas > 1:
            return [HYBRID_OF.get(asked, asked)]
        return [] if asked in HYBRID_OF.values() else [asked]
    found: list[ShardingName | None] = []
    if dp_shard == 1:
        found.append("NO_SHARD")
    if shards > 1:
        found += ["HYBRID_SHARD"] if replicas > 1 else ["FULL_SHARD", "SHARD_OPTIMIZER"]
    return found


def per_microbatch_variant(request: PlanRequest, layout: ParallelConfig) -> ParallelConfig | None:
    """Returns the layout that gathers and reduces for each microbatch, or None if not applicable.

    It needs less memory and is never faster, so `TpPpSearch.fastest` tries it only if `layout` does
    not fit.
    """
    fixed = request.fixed
    if not request.framework.is_parallel3d or fixed.gather or fixed.reduce:
        return None
    if layout.shard_ranks == 1:
        return None
    variant = varied(layout, gather="microbatch", reduce="microbatch")
    return None if any(sharding_errors(variant)) else variant


def check_fixed(request: PlanRequest) -> None:
    """Raises ConfigError for the first fixed value that rules out all layouts."""
    fixed = request.fixed
    gpus = request.gpus
    for axis in ("cp", "ep"):
        if getattr(fixed, axis) and axis not in request.framework.axes:
            rule = f"{request.framework.name} has no such axis; try --framework megatron-core"
            raise ConfigError(f"{axis} = {getattr(fixed, axis)}: {rule}")
    least = ParallelConfig(
        pp=fixed.pp or 1,
        cp=fixed.cp or 1,
        tp=fixed.tp or 1,
        microbatch_size=fixed.microbatch_size or 1,
    )
    recompute = recompute_choices(request, 1)[0]
    for error in layout_errors(request, recompute.of(least)):
        raise ConfigError(error)
    if fixed.ep is not None and request.framework.is_parallel3d:
        ranks = gpus // (least.pp * least.cp * least.tp * (fixed.dp_replicate or 1))
        most = varied(least, dp_shard=fixed.dp_shard or max(1, ranks), ep=fixed.ep)
        for error in expert_errors(_recipe(request, most)):
            raise ConfigError(error)
    sizes = {axis: getattr(fixed, axis) for axis in least.axes if getattr(fixed, axis)}
    missing = -gpus % prod(sizes.values())
    if missing:
        text = " x ".join(f"{axis} = {value}" for axis, value in sizes.items())
        raise ConfigError(f"{text}: must divide gpus = {gpus}; try --gpus {gpus + missing}")
