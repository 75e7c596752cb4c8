"""One rank of `parallel3d-launch check`: it reports its facts and measures with the others. Rank 0
prints the report."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ClusterError, ConfigError, printable
from parallel3d.launch.devices import tp_warning
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.mesh import axes_of, build_mesh
from parallel3d.tools.cli_output import write_output
from parallel3d.tools.preflight.emit import hardware_text
from parallel3d.tools.preflight.expected import RecipeNeeds, base_cluster
from parallel3d.tools.preflight.facts import (
    RankFacts,
    data_problem,
    disk_facts,
    leave_mark,
    rank_facts,
)
from parallel3d.tools.preflight.findings import (
    Measured,
    can_train_together,
    find,
    slow_ranks,
    slowest_links,
)
from parallel3d.tools.preflight.measure import host_axes, measure_axis, measure_matmuls
from parallel3d.tools.preflight.report import CheckReport

_ROUNDS = 3
_T = TypeVar("_T")


def check(recipe: Recipe, rendezvous: Rendezvous, options: argparse.Namespace) -> None:
    """Checks the cluster. Every rank calls it; rank 0 prints the report. Raises ClusterError on all
    ranks if something would break the run."""
    start = time.perf_counter()
    with process_group(recipe, rendezvous) as device:
        facts = _exchange_facts(recipe, rendezvous, options, device)
        measured = Measured(facts=facts, matmuls=(), links=())
        if can_train_together(facts):
            measured = _measure(recipe, facts, device, options)
        problem = [""]
        if rendezvous.rank == 0:
            problem = [_report(recipe, measured, options, start)]
        dist.broadcast_object_list(problem)
    if problem[0]:
        raise ClusterError(problem[0])


def _exchange_facts(
    recipe: Recipe, rendezvous: Rendezvous, options: argparse.Namespace, device: torch.device
) -> list[RankFacts]:
    mark = leave_mark(options.run_dir) if rendezvous.rank == 0 else None
    try:
        name = [None if mark is None else mark.name]
        dist.broadcast_object_list(name)
        dist.barrier()
        clock_s = time.time()
        own = replace(rank_facts(rendezvous.rank, device), clock_s=clock_s)
        if rendezvous.local_rank == 0:
            free, disk = None, ""
            if options.run_dir is not None:
                free, disk = disk_facts(options.run_dir, name[0])
            problems = tuple(each for each in (disk, data_problem(recipe)) if each)
            own = replace(own, disk_free_bytes=free, problems=problems)
        return _all_gather(own)
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)


def _measure(
    recipe: Recipe, facts: Sequence[RankFacts], device: torch.device, options: argparse.Namespace
) -> Measured:
    """Measures matmuls and axes; also the links of the hosts for a hardware file."""
    own, matmuls = 0.0, list[float]()
    for _ in range(_ROUNDS):  # a rank that was held up for a moment is not slow
        own = max(own, measure_matmuls(device, recipe.train.precision))
        matmuls = _all_gather(own)
        if not slow_ranks(matmuls):
            break
    mesh = build_mesh(recipe.parallel, device.type)
    axes = {name: axis for name, axis in axes_of(mesh).items() if axis.size > 1}
    if options.emit_hardware is not None:
        axes |= host_axes([each.host for each in facts])
    own_links = [link for name, axis in axes.items() for link in measure_axis(name, axis, device)]
    links = list(chain.from_iterable(_all_gather(own_links)))
    return Measured(facts=facts, matmuls=matmuls, links=links)


def _all_gather(own: _T) -> list[_T]:
    everyone = [own] * dist.get_world_size()
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own)
    return everyone


def _report(recipe: Recipe, measured: Measured, options: argparse.Namespace, start: float) -> str:
    """Prints the report, and writes the hardware file. Returns a line on what would break the run,
    or ""."""
    facts = measured.facts
    hosts = [each.host for each in facts]
    on_cpu = facts[0].device == "CPU"
    needs = RecipeNeeds.of(recipe, on_cpu=on_cpu)
    tp_note = tp_warning(hosts, recipe.parallel.tp)
    report = CheckReport(
        recipe=recipe,
        measured=measured,
        needs=needs,
        links=slowest_links(measured, recipe.parallel),
        findings=find(measured, needs, recipe.parallel, tp_note),
        seconds=time.perf_counter() - start,
    )
    text = json.dumps(report.tree()) if options.json else printable("\n".join(report.lines()))
    print(text, flush=True)
    if options.emit_hardware is not None and measured.matmuls:
        per_node = max(map(hosts.count, hosts))
        base = base_cluster(options.hardware, "" if on_cpu else facts[0].device, per_node)
        try:
            text = hardware_text(measured, base, recipe.train.precision)
            write_output("--emit-hardware", options.emit_hardware, text)
        except ConfigError as error:  # all ranks raise it
            return str(error)
    wrong = [each.text for each in report.findings if each.breaks or options.strict]
    if not wrong:
        return ""
    return f"check: {wrong[0]}" + (f" ({len(wrong) - 1} more)" if len(wrong) > 1 else "")
