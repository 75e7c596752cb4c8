"""One rank of `parallel3d-launch check`: it tells what it has, measures with the others, and rank 0 reports."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ClusterError, ConfigError, printable
from parallel3d.launch.devices import Place, tp_warning
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.mesh import axes_of, build_mesh
from parallel3d.tools.preflight.emit import hardware_text
from parallel3d.tools.preflight.expected import RecipeNeeds
from parallel3d.tools.preflight.facts import RankFacts, data_facts, disk_facts, leave_mark, rank_facts
from parallel3d.tools.preflight.findings import Measured, find, link_rows, must_differ, slow_ranks
from parallel3d.tools.preflight.measure import host_axes, measure_axis, measure_clocks, measure_products
from parallel3d.tools.preflight.options import CheckOptions
from parallel3d.tools.preflight.report import CheckReport
from parallel3d.tools.reply import write_output

_ROUNDS = 3
_T = TypeVar("_T")


def check(recipe: Recipe, rendezvous: Rendezvous, options: CheckOptions) -> None:
    """Checks the cluster. Every rank calls it; rank 0 prints the report. Raises ClusterError on all ranks where
    something would break the run."""
    start = time.perf_counter()
    with process_group(recipe, rendezvous) as device:
        facts = _exchange_facts(recipe, rendezvous, options, device)
        measured = _measure(recipe, facts, device, hosts_too=options.emit_hardware is not None)
        told = [_report(recipe, measured, options, start) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(told)
    if told[0]:
        raise ClusterError(told[0])


def _exchange_facts(
    recipe: Recipe, rendezvous: Rendezvous, options: CheckOptions, device: torch.device
) -> list[RankFacts]:
    """Returns what all ranks tell, by rank."""
    mark = leave_mark(options.run_dir) if rendezvous.rank == 0 else None
    try:
        name = [None if mark is None else mark.name]
        dist.broadcast_object_list(name)
        own = rank_facts(rendezvous.rank, device)
        if rendezvous.local_rank == 0:
            free, problem = (None, "") if options.run_dir is None else disk_facts(options.run_dir, name[0])
            own = replace(own, disk_free_bytes=free, disk_problem=problem, data=data_facts(recipe.data))
        return _gathered(own)
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)


def _measure(recipe: Recipe, facts: Sequence[RankFacts], device: torch.device, *, hosts_too: bool) -> Measured:
    """Measures products and axes, those of the hosts as well where that is asked; nothing where the ranks' versions do
    not go together."""
    if must_differ(facts):
        return Measured(facts=facts, clocks={}, products=(), axes=())
    hosts = [each.host for each in facts]
    clocks = measure_clocks(sorted({hosts.index(host) for host in hosts} - {0}))
    mesh = build_mesh(recipe.parallel, device.type)
    products = _products(recipe, device)
    axes = [measure_axis(name, axis, axis.size, device) for name, axis in axes_of(mesh).items() if axis.size > 1]
    if hosts_too:
        axes += [measure_axis(name, each.axis, each.size, device) for name, each in host_axes(hosts).items()]
    return Measured(facts=facts, clocks=clocks, products=products, axes=_gathered(tuple(axes)))


def _products(recipe: Recipe, device: torch.device) -> list[float]:
    """Returns each rank's operations per second. Where a rank is slow all measure again, and the best of some rounds
    counts: a rank that was held up for a moment is not told of."""
    own, rates = 0.0, list[float]()
    for _ in range(_ROUNDS):
        own = max(own, measure_products(device, recipe.train.precision))
        rates = _gathered(own)
        if not slow_ranks(rates):
            break
    return rates


def _gathered(own: _T) -> list[_T]:
    """Returns what each rank has, by rank. Every rank calls it."""
    told = [own] * dist.get_world_size()
    if len(told) > 1:
        dist.all_gather_object(told, own)
    return told


def _report(recipe: Recipe, measured: Measured, options: CheckOptions, start: float) -> str:
    """Prints the report, and writes the hardware file. Returns the line of what would break the run, or nothing."""
    facts = measured.facts
    hosts = [each.host for each in facts]
    gpu = "" if facts[0].device == "CPU" else facts[0].device
    expected = RecipeNeeds.of(recipe, options.hardware, gpu, max(map(hosts.count, hosts)))
    rows = link_rows(measured, expected, recipe.parallel) if measured.products else []
    tp_note = tp_warning([Place(host=host, pid=0) for host in hosts], recipe.parallel.tp)
    report = CheckReport(
        recipe=replace(recipe, run_dir=options.run_dir),
        measured=measured,
        expected=expected,
        links=rows,
        findings=find(measured, expected, recipe.parallel, rows, tp_note),
        seconds=time.perf_counter() - start,
    )
    print(json.dumps(report.tree()) if options.as_json else printable("\n".join(report.page())), flush=True)
    if options.emit_hardware is not None and measured.products:
        try:
            text = hardware_text(measured, expected.cluster, recipe.train.precision)
            write_output("--emit-hardware", options.emit_hardware, text)
        except ConfigError as error:  # which the others have to hear of
            return str(error)
    wrong = [each.text for each in report.findings if each.breaks or options.strict]
    if not wrong:
        return ""
    more = f" ({len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"check: {wrong[0]}{more}"
