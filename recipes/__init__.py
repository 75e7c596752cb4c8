"""Shipped recipes as YAML files, and the functions that the workers of a run execute.

The functions are not in `pretrain`, because a process started by multiprocessing imports the main
module again, as `__mp_main__`."""

from __future__ import annotations

# A bare `import recipes` would create a second copy of every class.
if __name__ != "parallel3d.recipes":
    raise ImportError("import this as parallel3d.recipes")

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError, printable
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.models import model_class, shape_cards
from parallel3d.planner.hardware.cluster import cluster_of_cuda
from parallel3d.planner.model.training import unmodeled_settings
from parallel3d.tools.arguments import HARDWARE

# Minimum number of lines in metrics.jsonl to plan with. The first includes the start-up.
_FEWEST_LINES = 5


def shipped_recipes() -> dict[str, Path]:
    """Returns the shipped recipes by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def find_recipe(name_or_path: str) -> Path:
    """Returns the file of a recipe, given its path or the name of a shipped recipe."""
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return shipped[name_or_path]
    path = Path(name_or_path)
    if os.path.isfile(path):  # os.path, because Path.is_file raises for a name that is too long
        return path
    if os.path.isdir(path):
        raise ConfigError(f"recipe {name_or_path}: is a folder; use the path of a YAML file in it")
    near = get_close_matches(name_or_path, shipped, 1)
    advice = f"use one of {', '.join(shipped)}, or the path of a file"
    if near:
        advice = f"did you mean {near[0]}?"
    raise ConfigError(f"recipe {name_or_path}: no such file or shipped recipe; {advice}")


def named_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Loads a recipe, given its path or the name of a shipped recipe."""
    return load_recipe(find_recipe(name_or_path), overrides, cards=shape_cards())


@dataclass(frozen=True)
class Job:
    """Function of this module that all ranks call with `recipe`, their rendezvous and
    `arguments`."""

    recipe: Recipe
    function: str = "work"  # name of the function
    arguments: tuple[object, ...] = ()
    notes: tuple[str, ...] = ()  # warnings to print before the job starts
    is_restart: bool = False  # True if the launcher has restarted the job

    @property
    def trains(self) -> bool:
        return self.function == "work"


def work(recipe: Recipe, rendezvous: Rendezvous, command: Sequence[str] = ()) -> None:
    """Runs one rank of a training run that the user started with `command`."""
    # Imports torch, so errors in a recipe are reported before.
    from parallel3d.tools.report.update import ReportWriter
    from parallel3d.training.worker import run_worker

    model = model_class(recipe.model.architecture)
    run_worker(recipe, rendezvous, model, peak_flops, [ReportWriter()], command=command)
    if rendezvous.rank == 0 and (advice := plan_with(recipe)):
        said = f"to plan with the speed that this run measured: {advice}"
        print(printable(said), file=sys.stderr, flush=True)


def plan_with(recipe: Recipe) -> str | None:
    """Returns the command that plans with the measured speed of a completed run.

    Returns None if the run has too few metrics lines, or if the planner does not support the recipe
    or the GPU."""
    import torch  # already imported by `work`

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
    """Returns the dense peak FLOP/s of a GPU, or None if no hardware file lists its name."""
    cluster = cluster_of_cuda(cuda_name, [HARDWARE])
    return None if cluster is None else cluster.device.peak(precision)
