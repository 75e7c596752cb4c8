"""The command `parallel3d-launch`: prints a launcher for a recipe, or checks the nodes that it is
to run on. torch is imported by a check alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import product
from parallel3d.errors import ConfigError, printable
from parallel3d.models import shape_cards
from parallel3d.recipes import find_recipe, shipped_recipes
from parallel3d.tools.arguments import Parser, add_recipe, amount, whole
from parallel3d.tools.launch.script import LAUNCHERS, RESTARTS, Launcher, Site
from parallel3d.tools.reply import exit_status

_USUAL_NODE = 8  # GPUs of most makers' nodes
_EPILOG = """\
examples:
  parallel3d-launch slurm my.yaml --partition gpu --time 24:00:00 > job.sbatch && sbatch job.sbatch
  parallel3d-launch torchrun my.yaml parallel.tp=4 parallel.dp_shard=4 > launch.sh
  SCHEDULER=local_cwd bash <(parallel3d-launch torchx quickstart train.device=cpu)
  parallel3d-launch k8s my.yaml --image IMAGE --claim CLAIM | kubectl apply -f -
  parallel3d-launch check my.yaml                         what this machine has and gives, and what would break the run
  srun python -m parallel3d.tools.launch check my.yaml    the same on all nodes of a job; torchrun starts it likewise

Each start goes on from the newest checkpoint of the run's folder, and starts anew where there is none.
"""  # noqa: E501
CHECK = "check"
WAIT_S = 60.0
_CHECK_HELP = "check the nodes before the first step, on all of them at once"
_CHECK_EPILOG = (
    "exit status: 0 the recipe can run; 1 something would break it, and the node is named; 2 "
    "usage, or a recipe that breaks a rule; 69 ranks did not come; 70 a rank died or hung"
)
_HELP = {
    "torchrun": "a script to run on every node",
    "slurm": "a script for sbatch, which asks for the job again where that helps",
    "torchx": "a script that submits to one of torchx's schedulers",
    "k8s": "a manifest with the recipe, a Service and a Job",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: returns the exit status."""
    return exit_status(argv, _run)


def _run(arguments: list[str]) -> int:
    parser = _parser()
    options, left = parser.parse_known_args(arguments)
    for word in left:  # a subcommand's parser takes no words behind its options
        if word.startswith("-"):
            parser.error(f"{word}: no such option of {options.kind}")
        if options.recipe is None:
            options.recipe = word
        else:
            options.overrides.append(word)
    if options.recipe is None:
        raise ConfigError(
            f"RECIPE: required; try parallel3d-launch {options.kind} quickstart, or the path of a "
            "recipe"
        )
    recipe = load_recipe(find_recipe(options.recipe), options.overrides, cards=shape_cards())
    if options.kind == CHECK:
        # this imports the planner and the start of a run
        from parallel3d.tools.preflight.start import check_cluster

        return check_cluster(recipe, options)
    per_node = _workers_per_node(recipe, options.gpus_per_node)
    said = (options.recipe, *options.overrides)
    site = Site(
        **{key.name: vars(options)[key.name] for key in fields(Site) if key.name in vars(options)}
    )
    launcher = Launcher(
        kind=options.kind,
        recipe=recipe,
        said=said,
        per_node=per_node,
        file=LAUNCHERS[options.kind][0],
        restarts=options.restarts,
        site=site,
        checks_first=vars(options).get("check_first", False),
    )
    text = launcher.text()
    for note in _notes(recipe, per_node, options.kind):
        print(f"warning: {printable(note)}", file=sys.stderr)
    print(text, end="")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="parallel3d-launch",
        description="Prints what starts a recipe on many nodes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(
        dest="kind", metavar="{" + ",".join([*LAUNCHERS, CHECK]) + "}", required=True
    )
    _add_check(
        kinds.add_parser(CHECK, help=_CHECK_HELP, description=_CHECK_HELP, epilog=_CHECK_EPILOG)
    )
    for kind in LAUNCHERS:
        each = kinds.add_parser(kind, help=_HELP[kind], description=f"Prints {_HELP[kind]}.")
        add_recipe(each, shipped_recipes())
        each.add_argument(
            "--gpus-per-node",
            type=whole,
            metavar="N",
            help=f"workers of a node (default: {_USUAL_NODE}, or all of them where they are fewer)",
        )
        each.add_argument(
            "--restarts",
            type=whole,
            metavar="N",
            default=RESTARTS,
            help=f"starts after a failure ({RESTARTS})",
        )
        if kind != "torchx":  # which starts one program in a job
            each.add_argument(
                "--check-first",
                action="store_true",
                help="check the nodes before each start (parallel3d-launch check)",
            )
        if kind == "slurm":
            each.add_argument("--partition", metavar="NAME", help="where the job is queued")
            each.add_argument("--account", metavar="NAME", help="who pays for it")
            each.add_argument(
                "--time", metavar="T", help="the limit of one start, such as 24:00:00"
            )
            each.add_argument(
                "--container",
                metavar="IMAGE",
                help="the image that srun starts the workers in (pyxis)",
            )
        elif kind == "k8s":
            each.add_argument(
                "--image", default="IMAGE", help="the container image, with parallel3d in it"
            )
            each.add_argument(
                "--claim",
                default="CLAIM",
                help="the PersistentVolumeClaim that is mounted at /work",
            )
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, shipped_recipes())
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print the report as one JSON object"
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="the hardware file that --emit-hardware starts from: a name or a file",
    )
    parser.add_argument(
        "--emit-hardware",
        metavar="FILE",
        type=Path,
        help="write what was measured as a hardware file, for parallel3d-plan --hardware FILE",
    )
    parser.add_argument(
        "--strict", action="store_true", help="warnings give the exit status 1, too"
    )
    parser.add_argument(
        "--wait",
        metavar="S",
        type=amount("a time", zero=False),
        dest="wait_s",
        default=WAIT_S,
        help=f"seconds to wait for all ranks to come ({WAIT_S:.0f})",
    )


def _workers_per_node(recipe: Recipe, asked: int | None) -> int:
    workers = recipe.parallel.world_size
    per_node = asked or min(workers, _USUAL_NODE)
    if workers % per_node:
        fits = next(size for size in range(min(per_node, workers), 0, -1) if workers % size == 0)
        raise ConfigError(
            f"--gpus-per-node {per_node}: must divide the layout's {product(recipe.parallel.axes)} "
            f"workers; try --gpus-per-node {fits}"
        )
    return per_node


def _notes(recipe: Recipe, per_node: int, kind: str) -> list[str]:
    notes = []
    classes = [
        *recipe.train.callbacks,
        *([recipe.model.architecture] if recipe.model.is_custom else []),
    ]
    if kind == "k8s" and classes:
        notes.append(
            f"{', '.join(classes)}: not in the manifest; put the modules into the image, or at "
            "/work"
        )
    if per_node % recipe.parallel.tp:
        notes.append(
            f"parallel.tp = {recipe.parallel.tp}: does not divide a node of {per_node}, and tp "
            "sends in every layer; try a parallel.tp that stays within a node"
        )
    if recipe.checkpoint.every is None:
        notes.append(
            "checkpoint.every is not set, so a restart begins anew; try checkpoint.every=100"
        )
    return notes
