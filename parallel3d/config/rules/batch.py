"""The rules of the global batch: each size that it takes divides over the data ranks and their microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.config.recipe import Recipe
from parallel3d.config.rules.suggestions import any_of, divisors_near, multiples_near


def batch_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each number of sequences that does not divide over the data ranks and their microbatches."""
    parallel, train = recipe.parallel, recipe.train
    slice_ = parallel.dp * parallel.microbatch_size  # sequences that one microbatch takes over all data ranks
    product = f"data ranks {parallel.dp} x parallel.microbatch_size {parallel.microbatch_size} = {slice_}"
    batch = train.global_batch_size
    if batch % slice_:
        tries = any_of(multiples_near(batch, slice_))
        yield f"train.global_batch_size = {batch}: must be a multiple of {product}; try {tries}"
    if train.eval_every is not None and train.eval_sequences % slice_:
        tries = any_of(multiples_near(train.eval_sequences, slice_))
        yield f"train.eval_sequences = {train.eval_sequences}: must be a multiple of {product}; try {tries}"


def batch_warmup_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each size of the batch that does not divide over the layout, and one if the last rise does not end
    at the full size."""
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
            tries = any_of(multiples_near(value, slice_))
            yield f"train.batch_warmup_{key} = {value}: must be a multiple of {product}; try {tries}"
    if start > full:
        yield f"train.batch_warmup_start = {start}: must be at most train.global_batch_size = {full}; try {slice_}"
    elif (full - start) % increment:
        steps_up = [d for d in divisors_near(full - start, increment) if full % slice_ == d % slice_ == 0]
        yield (
            f"train.batch_warmup_increment = {increment}: must divide train.global_batch_size - "
            f"train.batch_warmup_start = {full - start}; try {any_of(steps_up or [slice_])}"
        )
