"""The command `parallel3d-launch`: prints a launch script for a recipe, or checks the nodes. Its
subcommands are in commands.toml. Only the check imports torch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import product
from parallel3d.errors import ConfigError, printable
from parallel3d.recipes import named_recipe
from parallel3d.tools.cli_output import Reply
from parallel3d.tools.command_line import CommandLine
from parallel3d.tools.launch.script import LAUNCHERS, Launcher, Site

main = CommandLine("parallel3d-launch", Path(__file__).with_name("commands.toml")).main
_USUAL_NODE = 8  # Default of --gpus-per-node, or all workers if they are fewer.


def check(options: argparse.Namespace) -> Reply:
    """Checks the nodes for a recipe. The reply has no lines, because rank 0 prints the report."""
    # Imported late, because it imports the planner and the launcher.
    from parallel3d.tools.preflight.start import check_cluster

    return Reply(page=(), status=check_cluster(_recipe(options), options))


def _answer(kind: str, options: argparse.Namespace) -> Reply:
    recipe = _recipe(options)
    per_node = _workers_per_node(recipe, options.gpus_per_node)
    asked = vars(options)
    site = {key.name: asked[key.name] for key in fields(Site) if key.name in asked}
    launcher = Launcher(
        kind=kind,
        recipe=recipe,
        said=(options.recipe, *options.overrides),
        per_node=per_node,
        file=LAUNCHERS[kind][0],
        restarts=options.restarts,
        site=Site(**site),
        checks_first=asked.get("check_first", False),
    )
    text = launcher.text()
    for note in _notes(recipe, per_node, kind):
        print(f"warning: {printable(note)}", file=sys.stderr)
    return Reply(page=text.splitlines(), tree=lambda: {"script": text})


answer_torchrun = partial(_answer, "torchrun")
answer_slurm = partial(_answer, "slurm")
answer_torchx = partial(_answer, "torchx")
answer_k8s = partial(_answer, "k8s")


def _recipe(options: argparse.Namespace) -> Recipe:
    return named_recipe(options.recipe, options.overrides)


def _workers_per_node(recipe: Recipe, asked: int | None) -> int:
    workers = recipe.parallel.world_size
    per_node = asked or min(workers, _USUAL_NODE)
    if workers % per_node:
        fits = next(size for size in range(min(per_node, workers), 0, -1) if workers % size == 0)
        raise ConfigError(
            f"--gpus-per-node {per_node}: must divide the number of workers of the layout, "
            f"{product(recipe.parallel.axes)}; try --gpus-per-node {fits}"
        )
    return per_node


def _notes(recipe: Recipe, per_node: int, kind: str) -> list[str]:
    notes = []
    classes = list(recipe.train.callbacks)
    if ":" in recipe.model.architecture:
        classes.append(recipe.model.architecture)
    if kind == "k8s" and classes:
        notes.append(
            f"{', '.join(classes)}: not in the manifest; add the modules to the image, or put "
            "them at /work"
        )
    if per_node % recipe.parallel.tp:
        notes.append(
            f"parallel.tp = {recipe.parallel.tp}: does not divide the {per_node} workers of a "
            "node, but tp communicates in every layer; try a parallel.tp that stays within a node"
        )
    if recipe.checkpoint.every is None:
        notes.append(
            "checkpoint.every is not set, so a restart starts from step 0; try checkpoint.every=100"
        )
    return notes
