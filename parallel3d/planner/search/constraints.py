"""What the user has fixed, checked before the search: which rule a value breaks, and values that would do."""

from __future__ import annotations

from math import prod

from parallel3d.config.ranges import any_of, divisors_near, multiple_from, nearest
from parallel3d.errors import ConfigError
from parallel3d.planner.search.question import Question
from parallel3d.planner.search.space import tp_rule
from parallel3d.row_split import divisors
from parallel3d.schedules.registry import SCHEDULES


def check_fixed(question: Question) -> None:
    """Raises ConfigError for the first value that no layout can have, whatever the memory."""
    fixed, shape, gpus = question.fixed, question.shape, question.gpus
    rule = None if fixed.tp is None else tp_rule(question, fixed.tp)
    if fixed.tp is not None and (rule is not None or gpus % fixed.tp):
        allowed = [tp for tp in divisors(gpus) if tp_rule(question, tp) is None]
        broken = rule or f"must divide gpus {gpus}"
        raise ConfigError(f"tp = {fixed.tp}: {broken}; try {any_of(nearest(allowed, fixed.tp))}")
    if fixed.pp is not None and fixed.pp > shape.layers:
        raise ConfigError(f"pp = {fixed.pp}: {shape.layers} layers cannot fill {fixed.pp} stages; try {shape.layers}")
    for name in ("tp", "pp"):
        value, most = getattr(fixed, name), getattr(fixed, f"max_{name}")
        if value is not None and most is not None and value > most:
            raise ConfigError(f"{name} = {value}: more than --max-{name} {most}; drop one of the two")
    _check_product(question)
    _check_batch(question)
    _check_schedule(question)


def _check_product(question: Question) -> None:
    fixed, gpus = question.fixed, question.gpus
    axes = {name: getattr(fixed, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")}
    said = {name: value for name, value in axes.items() if value is not None}
    product = prod(said.values())
    text = " x ".join(f"{name} {value}" for name, value in said.items())
    if gpus % product:
        near = max(product, -(-gpus // product) * product)
        product_text = f"{text} = {product}" if len(said) > 1 else text.replace(" ", " = ")
        raise ConfigError(f"{product_text}: must divide gpus = {gpus}; try --gpus {near}")
    if len(said) == len(axes) and product != gpus:
        raise ConfigError(f"{text} = {product}: must be gpus = {gpus}; leave one of them free, or --gpus {product}")


def _check_batch(question: Question) -> None:
    fixed, batch = question.fixed, question.global_batch_size
    # The batch is divided over these ranks at least: those that are fixed, or all that tp and pp leave.
    least = (fixed.dp_shard or 1) * (fixed.dp_replicate or 1)
    if fixed.tp is not None and fixed.pp is not None:
        least = question.gpus // (fixed.tp * fixed.pp)
    if batch % least:
        raise ConfigError(
            f"global batch = {batch}: must be a multiple of its {least} data ranks; try {multiple_from(batch, least)}"
        )
    micro, each = fixed.microbatch_size or 1, batch // least
    if each % micro:
        raise ConfigError(
            f"microbatch_size = {micro}: global batch {batch} over {least} data ranks leaves {each} sequences for "
            f"each, which it must divide; try {any_of(divisors_near(each, micro))}"
        )
    if fixed.sequence_parallel and fixed.tp == 1:
        raise ConfigError("sequence_parallel = true: divides over tp, and tp = 1; try tp=2 or sequence_parallel=false")
    if fixed.sequence_parallel and fixed.tp and question.seq_len % fixed.tp:
        raise ConfigError(f"sequence_parallel: tp = {fixed.tp} must divide the sequence of {question.seq_len} tokens")


def _check_schedule(question: Question) -> None:
    fixed = question.fixed
    virtual, schedule, layers = fixed.virtual_stages, fixed.schedule, question.shape.layers
    if virtual is not None and fixed.pp is not None and virtual * fixed.pp > layers:
        raise ConfigError(
            f"virtual_stages = {virtual}: {layers} layers cannot fill pp {fixed.pp} x {virtual} stages; "
            f"try at most {layers // fixed.pp}"
        )
    if schedule is None:
        return
    traits = SCHEDULES[schedule]
    if virtual is not None and not traits.stages.allow(virtual):
        others = [name for name in ("interleaved_1f1b", "1f1b") if SCHEDULES[name].stages.allow(virtual)]
        raise ConfigError(
            f"virtual_stages = {virtual}: {schedule} holds {traits.stages.usual} on each rank; "
            f"try virtual_stages={traits.stages.usual} or schedule={others[0]}"
        )
    if traits.stages.usual > 1 and fixed.pp == 1:
        raise ConfigError(f"schedule = {schedule}: needs a pipeline, and pp = 1; try pp=2 or schedule=1f1b")
