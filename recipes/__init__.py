"""Recipes as YAML files, `pretrain`, which runs one, and the function that each of its local
workers runs. That is not in `pretrain`, because a process that multiprocessing starts runs the main
module once more under another name."""

from __future__ import annotations

# a bare `import recipes` would make a second class of everything
if __name__ != "parallel3d.recipes":
    raise ImportError("import this as parallel3d.recipes")

import os
import shlex
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError, printable
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.models import model_class
from parallel3d.planner.hardware.cluster import cluster_of_cuda
from parallel3d.planner.model.training import unmodeled_settings
from parallel3d.tools.arguments import HARDWARE

_FEWEST_LINES = 5  # of metrics.jsonl, since its first has the start in it


def shipped_recipes() -> dict[str, Path]:
    """Returns the recipes of this folder, by their bare names."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def find_recipe(name_or_path: str) -> Path:
    """Returns the file of a recipe, which is given by its path or as the bare name of a shipped
    recipe."""
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return shipped[name_or_path]
    path = Path(name_or_path)
    if os.path.isfile(path):  # which a name that is too long is not; Path.is_file raises
        return path
    if os.path.isdir(path):
        raise ConfigError(f"recipe {name_or_path}: a folder; name the YAML file in it")
    near = get_close_matches(name_or_path, shipped, 1)
    advice = f"shipped are {', '.join(shipped)}; or give the path of a file"
    if near:
        advice = f"did you mean {near[0]}?"
    raise ConfigError(f"recipe {name_or_path}: no such file or shipped recipe; {advice}")


@dataclass(frozen=True)
class Job:
    """The job of all ranks of a recipe: a function of this module, which each of them calls with
    the recipe, its place and `arguments`."""

    recipe: Recipe
    function: str = "work"
    arguments: tuple[object, ...] = ()
    notes: tuple[str, ...] = ()  # what the user is to know before it begins
    is_restart: bool = False  # its launcher has started it again

    @property
    def trains(self) -> bool:
        return self.function == "work"


def work(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """Runs one rank of the run to its end."""
    # this imports torch, which a wrong recipe need not wait for
    from parallel3d.training.worker import run_worker

    run_worker(recipe, rendezvous, model_class(recipe.model.architecture), peak_flops)
    if rendezvous.rank == 0 and (command := plan_with(recipe)):
        said = f"plan with what this run measured: {command}"
        print(printable(said), file=sys.stderr, flush=True)


def plan_with(recipe: Recipe) -> str | None:
    """Returns the command that plans with what a run that is done has measured of its cluster; None
    where it has too few lines of steady steps, or the planner does not know its model or its
    device."""
    import torch  # which the run has imported

    metrics = Path(recipe.run_dir or "") / "metrics.jsonl"
    lines = metrics.read_text().count("\n") if metrics.is_file() else 0
    if lines < _FEWEST_LINES or recipe.model.is_custom or any(unmodeled_settings(recipe)):
        return None
    gpu = "cpu"
    if recipe.train.device != "cpu" and torch.cuda.is_available():
        cluster = cluster_of_cuda(torch.cuda.get_device_name(), [HARDWARE])
        if cluster is None:
            return None
        gpu = cluster.device_file
    folder = shlex.quote(str(recipe.run_dir))
    return f"parallel3d-plan --model {folder}/config.yaml --gpu {gpu} --measured {folder}"


def read_saved(recipe: Recipe, rendezvous: Rendezvous, command: str, as_json: bool) -> None:
    """Runs one rank of `evaluate` or `generate` with the checkpoint that the recipe names."""
    from parallel3d.training.worker import read_saved as read

    read(recipe, rendezvous, model_class(recipe.model.architecture), command, as_json=as_json)


def peak_flops(cuda_name: str, precision: str) -> float | None:
    """Returns the dense peak FLOP/s of the GPU that CUDA calls so, from its hardware file; None
    where none lists it."""
    cluster = cluster_of_cuda(cuda_name, [HARDWARE])
    return None if cluster is None else cluster.device.peak(precision)
