"""What each local worker of `parallel3d-train` runs. Not in `pretrain`: a process that multiprocessing starts runs the
main module once more under another name, which Python warns of where that module has been imported before."""

from __future__ import annotations

from parallel3d.config.recipe import Recipe
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.models import model_class


def work(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """One rank of the run, from here to its end."""
    from parallel3d.training.worker import run_worker  # torch, which a wrong recipe does not wait for

    run_worker(recipe, rendezvous, model_class(recipe.model.architecture))
