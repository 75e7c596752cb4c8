"""What a layout must keep: the rules of `config.rules`, what the user has fixed, and the number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from parallel3d.config.ranges import any_of, nearest, range_errors
from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.config.rules_layout import batch_errors, model_errors, parallel_errors, schedule_errors, sharding_errors
from parallel3d.errors import ConfigError
from parallel3d.planner.search.question import Question
from parallel3d.row_split import divisors
from parallel3d.schedules.registry import SCHEDULES


def layout_errors(question: Question, parallel: ParallelConfig) -> Iterator[str]:
    """One line for each rule that a layout breaks, in the trainer's words; what must divide what is only asked of
    numbers that are in range."""
    shape = question.planned_shape(parallel.tp)
    model = ModelConfig(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=None if shape.kv_heads == shape.heads else shape.kv_heads,
        ffn_hidden=shape.ffn_hidden,
        vocab=shape.vocab,
    )
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
        yield (
            f"parallel.tp = {parallel.tp}: must divide model.kv_heads = {shape.kv_heads} in {question.program.name}; "
            f"try {tries}"
        )


def size_error(question: Question, tp: int, pp: int) -> str | None:
    """The first rule that every layout of a tp x pp breaks; None where there may be layouts that break none."""
    fixed, dp = question.fixed, question.gpus // (tp * pp)
    parallel = ParallelConfig(pp=pp, dp_shard=dp, tp=tp, sequence_parallel=bool(fixed.sequence_parallel))
    if (error := next(layout_errors(question, parallel), None)) is not None:
        return error
    for name, value, asked, most in (("tp", tp, fixed.tp, fixed.max_tp), ("pp", pp, fixed.pp, fixed.max_pp)):
        if asked is not None and asked != value:
            return f"{name} is fixed at {asked}"
        if most is not None and value > most:
            return f"--max-{name} {most}"
    return None


def check_fixed(question: Question) -> None:
    """Raises ConfigError for the first value that no layout can have, whatever the memory."""
    fixed, gpus = question.fixed, question.gpus
    axes = {name: getattr(fixed, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")}
    said = {name: value for name, value in axes.items() if value is not None}
    product = prod(said.values())
    schedule = fixed.schedule or ("interleaved_1f1b" if (fixed.virtual_stages or 1) > 1 else "1f1b")
    stages = SCHEDULES[schedule].stages.usual
    # The batch is divided over these ranks at least: those that are fixed, or all that tp and pp leave.
    dp = (fixed.dp_shard or 1) * (fixed.dp_replicate or 1)
    if fixed.tp is not None and fixed.pp is not None:
        dp = gpus // (fixed.tp * fixed.pp)
    least = ParallelConfig(
        pp=fixed.pp or min(stages, 2),
        dp_shard=1 if gpus % product else dp,
        tp=fixed.tp or 1,
        virtual_stages=fixed.virtual_stages or stages,
        schedule=schedule,
        microbatch_size=fixed.microbatch_size or 1,
        sequence_parallel=bool(fixed.sequence_parallel),
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
    if len(said) == len(axes) and product != gpus:
        raise ConfigError(f"{text} = {product}: must be gpus = {gpus}; leave one of them free, or --gpus {product}")
