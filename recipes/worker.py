"""The function that each local worker of `parallel3d-train` runs. It is not in `pretrain`, because a process that
multiprocessing starts runs the main module once more under another name, and Python warns if it was imported before."""

from __future__ import annotations

from parallel3d.config.recipe import Recipe
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.models import model_class


def work(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """Runs one rank of the run to its end."""
    from parallel3d.training.worker import run_worker  # this imports torch, which a wrong recipe need not wait for

    run_worker(recipe, rendezvous, model_class(recipe.model.architecture))
