"""The space that a search goes through: every layout that the rules of `config.rules`, what the user has fixed and the
number of devices allow.

A layout is left out only where another one is never slower and never needs more memory: sequence parallelism is used
wherever tp > 1 allows it, and 1F1B stands for GPipe. Layouts that differ only in recompute and in how the data ranks
are used are a *family*: they run one pipeline, and their activations are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import prod
from typing import NamedTuple

from parallel3d.config.ranges import any_of, nearest, range_errors
from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, Recompute, TrainConfig
from parallel3d.config.rules_layout import batch_errors, model_errors, parallel_errors, schedule_errors, sharding_errors
from parallel3d.config.sharding_strategies import HYBRID_OF, REPLICATED, ShardingName
from parallel3d.errors import ConfigError
from parallel3d.planner.model.planned_run import EngineLayout, varied
from parallel3d.planner.search.question import Fixed, Question
from parallel3d.row_split import divisors
from parallel3d.schedules.registry import SCHEDULES, ScheduleName

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


def layout_errors(question: Question, parallel: ParallelConfig) -> Iterator[str]:
    """Yields a line for each rule that a layout breaks, in the trainer's words, first those of ranges alone."""
    shape = question.planned_shape(parallel.tp)
    numbers = {key: getattr(shape, key) for key in ("layers", "hidden", "heads", "ffn_hidden", "vocab")}
    model = ModelConfig(
        **numbers,
        kv_heads=None if shape.kv_heads == shape.heads else shape.kv_heads,
        head_dim=None if shape.query_hidden == shape.hidden else shape.head_dim,
    )
    if isinstance(parallel, EngineLayout):
        parallel = ParallelConfig(**{key.name: getattr(parallel, key.name) for key in fields(ParallelConfig)})
    train = TrainConfig(steps=1, global_batch_size=question.global_batch_size, seq_len=question.seq_len)
    recipe = Recipe(model=model, train=train, parallel=parallel)
    if any(out_of_range := [*range_errors(recipe)]):
        yield from out_of_range
        return
    for rule in (parallel_errors, model_errors, schedule_errors, batch_errors):
        yield from rule(recipe)
    yield from sharding_errors(parallel)
    if not question.program.is_parallel3d and shape.kv_heads % parallel.tp:
        tries = any_of(nearest(divisors(shape.kv_heads), parallel.tp))
        must = f"must divide model.kv_heads = {shape.kv_heads} in {question.program.name}"
        yield f"parallel.tp = {parallel.tp}: {must}; try {tries}"


def size_error(question: Question, tp: int, pp: int) -> str | None:
    """The first rule that every layout of a tp x pp breaks; None where there may be layouts that break none."""
    fixed, left = question.fixed, question.gpus // (tp * pp)
    divided = dict.fromkeys(cp for cp, _ in question.axes_beside(tp, pp))
    if not divided:
        return f"{axes_text(fixed)}: must divide the {left * tp} ranks of a stage, and what is split over them"
    errors: list[str | None] = []
    for cp in divided:
        parallel = ParallelConfig(pp=pp, dp_shard=left // cp, tp=tp, sequence_parallel=bool(fixed.sequence_parallel))
        errors.append(next(layout_errors(question, parallel), None))
    if None not in errors:
        return errors[-1]
    for name, value, asked, most in (("tp", tp, fixed.tp, fixed.max_tp), ("pp", pp, fixed.pp, fixed.max_pp)):
        if asked is not None and asked != value:
            return f"{name} is fixed at {asked}"
        if most is not None and value > most:
            return f"--max-{name} {most}"
    return None


def axes_text(fixed: Fixed) -> str:
    """Returns what is fixed of cp and ep."""
    said = {"cp": fixed.cp, "ep": fixed.ep}
    return " and ".join(f"{key} = {value}" for key, value in said.items() if value is not None)


def families(question: Question) -> dict[tuple[int, int], list[ParallelConfig]]:
    """Returns, for each tp x pp that no rule forbids, one layout of each family: of each schedule and microbatch."""
    return {
        (tp, pp): [one for axes in question.axes_beside(tp, pp) for one in _families_of(question, tp, pp, *axes)]
        for tp in divisors(question.gpus)
        for pp in divisors(question.gpus // tp)
        if size_error(question, tp, pp) is None
    }


def _families_of(question: Question, tp: int, pp: int, cp: int, ep: int) -> Iterator[ParallelConfig]:
    fixed, dp = question.fixed, question.gpus // (tp * pp * cp)
    usual = tp > 1 and question.seq_len % tp == 0
    for microbatch in divisors(question.global_batch_size // dp) if question.global_batch_size % dp == 0 else ():
        if microbatch > MOST_MICROBATCH or not _allowed(microbatch, fixed.microbatch_size):
            continue
        microbatches = question.global_batch_size // (dp * microbatch)
        for schedule, virtual in _schedules(question, pp, microbatches):
            parallel = ParallelConfig(
                pp=pp,
                dp_shard=dp,
                tp=tp,
                virtual_stages=virtual,
                schedule=schedule,
                microbatch_size=microbatch,
                sequence_parallel=usual if fixed.sequence_parallel is None else fixed.sequence_parallel and tp > 1,
            )
            yield EngineLayout(**vars(parallel), cp=cp, ep=ep) if question.program.axes else parallel


def _schedules(question: Question, pp: int, microbatches: int) -> Iterator[tuple[ScheduleName, int]]:
    """Yields each schedule with each number of stages per rank; one rank needs 1F1B alone, to accumulate gradients."""
    fixed, layers = question.fixed, question.shape.layers
    names = (fixed.schedule,) if fixed.schedule is not None else question.schedules if pp > 1 else ("1f1b",)
    for name in names:
        stages, deepest = SCHEDULES[name].stages, layers // pp
        if stages.usual == 1:
            counts = [1]
        elif pp == 1 or deepest < 2:
            counts = []
        elif stages.most is not None:
            counts = [stages.usual]
        else:  # every number that divides the layers, or all up to 8 where none does
            most = deepest if fixed.virtual_stages is not None else min(deepest, MOST_VIRTUAL)
            even = [v for v in range(2, most + 1) if layers % (pp * v) == 0]
            counts = even or list(range(2, min(deepest, 8) + 1))
        for virtual in counts:
            if _allowed(virtual, fixed.virtual_stages) and (virtual == 1 or microbatches % pp == 0):
                yield name, virtual


def recompute_choices(question: Question, pp: int) -> list[RecomputeChoice]:
    """The choices of recompute that the question allows, from the least that is saved to the most. Which of selective
    and every_n is faster is the model's to say."""
    fixed, of_rank = question.fixed, max(1, question.shape.layers // pp)
    often = _EVERY if fixed.recompute_every is None else (fixed.recompute_every,)
    every = [RecomputeChoice("every_n", n) for n in often if n <= of_rank or n == fixed.recompute_every]
    choices = [RecomputeChoice("none"), RecomputeChoice("selective"), *every, RecomputeChoice("full")]
    asked = "every_n" if fixed.recompute_every else fixed.recompute
    return [choice for choice in choices if _allowed(choice.recompute, asked)]


def leaner_choices(choices: list[RecomputeChoice], choice: RecomputeChoice) -> list[RecomputeChoice]:
    """Returns what may fit where a choice does not, each slower than that choice: after none both selective and the
    next one, after selective nothing, because the next one is tried beside it."""
    after = choices[choices.index(choice) + 1 :]
    if choice.recompute == "selective":
        return []
    return after[: 2 if after and after[0].recompute == "selective" else 1]


def data_axis_splits(question: Question, family: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields a family's ways of using its data ranks, without recompute, that gather and reduce once a step: each split
    with each strategy of `sharding/` that differs there.

    FULL_SHARD that keeps its parameters for a step does what SHARD_GRAD_OP does. SHARD_OPTIMIZER splits over all data
    ranks, and NO_SHARD splits nothing. Other programs split all over dp_shard, or the optimizer over all, unless
    dp_shard is fixed."""
    fixed, dp = question.fixed, family.dp_shard
    is_open = fixed.sharding is None and fixed.dp_shard is None
    over_all = is_open and question.program.splits_optimizer_alone and not question.program.is_parallel3d
    for shards in (dp,) if over_all else divisors(dp):
        replicas = dp // shards
        if not (_allowed(shards, fixed.dp_shard) and _allowed(replicas, fixed.dp_replicate)):
            continue
        if not question.program.is_parallel3d or dp == 1:
            if not question.program.splits_optimizer_alone or fixed.sharding is not None or dp == 1:
                yield varied(family, dp_shard=shards, dp_replicate=replicas)
            elif replicas == 1 or fixed.dp_shard is not None and shards > 1:
                yield varied(family, dp_shard=shards, dp_replicate=replicas, sharding="SHARD_OPTIMIZER")
            elif fixed.dp_shard == 1:
                yield varied(family, dp_shard=shards, dp_replicate=replicas)
            continue
        names: list[ShardingName] = ["FULL_SHARD"] if shards > 1 else ["NO_SHARD"]
        if shards > 1 and replicas == 1:
            names.append("SHARD_OPTIMIZER")
        for name in names if fixed.sharding is None else [fixed.sharding]:
            if replicas == 1 and name in HYBRID_OF.values():
                continue  # nothing is repeated
            strategy = HYBRID_OF.get(name, name) if replicas > 1 else name
            way = varied(family, dp_shard=shards, dp_replicate=replicas, sharding=strategy)
            if fixed.gather or fixed.reduce:
                way = varied(way, gather=fixed.gather or "step", reduce=fixed.reduce or "step")
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
    return varied(way, gather="microbatch", reduce="microbatch")


def _allowed(value: object, fixed: object) -> bool:
    return fixed is None or value == fixed


def check_fixed(question: Question) -> None:
    """Raises ConfigError for the first value that no layout can have, whatever the memory."""
    fixed, gpus, program, shape = question.fixed, question.gpus, question.program, question.shape
    if fixed.cp is not None and "cp" not in program.axes:
        longer = "longer sequences fit with recompute=full; " if program.is_parallel3d else ""
        has = f"{longer}--engine megatron-core has it, and prices it"
        raise ConfigError(f"cp = {fixed.cp}: context parallelism is not among the axes of {program.name}; {has}")
    if fixed.ep is not None and (shape.experts is None or "ep" not in program.axes):
        why = f"{shape.name} has none" if shape.experts is None else f"{program.name} divides none"
        raise ConfigError(f"ep = {fixed.ep}: divides the experts of a mixture over ranks, and {why}; leave it out")
    if fixed.ep is not None and shape.experts is not None and shape.experts.count % fixed.ep:
        tries = any_of(nearest(divisors(shape.experts.count), fixed.ep))
        raise ConfigError(f"ep = {fixed.ep}: must divide {shape.name}'s {shape.experts.count} experts; try {tries}")
    if fixed.cp is not None and question.seq_len % (2 * fixed.cp):
        raise ConfigError(f"cp = {fixed.cp}: each rank has two of twice as many parts of --seq-len {question.seq_len}")
    axes = {name: getattr(fixed, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")}
    axes |= {"cp": fixed.cp if program.axes else 1}
    said = {name: value for name, value in axes.items() if value is not None and (name != "cp" or value > 1)}
    product = prod(said.values())
    schedule = fixed.schedule or ("interleaved_1f1b" if (fixed.virtual_stages or 1) > 1 else "1f1b")
    stages = SCHEDULES[schedule].stages.usual
    # The batch is divided over these ranks at least: those that are fixed, or all that tp and pp leave.
    dp = (fixed.dp_shard or 1) * (fixed.dp_replicate or 1)
    if fixed.tp is not None and fixed.pp is not None and axes["cp"] is not None:
        dp = gpus // (fixed.tp * fixed.pp * axes["cp"])
    least = ParallelConfig(
        pp=fixed.pp or min(stages, 2),
        dp_shard=1 if gpus % product else dp,
        tp=fixed.tp or 1,
        virtual_stages=fixed.virtual_stages or stages,
        schedule=schedule,
        microbatch_size=fixed.microbatch_size or 1,
        sequence_parallel=bool(fixed.sequence_parallel),
        recompute=fixed.recompute or ("every_n" if fixed.recompute_every else "none"),
        recompute_every=fixed.recompute_every or (_EVERY[-1] if fixed.recompute == "every_n" else None),
    )
    if (error := next(layout_errors(question, least), None)) is not None:
        raise ConfigError(error)
    if fixed.sequence_parallel and fixed.tp == 1:
        raise ConfigError("sequence_parallel = true: divides over tp, and tp = 1; try tp=2 or sequence_parallel=false")
    for name, value, most in (("tp", fixed.tp, fixed.max_tp), ("pp", fixed.pp, fixed.max_pp)):
        if value is not None and most is not None and value > most:
            raise ConfigError(f"{name} = {value}: more than --max-{name} {most}; drop one of the two")
    text = " x ".join(f"{name} {value}" for name, value in said.items())
    if gpus % product:
        near = max(product, -(-gpus // product) * product)
        product_text = f"{text} = {product}" if len(said) > 1 else text.replace(" ", " = ")
        raise ConfigError(f"{product_text}: must divide gpus = {gpus}; try --gpus {near}")
    if None not in axes.values() and product != gpus:
        raise ConfigError(f"{text} = {product}: must be gpus = {gpus}; leave one of them free, or --gpus {product}")
