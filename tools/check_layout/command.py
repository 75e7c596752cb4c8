"""`parallel3d-check-layout`: checks that a layout trains the same model as one process, and reports
the first difference."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel3d.config.recipe import ParallelConfig
from parallel3d.errors import ConfigError
from parallel3d.models import check_model
from parallel3d.recipes import named_recipe
from parallel3d.tools.check_layout.shrink import VOCAB, shrink
from parallel3d.tools.cli_output import Reply
from parallel3d.tools.command_line import SingleCommand

if TYPE_CHECKING:
    from parallel3d.tools.check_layout.compare import LayoutComparison

# Maximum number of processes of a check. A layout with size 2 along each axis shows the same faults
# as a larger one.
_MOST_RANKS = 16

main = SingleCommand(
    "parallel3d-check-layout",
    Path(__file__).with_name("command.toml"),
).main


def answer(options: argparse.Namespace) -> Reply:
    comparison = _check_model(options) if options.model else _check_recipe(options)
    from parallel3d.tools.check_layout.report import as_json, as_text

    text = as_json(comparison) if options.json else as_text(comparison)
    return Reply(page=text.splitlines(), status=0 if comparison.first is None else 1)


def _check_recipe(options: argparse.Namespace) -> LayoutComparison:
    if options.recipe is None or options.vocab:
        raise ConfigError(
            "parallel3d-check-layout: give a RECIPE, such as quickstart model.vocab=300, or "
            "--model module:function --vocab 300"
        )
    recipe = named_recipe(options.recipe, options.overrides)
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
