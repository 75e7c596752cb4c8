"""The rules of what a run reads, rounds, records and writes."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.config.recipe import Recipe


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
