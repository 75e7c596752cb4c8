"""The rules of a recipe's `local_sgd` section."""

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
