"""`parallel3d-check-layout`: checks that a layout trains the same model as one process, and reports
the first difference."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import parallel3d
from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import ParallelConfig
from parallel3d.errors import ConfigError
from parallel3d.models import check_model, shape_cards
from parallel3d.recipes import find_recipe, shipped_recipes
from parallel3d.tools.arguments import Parser, add_recipe, whole
from parallel3d.tools.check_layout.shrink import STEPS, VOCAB, shrink
from parallel3d.tools.cli_output import exit_status

if TYPE_CHECKING:
    from parallel3d.tools.check_layout.compare import LayoutComparison

# Maximum number of processes of a check. A layout with size 2 along each axis shows the same faults
# as a larger one.
_MOST_RANKS = 16
_EPILOG = """\
examples:
  parallel3d-check-layout quickstart
  parallel3d-check-layout quickstart parallel.sequence_parallel=true --layers 4
  parallel3d-check-layout --model my_model:build parallel.tp=2 parallel.dp_shard=2

The model and the batch of the recipe are reduced in size. The layout stays the same. Weights and token IDs are random, so
no data is read. With --model, function(mesh, ...) must return a module (docs/how-to/custom-model.md).

exit status:
    0  the same model: every loss, gradient, norm and weight agrees
    1  a different model; the first difference and its usual causes are printed
    2  wrong usage, or a layout that breaks a rule
   70  a rank failed, was killed or hung
   71  the loss or the gradient norm is not finite
"""  # noqa: E501


def main(arguments: Sequence[str] | None = None) -> int:
    return exit_status(arguments, _run)


def _run(arguments: list[str]) -> int:
    parser = Parser(
        prog="parallel3d-check-layout",
        description=(
            "Trains a few steps in a layout and in one process, from the same weights on the same "
            "batches, and compares every loss, gradient, gradient norm and weight."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_recipe(parser, shipped_recipes())
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="function that builds the model to check, instead of a recipe",
    )
    numbers = {
        "--layers": ("number of blocks (default: 2, or the number of pipeline stages)", None),
        "--hidden": ("hidden size (default: 64, or more if the heads need it)", None),
        "--vocab": (f"with --model: vocabulary size (default: {VOCAB})", None),
        "--steps": (f"number of steps to compare (default: {STEPS})", STEPS),
    }
    for option, (text, default) in numbers.items():
        parser.add_argument(option, type=whole, metavar="N", default=default, help=text)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the report"
    )
    version = f"parallel3d {parallel3d.__version__}"
    parser.add_argument(
        "--version", action="version", version=version, help="print the version and exit"
    )
    options = parser.parse_intermixed_args(arguments)
    comparison = _check_model(options) if options.model else _check_recipe(options)
    from parallel3d.tools.check_layout.report import as_json, as_text

    print(as_json(comparison) if options.json else as_text(comparison))
    return 0 if comparison.first is None else 1


def _check_recipe(options: argparse.Namespace) -> LayoutComparison:
    if options.recipe is None or options.vocab:
        raise ConfigError(
            "parallel3d-check-layout: give a RECIPE, such as quickstart model.vocab=300, or "
            "--model module:function --vocab 300"
        )
    recipe = load_recipe(find_recipe(options.recipe), options.overrides, cards=shape_cards())
    recipe = shrink(recipe, layers=options.layers, hidden=options.hidden, steps=options.steps)
    _check_ranks(recipe.parallel)
    check_model(recipe)
    # These import torch, which --help and errors in keys do not need.
    from parallel3d.tools.check_layout.compare import compare
    from parallel3d.tools.check_layout.plain import record_plain
    from parallel3d.tools.check_layout.record import record_recipe
    from parallel3d.tools.local_ranks import run_ranks

    alone = run_ranks(record_plain, recipe, world_size=1)
    return compare(alone, run_ranks(record_recipe, recipe, world_size=recipe.parallel.world_size))


def _check_model(options: argparse.Namespace) -> LayoutComparison:
    """Compares the models that a function builds for a layout and for one process. Only
    data-parallel and tensor-parallel axes can be set, because the model has no pipeline stages.
    """
    settings = [options.recipe, *options.overrides] if options.recipe else []
    found = [re.fullmatch(r"parallel\.(dp_replicate|dp_shard|tp)=([1-9]\d*)", s) for s in settings]
    axes: dict[str, Any] = {each[1]: int(each[2]) for each in found if each}
    parallel = ParallelConfig(**axes)
    if parallel.world_size == 1 or None in found:
        raise ConfigError(
            f"{' '.join(settings) or 'no layout'}: with --model set only parallel.dp_replicate, "
            "dp_shard and tp, to at least two processes in total; try parallel.tp=2"
        )
    _check_ranks(parallel)
    from parallel3d.tools.check_layout.compare import compare
    from parallel3d.tools.check_layout.model import ModelCheck, load_builder, record_model
    from parallel3d.tools.local_ranks import run_ranks

    sizes = {"layers": options.layers, "hidden": options.hidden, "vocab": options.vocab or VOCAB}
    given = {name: size for name, size in sizes.items() if size is not None}
    job = ModelCheck(options.model, parallel, given, options.steps)
    load_builder(job)  # Report errors before any process starts.
    alone = run_ranks(record_model, replace(job, parallel=ParallelConfig()), world_size=1)
    return compare(alone, run_ranks(record_model, job, world_size=parallel.world_size))


def _check_ranks(parallel: ParallelConfig) -> None:
    if parallel.world_size > _MOST_RANKS:
        largest = max(parallel.axes, key=parallel.axes.__getitem__)
        raise ConfigError(
            f"the layout needs {parallel.world_size} processes, but a check starts at most "
            f"{_MOST_RANKS}; 2 along each axis show the same faults, so try parallel.{largest}=2"
        )
