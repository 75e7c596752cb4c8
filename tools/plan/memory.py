"""`parallel3d-plan memory`: memory of a layout by pipeline rank and kind, or of model states."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from parallel3d.config.recipe import ParallelConfig
from parallel3d.config.rules import refuse
from parallel3d.config.sharding_strategies import ShardingName
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.memory.states import RankStates
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.uncertainty import LEVEL
from parallel3d.planner.report.json import hardware_tree, memory_tree, model_tree, parallel_tree
from parallel3d.planner.report.page import (
    MEMORY_KINDS,
    bar,
    gib,
    header,
    layout_text,
    wrapped,
)
from parallel3d.planner.search.request import PlanRequest, Strategy
from parallel3d.planner.search.space import layout_errors
from parallel3d.tools.aliases.layout import read_parallel
from parallel3d.tools.cli_output import NOTHING_FITS, Reply
from parallel3d.tools.plan.accuracy import how_sure
from parallel3d.tools.plan.inputs import ParsedRequest, read_request, sequence_bytes, usual_request
from parallel3d.tools.plan.models import find_model

_STRATEGIES: dict[ShardingName, str] = {
    "NO_SHARD": "DDP",
    "SHARD_OPTIMIZER": "ZeRO-1",
    "SHARD_GRAD_OP": "ZeRO-2",
    "FULL_SHARD": "ZeRO-3",
}
_MOST_RANKS = 8  # If there are more pipeline ranks, at most six are shown.


def asked_layout(options: argparse.Namespace) -> tuple[ParsedRequest, Strategy]:
    """Returns the request, and the layout of --layout or the recipe.

    Raises ConfigError if there is none, or if it breaks a rule.
    """
    asked_parallel = read_parallel(options.layout, "--layout") if options.layout else None
    size = asked_parallel.world_size if asked_parallel else None
    asked = read_request(options, gpus=size, asks="--layout tp=8,pp=2,dp_shard=4")
    parallel = asked_parallel or (
        asked.model.recipe.parallel if asked.model.recipe else ParallelConfig()
    )
    found = Strategy(replace(asked.request, gpus=parallel.world_size), parallel)
    refuse([*layout_errors(found.request, parallel)])
    return asked, found


def answer(options: argparse.Namespace) -> Reply:
    """Reports the memory of a layout, or without one, for parallel3d, the model's states by
    strategy.
    """
    is_own = options.framework == "parallel3d"
    if is_own and not options.explain and not options.layout and find_model(options).recipe is None:
        request = usual_request(options, gpus=1)
        tree = _states_tree(request, options.gpus)
        return Reply(page=_states_page(request, tree), tree=lambda: rounded(tree))
    asked, found = asked_layout(options)
    return Reply(
        page=_page(asked, found, whole=options.explain),
        tree=lambda: {**_tree(found), "notes": asked.model.notes},
        status=0 if found.memory.total <= found.request.usable_bytes else NOTHING_FITS,
    )


def _states_tree(request: PlanRequest, sizes: tuple[int, ...]) -> dict[str, Any]:
    rows = {}
    for name in _STRATEGIES:
        rows[name] = {gpus: sum(_states(request, name, gpus)) / GIB for gpus in sizes}
    states = _states(request, "NO_SHARD", 1)
    return {
        "schema": "parallel3d.states/1",
        "bytes_per_parameter": [bytes_ / total_parameters(request.shape) for bytes_ in states],
        "gib_per_gpu": rows,
        "activations_gib": sequence_bytes(request) / GIB,
    }


def _states(request: PlanRequest, sharding: ShardingName, gpus: int) -> tuple[float, float, float]:
    """Returns bytes per GPU: weights, gradients, optimizer states.

    Weights include the unsharded ones that stay in memory between forward and backward pass.
    """
    on_all = replace(request, gpus=gpus, global_batch_size=gpus)
    run = on_all.planned_run(ParallelConfig(dp_shard=gpus, sharding=sharding))
    states = RankStates(run, 0)
    weights, gradients, optimizer = states.static_bytes
    if states.is_sharded:
        (unit,) = states.units
        gradients += states.reduced * unit.shard
        if not states.frees_forward:
            weights += states.item * unit.padded
    return weights, gradients, optimizer


def _states_page(request: PlanRequest, tree: dict[str, Any]) -> Iterator[str]:
    yield from header(request, has_size=False)
    weights, gradients, optimizer = tree["bytes_per_parameter"]
    each = f"weights {weights:.3g}, gradients {gradients:.3g}, optimizer states {optimizer:.3g}"
    yield f"bytes     per parameter: {each}; {weights + gradients + optimizer:.3g} in all"
    yield f"sequence  {tree['activations_gib']:.1f} GiB of activations without recompute"
    yield ""
    heads = "".join(f"{gpus:>10}" for gpus in tree["gib_per_gpu"]["NO_SHARD"])
    yield f"{'GiB of states, by GPUs':<26}{heads}"
    for name, row in tree["gib_per_gpu"].items():
        cells = "".join(f"{held:>10.2f}" for held in row.values())
        yield f"{name:<17}{_STRATEGIES[name]:<9}{cells}"


def explained(found: Strategy, *, whole: bool) -> Iterator[str]:
    """Yields a line per pipeline rank (of many ranks, at most six). With `whole`, also yields the
    kinds of memory at the highest peak.
    """
    run = found.run
    usable_bytes = found.request.usable_bytes
    ranks = memory_by_rank(run)
    worst = found.memory
    shown = ranks
    if len(ranks) > _MOST_RANKS:
        last = len(ranks) - 1
        shown = [ranks[rank] for rank in sorted({0, 1, last // 2, last - 1, last, worst.rank})]
    # The GiB column includes the kinds that are left out here. --explain shows them.
    columns = [
        kind for kind in MEMORY_KINDS if kind not in ("temporary", "fragmentation", "context")
    ]
    yield f"{'rank':<5}{'layers':>6}" + "".join(f"  {kind}" for kind in columns) + f"{'GiB':>8}"
    for memory in shown:
        cells = "".join(f"{_cell(getattr(memory, kind)):>{len(kind) + 2}}" for kind in columns)
        share = memory.total / usable_bytes
        mark = "  <" if memory.rank == worst.rank else ""
        layers = run.ranks[memory.rank].layers
        yield f"{memory.rank:<5}{layers:>6}{cells}{gib(memory.total):>8} {bar(share)}{mark}"
    if len(shown) < len(ranks):
        yield f"({len(shown)} of {len(ranks)} pipeline ranks are shown)"
    if not whole:
        return
    yield ""
    yield f"pipeline rank {worst.rank} has the highest peak, in GiB:"
    for kind in MEMORY_KINDS:
        yield f"  {kind:<14}{_cell(getattr(worst, kind)):>7}"
    yield f"  {'total':<14}{_cell(worst.total):>7}  of {usable_bytes / GIB:.2f} usable"


def _cell(bytes_: float) -> str:
    if not bytes_:
        return "-"
    if bytes_ >= 0.005 * GIB:
        return f"{bytes_ / GIB:.2f}"
    return f"{bytes_ / GIB:.1g}"


def _page(asked: ParsedRequest, found: Strategy, *, whole: bool) -> Iterator[str]:
    request = found.request
    yield from header(request)
    yield f"layout    {layout_text(found.parallel)}"
    yield ""
    yield from explained(found, whole=whole)
    yield ""
    usable = request.usable_bytes
    total = found.memory.total
    limit = f"the {usable / GIB:.1f} GiB that --risk or --mem-fraction allows"
    if total > usable:
        yield f"does not fit: {(total - usable) / GIB:.1f} GiB more than {limit}"
    else:
        yield f"fits: {total / usable:.0%} of {limit}"
    around = found.errors.around("memory", total)
    between = f"{gib(around.low)} to {gib(around.high)} GiB"
    yield from wrapped("range", f"{between} ({10 * LEVEL:.0f} in 10)")
    yield from wrapped("how sure", how_sure(request))
    yield from asked.note_lines()


def _tree(found: Strategy) -> dict[str, Any]:
    request = found.request
    run = found.run
    worst = found.memory
    spread = found.errors
    ranks = [
        {
            "rank": memory.rank,
            "layers": run.ranks[memory.rank].layers,
            "parameters": round(run.shard_numel(run.ranks[memory.rank], 1)),
            "memory_gib": memory_tree(memory),
        }
        for memory in memory_by_rank(run)
    ]
    tree = {
        "schema": "parallel3d.memory/1",
        "model": model_tree(request.shape),
        "hardware": hardware_tree(request.cluster),
        "parallel": parallel_tree(found.parallel),
        "seq_len": request.seq_len,
        "global_batch_size": request.global_batch_size,
        "precision": request.precision,
        "usable_gib": request.usable_bytes / GIB,
        "fits": worst.total <= request.usable_bytes,
        "worst_rank": worst.rank,
        "memory_gib": memory_tree(worst),
        "ranges": {"memory_gib": asdict(spread.around("memory", worst.total / GIB))},
        "chance_to_fit": spread.chance_to_fit(worst.total, request.cluster.device.memory_bytes),
        "ranks": ranks,
    }
    return rounded(tree)
