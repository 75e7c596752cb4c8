"""One rank of `parallel3d-launch check`: reports its facts and measures with the others. Rank 0
prints the report."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ClusterError, printable
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.mesh import axes_of, build_mesh
from parallel3d.tools.preflight.facts import RankFacts, RecipeNeeds, host_facts, marked, rank_facts
from parallel3d.tools.preflight.findings import CheckReport, can_train_together, slow_ranks
from parallel3d.tools.preflight.measure import TimedLink, measure_axis, measure_matmuls

_ROUNDS = 3
_T = TypeVar("_T")


def check(recipe: Recipe, rendezvous: Rendezvous, options: argparse.Namespace) -> None:
    """Checks the cluster. Every rank must call it, and rank 0 prints the report. Raises
    ClusterError on all ranks for a finding that would break the run, or with --strict for any
    finding.
    """
    start = time.perf_counter()
    with process_group(recipe, rendezvous) as device:
        facts = _exchange_facts(recipe, rendezvous, options, device)
        matmuls: list[float] = []
        links: list[TimedLink] = []
        if can_train_together(facts):
            matmuls, links = _measure(recipe, device)
        report = CheckReport(
            recipe=recipe,
            needs=RecipeNeeds.of(recipe, on_cpu=device.type == "cpu"),
            facts=facts,
            matmuls=matmuls,
            links=links,
            seconds=time.perf_counter() - start,
        )
        if rendezvous.rank == 0:
            text = "\n".join(report.lines())
            if options.json:
                text = json.dumps(report.tree())
            print(printable(text), flush=True)
    wrong = [each.text for each in report.findings() if each.breaks or options.strict]
    if wrong:
        more = f" ({len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ClusterError(f"check: {wrong[0]}{more}")


def _exchange_facts(
    recipe: Recipe, rendezvous: Rendezvous, options: argparse.Namespace, device: torch.device
) -> list[RankFacts]:
    with marked(options.run_dir) if rendezvous.rank == 0 else nullcontext("") as mark:
        name = [mark]
        dist.broadcast_object_list(name)
        dist.barrier()
        clock_s = time.time()
        own = replace(rank_facts(rendezvous.rank, device), clock_s=clock_s)
        if rendezvous.local_rank == 0:
            own = host_facts(own, recipe, options.run_dir, name[0])
        return _all_gather(own)


def _measure(recipe: Recipe, device: torch.device) -> tuple[list[float], list[TimedLink]]:
    """Measures matmuls (FLOP/s) and the links along each axis. Returns the results of all ranks."""
    own = 0.0
    for _ in range(_ROUNDS):  # Repeat, because a rank that is interrupted once is not slow.
        own = max(own, measure_matmuls(device, recipe.train.precision))
        matmuls = _all_gather(own)
        if not slow_ranks(matmuls):
            break
    links: list[TimedLink] = []
    mesh = build_mesh(recipe.parallel, device.type)
    for name, axis in axes_of(mesh).items():
        if axis.size > 1:
            links += measure_axis(name, axis, device)
    all_links = _all_gather(links)
    return matmuls, list(chain.from_iterable(all_links))


def _all_gather(own: _T) -> list[_T]:
    everyone = [own] * dist.get_world_size()
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own)
    return everyone
