"""Starts `parallel3d-launch check` on the ranks of a recipe: locally, or as one of the ranks under
a launcher. The ranks import torch."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import fit_to_workers
from parallel3d.errors import ConfigError
from parallel3d.launch.failure import end_process
from parallel3d.launch.local import launch_local
from parallel3d.launch.rendezvous import Rendezvous, join_attempt
from parallel3d.models import check_model
from parallel3d.recipes.pretrain import run_rank


def check_cluster(recipe: Recipe, options: argparse.Namespace) -> int:
    """Runs the check locally, or one rank of it under a launcher. Returns the exit status."""
    check_model(recipe)
    options.run_dir = recipe.run_dir
    # A check leaves nothing in the run folder, even if it fails.
    train = replace(recipe.train, start_timeout_s=min(options.wait_s, recipe.train.start_timeout_s))
    recipe = replace(recipe, run_dir=None, train=train)
    rendezvous = Rendezvous.from_environment()
    if rendezvous is None:
        target = "parallel3d.tools.preflight.worker:check"
        return launch_local(target, recipe, recipe.parallel.world_size, arguments=(options,))
    try:
        recipe = fit_to_workers(recipe, rendezvous.world_size)
        rendezvous = join_attempt(rendezvous, recipe.train.start_timeout_s)
    except ConfigError as error:
        if rendezvous.rank == 0:
            raise
        return error.exit_status
    from parallel3d.tools.preflight.worker import check

    status, is_left_open = run_rank(partial(check, recipe, rendezvous, options), recipe, rendezvous)
    if is_left_open:
        end_process(status)
    return status
