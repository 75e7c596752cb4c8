"""What the `local_sgd` section of a recipe must keep, a line for each rule that is broken; no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel3d.config.recipe import LocalSgdConfig, Recipe

_INSIDE_A_REPLICA = {"HYBRID_SHARD": "FULL_SHARD", "_HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}


def local_sgd_numbers(local: LocalSgdConfig) -> Iterator[str]:
    """Of numbers alone."""
    if not 0 < local.outer_lr < math.inf:
        yield f"local_sgd.outer_lr = {local.outer_lr}: must be above 0 and finite; try 0.7"
    if not 0 <= local.outer_momentum < 1:
        yield f"local_sgd.outer_momentum = {local.outer_momentum}: must be at least 0 and below 1; try 0.9"
    if local.mixing is not None and not 0 <= local.mixing < 1:
        yield (
            f"local_sgd.mixing = {local.mixing}: must be at least 0 and below 1, with which replicas never meet; try 0"
        )


def local_sgd_faults(recipe: Recipe) -> Iterator[str]:
    """Of the section together with the layout and the run."""
    local = recipe.local_sgd
    if local.sync_every is None:
        yield from _unused(local, recipe.train.steps)
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
    yield from _streaming(local, every, recipe.model.layers)
    if local.nesterov and local.outer_momentum == 0:
        yield (
            "local_sgd.nesterov = true: needs momentum, and local_sgd.outer_momentum = 0; "
            "try local_sgd.nesterov=false, or local_sgd.outer_momentum=0.9"
        )


def _unused(local: LocalSgdConfig, steps: int) -> Iterator[str]:
    for key in fields(local):
        if getattr(local, key.name) != key.default:
            yield (
                f"local_sgd.{key.name} = {getattr(local, key.name)}: means nothing while gradients are summed in every "
                f"step; try local_sgd.sync_every={min(20, steps)} beside it, or drop it"
            )


def _streaming(local: LocalSgdConfig, every: int, layers: int) -> Iterator[str]:
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
