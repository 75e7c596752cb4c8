"""The rules that a recipe must keep beyond the types of its values, checked whole before any process starts.

Each rule yields one line that names the key, its value, the rule and a value that would do. Ranges come first: the
relations between keys (what divides what) are only asked of numbers that are in range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from parallel3d.config.rules_local_sgd import local_sgd_faults, local_sgd_numbers
from parallel3d.config.rules_optimizer import optimizer_faults, step_in_backward_faults
from parallel3d.config.strategy import sharding_faults
from parallel3d.errors import ConfigError
from parallel3d.schedules.balance import balanced_cut, cut_points, faults_of_boundaries
from parallel3d.schedules.registry import SCHEDULES

if TYPE_CHECKING:
    from parallel3d.config.recipe import ParallelConfig, Recipe

BYTE_TOKENIZER_IDS = 257  # 256 bytes and the end of a text
_MOST_PROBLEMS = 5  # lines of an error; the rest is counted
_FROM_ZERO = (
    "train.seed",
    "train.sample_tokens",
    "parallel.zero_stage",
    "optimizer.warmup_steps",
    "local_sgd.overlap_steps",
)  # other whole numbers count from one
_LARGEST_COUNT = 2**40  # beyond lies a slip of the keyboard
_LARGEST_DIVISOR = 4096  # that a message would suggest


def validate(recipe: Recipe) -> None:
    """Raises one `ConfigError` with a line for each rule that `recipe` breaks."""
    refuse([*_counts(recipe), *_numbers(recipe), *local_sgd_numbers(recipe.local_sgd)])
    relations = (_model, _parallel, _schedule, _batch, _batch_warmup, _precision, local_sgd_faults, _others)
    refuse([problem for rule in relations for problem in rule(recipe)])
    refuse([*optimizer_faults(recipe.optimizer), *step_in_backward_faults(recipe)])


def warnings_for(recipe: Recipe) -> list[str]:
    """What is allowed and yet seldom meant, a line each."""
    train, optimizer, data = recipe.train, recipe.optimizer, recipe.data
    lines = []
    if optimizer.decay_steps is not None and optimizer.decay_steps < train.steps:
        lines.append(
            f"optimizer.decay_steps = {optimizer.decay_steps}: shorter than train.steps = {train.steps}; from there on "
            f"the learning rate stays at its minimum, {optimizer.lr * optimizer.min_lr_ratio:g}"
        )
    if train.precision != "fp16" and recipe.loss_scale != type(recipe.loss_scale)():
        lines.append(
            f"loss_scale: not used, because train.precision = {train.precision} needs no scaling; "
            "try train.precision=fp16"
        )
    if train.batch_warmup_steps is not None and train.batch_warmup_steps > train.steps:
        lines.append(
            f"train.batch_warmup_steps = {train.batch_warmup_steps}: more than train.steps = {train.steps}; the batch "
            f"never has its full size of {train.global_batch_size}"
        )
    if data.source != "text" and data.path is not None:
        lines.append(f"data.path = {data.path}: not read, because data.source = {data.source}; try data.source=text")
    return lines


def refuse(problems: list[str]) -> None:
    """Raises a `ConfigError` of all `problems`, the first few in full; returns where there is none."""
    if problems:
        rest = len(problems) - _MOST_PROBLEMS
        more = [f"... and {rest} more"] if rest > 0 else []
        raise ConfigError("\n".join([*problems[:_MOST_PROBLEMS], *more]))


def _counts(recipe: Recipe) -> Iterator[str]:
    """Every whole number of a recipe counts something, so a new key is checked without being named here."""
    for section in fields(recipe):
        values = getattr(recipe, section.name)
        for key in fields(values) if is_dataclass(values) else ():
            value = getattr(values, key.name)
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            name = f"{section.name}.{key.name}"
            smallest = 0 if name in _FROM_ZERO else 1
            if value < smallest:
                yield f"{name} = {value}: must be at least {smallest}; try {smallest}"
            elif value > _LARGEST_COUNT:
                yield f"{name} = {value}: must be at most 2^40 = {_LARGEST_COUNT}"


def _numbers(recipe: Recipe) -> Iterator[str]:
    model, train, optimizer, data = recipe.model, recipe.train, recipe.optimizer, recipe.data
    above_zero: list[tuple[str, float | None, float]] = [
        ("model.rope_theta", model.rope_theta, 10_000),
        ("model.norm_eps", model.norm_eps, 1e-5),
        ("model.init_std", model.init_std, 0.02),
        ("parallel.bucket_mib", recipe.parallel.bucket_mib, 25),
        ("train.grad_clip", train.grad_clip, 1.0),
        ("train.timeout_s", train.timeout_s, 300),
        ("optimizer.lr", optimizer.lr, 3e-4),
        ("optimizer.eps", optimizer.eps, 1e-8),
        ("loss_scale.initial", recipe.loss_scale.initial, 65536),
    ]
    for key, value, would_do in above_zero:
        if value is not None and not 0 < value < math.inf:  # NaN is in no interval
            yield f"{key} = {value}: must be above 0 and finite; try {would_do:g}"
    for key, share in (("model.dropout", model.dropout), ("model.attention_dropout", model.attention_dropout)):
        if not 0 <= share < 1:
            yield f"{key} = {share}: must be at least 0 and below 1; try 0.1"
    if not 0 <= optimizer.weight_decay < math.inf:
        yield f"optimizer.weight_decay = {optimizer.weight_decay}: must be 0 or more and finite; try 0.1"
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield f"optimizer.betas = {list(optimizer.betas)}: each must be at least 0 and below 1; try [0.9, 0.95]"
    if not 0 <= optimizer.min_lr_ratio <= 1:
        yield f"optimizer.min_lr_ratio = {optimizer.min_lr_ratio}: must be between 0 and 1; try 0.1"
    if not 1 < recipe.loss_scale.growth < math.inf:
        yield f"loss_scale.growth = {recipe.loss_scale.growth}: must be above 1 and finite; try 2"
    if not 0 < recipe.loss_scale.backoff < 1:
        yield f"loss_scale.backoff = {recipe.loss_scale.backoff}: must be above 0 and below 1; try 0.5"
    if not 0 < data.validation_fraction < 1:
        yield f"data.validation_fraction = {data.validation_fraction}: must be above 0 and below 1; try 0.05"


def _model(recipe: Recipe) -> Iterator[str]:
    model, tp = recipe.model, recipe.parallel.tp
    if model.hidden % model.heads:
        # A divisor of half the width leaves an even number to each head.
        tries = _or(_divisors(model.hidden // 2, near=model.heads) or [1])
        yield f"model.heads = {model.heads}: must divide model.hidden = {model.hidden}; try {tries}"
    elif model.head_dim % 2 and model.architecture == "llama":
        yield (
            f"model.heads = {model.heads}: makes heads of {model.head_dim} numbers, which rotary positions need in "
            f"pairs; try model.hidden={model.hidden + model.heads}"
        )
    if model.heads % model.key_value_heads:
        tries = _or(_divisors(model.heads, near=model.key_value_heads))
        yield f"model.kv_heads = {model.key_value_heads}: must divide model.heads = {model.heads}; try {tries}"
    if recipe.data.tokenizer == "bytes" and model.vocab < BYTE_TOKENIZER_IDS:
        yield (
            f"model.vocab = {model.vocab}: must be at least {BYTE_TOKENIZER_IDS}, the ids of data.tokenizer = bytes; "
            f"try {_multiple_from(BYTE_TOKENIZER_IDS, tp)}"
        )
    elif (tp - 1) * -(-model.vocab // tp) >= model.vocab:
        yield (
            f"model.vocab = {model.vocab}: leaves a rank of parallel.tp = {tp} without a row of the embedding; "
            f"try {_multiple_from(model.vocab, tp)}"
        )
    yield from _architecture(recipe)


# What one architecture has and the others have not, beside what to say of it there.
_OF_ARCHITECTURE = {
    "llama": {
        "rope_theta": "gpt has learned positions",
        "qkv_bias": "gpt has biases on every linear layer",
        "qk_norm": "gpt has none",
        "window": "gpt's queries see all keys before them",
    },
    "gpt": {"max_positions": "llama turns queries and keys instead, and needs no table of positions"},
}


def _architecture(recipe: Recipe) -> Iterator[str]:
    """Keys that the model would not look at, and the one that gpt cannot do without."""
    model, seq_len = recipe.model, recipe.train.seq_len
    defaults = {key.name: key.default for key in fields(model)}
    for architecture, keys in _OF_ARCHITECTURE.items():
        for key, why in keys.items() if architecture != model.architecture else ():
            if getattr(model, key) != defaults[key]:
                yield (
                    f"model.{key} = {getattr(model, key)}: is not for model.architecture = {model.architecture} "
                    f"({why}); drop it, or try model.architecture={architecture}"
                )
    if model.architecture == "gpt" and (model.max_positions is None or model.max_positions < seq_len):
        shown = "null" if model.max_positions is None else model.max_positions
        yield f"model.max_positions = {shown}: must be at least train.seq_len = {seq_len}; try {seq_len}"


def _parallel(recipe: Recipe) -> Iterator[str]:
    model, parallel, train = recipe.model, recipe.parallel, recipe.train
    split_by_tp = {"model.heads": model.heads, "model.ffn_hidden": model.ffn_hidden}
    # Where tp is a multiple of kv_heads, each of them is computed by tp / kv_heads ranks.
    if model.kv_heads is not None and parallel.tp % model.kv_heads:
        split_by_tp["model.kv_heads"] = model.kv_heads
    if parallel.sequence_parallel:
        split_by_tp["train.seq_len"] = train.seq_len
    uneven = {key: size for key, size in split_by_tp.items() if size % parallel.tp}
    if uneven:
        which = " and ".join(f"{key} = {size}" for key, size in uneven.items())
        tries = _or(_divisors(math.gcd(*split_by_tp.values()), near=parallel.tp))
        yield f"parallel.tp = {parallel.tp}: must divide {which}; try {tries}"
    if parallel.recompute == "every_n" and parallel.recompute_every is None:
        yield "parallel.recompute_every = null: parallel.recompute = every_n needs it; try 2, every other block"
    elif parallel.recompute_every is not None and parallel.recompute != "every_n":
        yield (
            f"parallel.recompute_every = {parallel.recompute_every}: is for parallel.recompute = every_n, and it is "
            f"{parallel.recompute}; try parallel.recompute=every_n, or drop it"
        )
    elif parallel.recompute_every is not None and parallel.recompute_every > model.layers:
        yield (
            f"parallel.recompute_every = {parallel.recompute_every}: must be at most model.layers = {model.layers}; "
            f"try 2"
        )
    yield from sharding_faults(recipe.of_one_replica.parallel)


def _schedule(recipe: Recipe) -> Iterator[str]:
    parallel, layers = recipe.parallel, recipe.model.layers
    if parallel.stages > layers:
        virtual = "" if parallel.virtual_stages == 1 else f" x parallel.virtual_stages {parallel.virtual_stages}"
        pp = max(1, layers // parallel.virtual_stages)
        yield (
            f"parallel.pp = {parallel.pp}{virtual}: {layers} layers cannot fill {parallel.stages} stages; "
            f"try parallel.pp={pp} or model.layers={parallel.stages}"
        )
    elif parallel.stage_boundaries is not None:
        fault = faults_of_boundaries(parallel.stage_boundaries, layers, parallel.stages)
        if fault is not None:
            tries = list(
                cut_points(balanced_cut(layers, parallel.stages, recipe.model.part_costs(recipe.train.seq_len)))
            )
            yield f"parallel.stage_boundaries = {list(parallel.stage_boundaries)}: {fault}; try {tries}"
    yield from _stages_per_rank(parallel)
    if recipe.train.compile:
        yield from _compile(recipe)


def _stages_per_rank(parallel: ParallelConfig) -> Iterator[str]:
    """What each schedule asks of the stages that a rank holds."""
    name, virtual = parallel.schedule, parallel.virtual_stages
    wanted = SCHEDULES[name]
    usual = wanted.usual_stages
    if wanted.most_stages == 1 and virtual > 1:
        many = [other.name for other in SCHEDULES.values() if other.usual_stages > 1 and other.allows(virtual)]
        yield (
            f"parallel.virtual_stages = {virtual}: needs parallel.schedule = {_or(many)}, and it is {name}; "
            f"try parallel.schedule={many[0]} or parallel.virtual_stages=1"
        )
    elif not wanted.allows(virtual):
        yield (
            f"parallel.virtual_stages = {virtual}: must be {usual} with parallel.schedule = {name}, whose "
            f"ranks hold a stage on the way down and one on the way up; try parallel.virtual_stages={usual}"
        )
    elif usual > 1 and virtual == 1:
        yield (
            f"parallel.schedule = {name}: has nothing to interleave with parallel.virtual_stages = 1; "
            f"try parallel.schedule={wanted.single_stage} or parallel.virtual_stages=2"
        )
    elif usual > 1 and parallel.pp == 1:
        yield (
            f"parallel.schedule = {name}: needs a pipeline, and parallel.pp = 1; "
            "try parallel.pp=2, or parallel.schedule=1f1b with parallel.virtual_stages=1"
        )


def _compile(recipe: Recipe) -> Iterator[str]:
    """What `torch.compile` makes of a block is one piece."""
    schedule, recompute = SCHEDULES[recipe.parallel.schedule], recipe.parallel.recompute
    if schedule.splits_backward:
        yield (
            f"train.compile = true: parallel.schedule = {schedule.name} puts off the gradients of weights, and a "
            "compiled block's backward has both gradients in one graph; try "
            f"parallel.schedule={schedule.whole_backward}, or train.compile=false"
        )
    if recompute == "selective":
        yield (
            "train.compile = true: the compiler itself chooses what to compute again inside a block, and "
            "parallel.recompute = selective would be passed over; try parallel.recompute=none, or full"
        )


def _batch(recipe: Recipe) -> Iterator[str]:
    parallel, train = recipe.parallel, recipe.train
    slice_ = parallel.dp * parallel.microbatch_size  # sequences that one microbatch takes over all data ranks
    product = f"data ranks {parallel.dp} x parallel.microbatch_size {parallel.microbatch_size} = {slice_}"
    batch = train.global_batch_size
    if batch % slice_:
        tries = _multiples_near(batch, slice_)
        yield f"train.global_batch_size = {batch}: must be a multiple of {product}; try {tries}"
    if train.eval_every is not None and train.eval_sequences % slice_:
        tries = _multiples_near(train.eval_sequences, slice_)
        yield f"train.eval_sequences = {train.eval_sequences}: must be a multiple of {product}; try {tries}"


def _batch_warmup(recipe: Recipe) -> Iterator[str]:
    """Every size that the batch takes must divide over the layout, and the last rise must end at the full size."""
    parallel, train = recipe.parallel, recipe.train
    start, steps, full = train.batch_warmup_start, train.batch_warmup_steps, train.global_batch_size
    slice_ = parallel.dp * parallel.microbatch_size
    if start is None:
        given = {"batch_warmup_steps": steps, "batch_warmup_increment": train.batch_warmup_increment}
        for key, value in given.items():
            if value is not None:
                yield (
                    f"train.{key} = {value}: needs the batch that the warm-up starts with; "
                    f"try train.batch_warmup_start={slice_}"
                )
        return
    if steps is None:
        yield f"train.batch_warmup_start = {start}: needs train.batch_warmup_steps; try {max(1, train.steps // 10)}"
    increment = train.batch_warmup_increment or start
    product = f"data ranks {parallel.dp} x parallel.microbatch_size {parallel.microbatch_size} = {slice_}"
    for key, value in {"start": start, "increment": increment}.items():
        if value % slice_:
            tries = _multiples_near(value, slice_)
            yield f"train.batch_warmup_{key} = {value}: must be a multiple of {product}; try {tries}"
    if start > full:
        yield (f"train.batch_warmup_start = {start}: must be at most train.global_batch_size = {full}; try {slice_}")
    elif (full - start) % increment:
        tries = _or(d for d in _divisors(full - start, near=increment) if d % slice_ == 0) if full % slice_ == 0 else ""
        yield (
            f"train.batch_warmup_increment = {increment}: must divide train.global_batch_size - "
            f"train.batch_warmup_start = {full - start}; try {tries or slice_}"
        )


def _precision(recipe: Recipe) -> Iterator[str]:
    optimizer, precision = recipe.optimizer, recipe.train.precision
    if optimizer.stochastic_rounding and precision != "bf16_pure":
        yield (
            f"optimizer.stochastic_rounding = true: train.precision = {precision} keeps its weights in float32, where "
            "there is nothing to round; try train.precision=bf16_pure"
        )
    for token in recipe.data.ignore_token_ids:
        if not 0 <= token < recipe.model.vocab:
            yield (
                f"data.ignore_token_ids = {list(recipe.data.ignore_token_ids)}: {token} is no token of model.vocab = "
                f"{recipe.model.vocab}; try ids from 0 to {recipe.model.vocab - 1}"
            )


def _others(recipe: Recipe) -> Iterator[str]:
    train, optimizer = recipe.train, recipe.optimizer
    last = train.steps if optimizer.decay_steps is None else optimizer.decay_steps
    if optimizer.warmup_steps > last:
        name = "train.steps" if optimizer.decay_steps is None else "optimizer.decay_steps"
        yield f"optimizer.warmup_steps = {optimizer.warmup_steps}: must be at most {name} = {last}; try {last // 10}"
    timeline = recipe.logging.timeline
    if timeline is not None and timeline > train.steps:
        yield f"logging.timeline = {timeline}: must be at most train.steps = {train.steps}; try {train.steps}"
    if recipe.data.source == "text" and not recipe.data.path:
        yield "data.path = null: data.source = text needs a file or a folder; try data.path=corpus.txt"
    if not recipe.checkpoint.resume:
        yield "checkpoint.resume = '': must be none, auto or the path of a checkpoint; try auto"
    if train.sample_top_k > recipe.model.vocab:
        yield (
            f"train.sample_top_k = {train.sample_top_k}: must be at most model.vocab = {recipe.model.vocab}; "
            "try 1, which is greedy"
        )
    if train.sample_tokens and not train.sample_prompt:
        yield "train.sample_prompt = '': a sample continues some text; try train.sample_prompt='def '"
    if recipe.run_dir is not None and not recipe.run_dir.strip():
        yield "run_dir = '': must be a folder; try run_dir=runs/mine"


def _divisors(number: int, *, near: int) -> list[int]:
    """Divisors of `number`, at most six: the ones nearest to `near`, in ascending order."""
    all_of_them = [d for d in range(1, min(number, _LARGEST_DIVISOR) + 1) if number % d == 0]
    return sorted(sorted(all_of_them, key=lambda d: abs(d - near))[:6])


def _multiple_from(smallest: int, factor: int) -> int:
    return -(-smallest // factor) * factor


def _multiples_near(number: int, factor: int) -> str:
    below = number // factor * factor
    return _or([below, below + factor] if below else [factor])


def _or(numbers: Iterable[object]) -> str:
    *head, last = [str(number) for number in numbers]
    return f"{', '.join(head)} or {last}" if head else last
