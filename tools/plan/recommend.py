"""`parallel3d-plan recommend`, the default subcommand: finds the best layouts for a model on a
cluster.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.report.json import to_json
from parallel3d.planner.report.page import Plan, all_notes, labelled, page, reasons
from parallel3d.planner.search.best_layouts import best_or_rule, one_that_fits, search
from parallel3d.planner.search.neighbours import find_neighbours
from parallel3d.planner.search.request import Fixed, PlanRequest, PlanResult, Rejected, Strategy
from parallel3d.planner.search.size_limits import remedies
from parallel3d.tools.aliases.layout import read_layout
from parallel3d.tools.cli_output import NOTHING_FITS, Reply
from parallel3d.tools.plan.accuracy import how_sure, recorded_accuracy
from parallel3d.tools.plan.emit import emit, launch_file, recipe_of_plan
from parallel3d.tools.plan.hardware import larger_devices
from parallel3d.tools.plan.html import check_page, plan_page
from parallel3d.tools.plan.inputs import ParsedRequest, read_fixed, read_request
from parallel3d.tools.plan.limits import sweep_answer
from parallel3d.tools.plan.memory import explained
from parallel3d.tools.plan.mesh import mesh_tree
from parallel3d.tools.plan.timeline import timeline_tree
from parallel3d.tools.report.page import write_page

_TOP = 10
# Options that a comparison of devices does not accept, with their defaults.
_OF_ONE_DEVICE = {
    **dict.fromkeys(
        ("emit_recipe", "emit_launch", "emit_command", "verify", "why", "explain", "top", "html")
    ),
    "objective": "throughput",
}


def make_plan(options: argparse.Namespace) -> tuple[Plan, Callable[[], dict[str, Any]]]:
    """Plans a run, verifies the plan if requested, and writes the requested files.

    Also returns a function that returns the JSON object of the plan, which is built once.
    """
    launch = launch_file(options)
    check_page(options.html)
    asked = read_request(options, gpus=options.gpus, fixed=read_fixed(options))
    plan = _plan(options, asked)
    if options.verify:
        plan = _verified(asked, plan)
    plan = replace(plan, commands=tuple(emit(options, asked, plan, launch)))
    tree = cache(lambda: plan_tree(plan))
    if options.html is not None:
        write_page(options.html, plan_page(plan, tree()))
    return plan, tree


def answer(options: argparse.Namespace) -> Reply:
    if "," in (options.gpu or ""):
        for name, usual in _OF_ONE_DEVICE.items():
            if (vars(options)[name] or usual) != usual:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option}: needs a single device; try --gpu h100")
        return sweep_answer(options)
    plan, tree = make_plan(options)

    def lines() -> Iterator[str]:
        for line in page(plan).splitlines():
            is_bold = line.startswith(">") and sys.stdout.isatty()
            yield f"\033[1m{line}\033[0m" if is_bold else line
        if options.explain:
            yield from ("", *_explanation(plan))
        if options.explain and plan.best is not None:
            yield from ("", *explained(plan.best, whole=True))

    return Reply(
        page=lines(),
        tree=tree,
        status=NOTHING_FITS if plan.best is None else 0,
    )


def plan_tree(plan: Plan) -> dict[str, Any]:
    """Returns the plan as the JSON object that --json prints."""
    tree = to_json(plan)
    best = plan.best
    tree["mesh"] = None if best is None else rounded(mesh_tree(best))
    tree["timeline"] = None if best is None else rounded(timeline_tree(best))
    return {**tree, "next": plan.commands}


def _explanation(plan: Plan) -> Iterator[str]:
    checked = f"computed the memory of {plan.result.checked:,} layouts, excluded others by bounds"
    rows = [("searched", f"{checked}; ranked by {plan.objective}")]
    if plan.best is not None:
        rows += [("because", reason) for reason in reasons(plan.best)]
    sure = how_sure(plan.request)
    rows += [("note", note) for note in all_notes(plan)]
    yield from labelled([*rows, ("how sure", sure)])


def _plan(options: argparse.Namespace, asked: ParsedRequest) -> Plan:
    request = asked.request
    start = time.perf_counter()
    why = None
    # A search creates a million objects without reference cycles, so garbage collection would only
    # cost 5% of its time.
    gc.disable()
    try:
        found = search(request, objective=options.objective, top=options.top or _TOP)
        neighbours = find_neighbours(request, found.least_s)
    finally:
        gc.enable()
    seconds = time.perf_counter() - start
    if options.why:
        wanted = replace(request, fixed=Fixed(**read_layout(options.why, "--why")))
        why = " ".join(options.why), best_or_rule(wanted)
    return Plan(
        request=request,
        result=found,
        objective=options.objective,
        seconds=seconds,
        top=options.top,
        tokens=options.tokens,
        why=why,
        neighbours=neighbours,
        remedies=() if found.strategies else tuple(_remedies(request, found)),
        accuracy=recorded_accuracy(),
        notes=asked.model.notes,
    )


def _remedies(request: PlanRequest, answer: PlanResult) -> Iterator[str]:
    """Yields changes to the request that would let a layout fit, such as full recompute or larger
    devices.
    """
    fixed = request.fixed
    full = replace(request, fixed=replace(fixed, recompute="full", recompute_every=None))
    if fixed.recompute not in (None, "full") and one_that_fits(full) is not None:
        yield f"recompute=full instead of {fixed.recompute}"
    yield from remedies(request)
    needed = (answer.rejected[0].short_bytes + request.usable_bytes) / request.memory_fraction
    if larger := larger_devices(needed):
        yield f"devices of {needed / GIB:.0f} GiB or more: {', '.join(larger)}"


def _verified(asked: ParsedRequest, plan: Plan) -> Plan:
    """Dry-runs the layouts in order until one fits. It becomes the best, and those before it are
    rejected.

    Runs only the rank with the highest estimated peak. Fragmentation and CUDA context are
    estimates. Raises ConfigError if the trainer cannot run a layout.
    """
    from parallel3d.tools.verify.dry_run import dry_run  # Imported here because it imports torch.

    tried: list[tuple[Strategy, float]] = []
    refused: list[Rejected] = []
    cluster = plan.request.cluster
    usable = plan.request.usable_bytes
    for each in plan.result.strategies:
        recipe = recipe_of_plan(asked, plan, each, run="plan")
        memory = each.memory
        validate(recipe)
        rank = memory.rank * (each.parallel.world_size // each.parallel.pp)
        exact = dry_run(recipe, rank, gpu_bytes=cluster.device.gpu_bytes).peak.total
        bytes_ = memory.total - memory.allocated + exact
        tried.append((each, bytes_))
        if bytes_ <= usable:
            break
        short = f"needs {(bytes_ - usable) / GIB:.1f} GiB more"
        reason = f"{short} on rank {memory.rank} in a dry run"
        refused.append(Rejected(parallel=each.parallel, reason=reason, short_bytes=bytes_ - usable))
    nearest = sorted((*refused, *plan.result.rejected), key=lambda rejected: rejected.short_bytes)
    answer = replace(
        plan.result, strategies=plan.result.strategies[len(refused) :], rejected=tuple(nearest)
    )
    return replace(plan, result=answer, verified=tuple(tried))
