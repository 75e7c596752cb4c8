"""The rules of what a run reads, rounds, records and writes, and of its `local_sgd` section."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from parallel3d.config.recipe import LocalSgdConfig, Recipe

_INSIDE_A_REPLICA = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def local_sgd_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting of local SGD that does not fit the layout, the model or the length of the run."""
    local = recipe.local_sgd
    if local.sync_every is None:
        yield from _unused_errors(local, recipe.train.steps)
        return
    every, parallel, steps = local.sync_every, recipe.parallel, recipe.train.steps
    if parallel.dp_replicate == 1:
        yield (
            f"local_sgd.sync_every = {every}: needs replicas that train apart, and parallel.dp_replicate = 1; "
            "try parallel.dp_replicate=2, or local_sgd.sync_every=null"
        )
    if parallel.sharding in _INSIDE_A_REPLICA:
        yield (
            f"parallel.sharding = {parallel.sharding}: sums gradients over parallel.dp_replicate in every step, which "
            f"local_sgd.sync_every = {every} is there to avoid; try {_INSIDE_A_REPLICA[parallel.sharding]}"
        )
    if every > steps:
        yield (
            f"local_sgd.sync_every = {every}: must be at most train.steps = {steps}, or replicas meet but at the end; "
            f"try {max(1, steps // 10)}"
        )
    yield from _fragment_errors(local, every, recipe.model.layers)
    if local.nesterov and local.outer_momentum == 0:
        yield (
            "local_sgd.nesterov = true: needs momentum, and local_sgd.outer_momentum = 0; "
            "try local_sgd.nesterov=false, or local_sgd.outer_momentum=0.9"
        )


def _unused_errors(local: LocalSgdConfig, steps: int) -> Iterator[str]:
    """One line for each key that is set although gradients are summed in every step."""
    for key in fields(local):
        if getattr(local, key.name) != key.default:
            yield (
                f"local_sgd.{key.name} = {getattr(local, key.name)}: means nothing while gradients are summed in every "
                f"step; try local_sgd.sync_every={min(20, steps)} beside it, or drop it"
            )


def _fragment_errors(local: LocalSgdConfig, every: int, layers: int) -> Iterator[str]:
    """One line for each setting of the fragments that the blocks or the steps between two synchronisations forbid."""
    if local.fragments > layers:
        yield (
            f"local_sgd.fragments = {local.fragments}: must be at most model.layers = {layers}, because fragments are "
            f"made of blocks; try {min(layers, every)}"
        )
    if local.fragments > every:
        yield (
            f"local_sgd.fragments = {local.fragments}: must be at most local_sgd.sync_every = {every}, because each "
            f"has a step of its own; try {min(layers, every)}"
        )
    if local.overlap_steps >= every:
        yield (
            f"local_sgd.overlap_steps = {local.overlap_steps}: must be below local_sgd.sync_every = {every}, or a "
            f"fragment leaves again before it has arrived; try {every // 2}"
        )


def run_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting of the run that contradicts another one or is empty."""
    train, optimizer, precision = recipe.train, recipe.optimizer, recipe.train.precision
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
