"""`parallel3d-plan limits`: the smallest cluster that holds a model; the longest sequence, the
largest batch and the largest model that a cluster holds. `parallel3d-plan sweep`: the same run on
clusters of several sizes, and the cheapest that is done in time."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from math import prod

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.uncertainty import error_model_of
from parallel3d.planner.report.json import model_tree, request_tree, strategy_tree
from parallel3d.planner.report.page import header, how_sure, three_digits
from parallel3d.planner.report.text import (
    bar,
    days_column,
    gib,
    layout_columns,
    layout_head,
    layout_text,
    money,
    shown_axes,
    si,
    wrapped,
)
from parallel3d.planner.search.fastest import fastest, sweep
from parallel3d.planner.search.request import PlanRequest, Strategy
from parallel3d.planner.search.size_limits import (
    largest_batch,
    largest_model,
    longest_sequence,
    smallest_cluster,
)
from parallel3d.planner.search.space import check_fixed
from parallel3d.tools.cli_output import NOTHING_FITS, Reply
from parallel3d.tools.plan.inputs import ParsedRequest, read_fixed, read_request
from parallel3d.tools.plan.models import all_named
from parallel3d.tools.plan.score import recorded_accuracy

_NONE = {"cluster": "no number of devices holds one sequence"}  # else nothing fits


def answer(options: argparse.Namespace) -> Reply:
    """Finds the limit that was asked for, or all of them."""
    fixed = read_fixed(options)
    axes = (fixed.pp, fixed.tp, fixed.dp_shard, fixed.dp_replicate)
    # The fewest devices are the answer of `cluster`, and no part of the request.
    needed = prod(axis or 1 for axis in axes) if options.what == "cluster" else None
    asked = read_request(options, gpus=options.gpus or needed, fixed=fixed)
    check_fixed(asked.request)
    limits = dict(_limits(asked.request, options.what))
    return Reply(
        page=lambda: _page(asked, options, limits),
        tree=lambda: _tree(asked, options, limits),
        status=0 if all(limits.values()) else NOTHING_FITS,
    )


def _limits(request: PlanRequest, what: str) -> Iterator[tuple[str, Strategy | None]]:
    """Yields each limit with a layout that fits the request at its limit, the best one for a
    cluster; None if there is no such request."""
    if what in ("all", "cluster"):
        found = smallest_cluster(request)
        yield "cluster", None if found is None else fastest(found.request)[0]
    if what in ("all", "sequence"):
        yield "sequence", longest_sequence(request)
    if what in ("all", "batch"):
        yield "batch", largest_batch(request)
    if what in ("all", "model"):
        has_experts = "ep" in request.framework.axes
        shapes = [shape for shape in all_named() if shape.experts is None or has_experts]
        yield "model", largest_model(request, shapes)


def _told(name: str, request: PlanRequest) -> str:
    shape = request.shape
    width = f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads"
    return {
        "cluster": f"devices that hold it: {request.gpus}",
        "sequence": f"sequences of up to {request.seq_len:,} tokens",
        "batch": f"{request.global_batch_size:,} sequences at once; more by accumulation",
        "model": f"{si(total_parameters(shape))} parameters, {shape.name} ({width})",
    }[name]


def _page(
    asked: ParsedRequest, options: argparse.Namespace, limits: Mapping[str, Strategy | None]
) -> Iterator[str]:
    request = asked.request
    yield from header(request, has_size=options.what != "cluster")
    yield ""
    for name, found in limits.items():
        if found is None:
            nothing = f"nothing fits on {request.gpus} devices"
            yield from wrapped(name, _NONE.get(name, nothing))
            continue
        yield from wrapped(name, _told(name, found.request))
        total = found.memory.total
        share = total / request.usable_bytes
        held = f"{gib(total)} GiB of {request.usable_bytes / GIB:.1f} {bar(share)} {share:.0%}"
        yield from wrapped("", f"{held}  {layout_text(found.parallel)}")
        kind = "the best layout" if name == "cluster" else "a layout that fits"
        yield from wrapped("", f"{kind}: {_speed_text(found)}, MFU {found.cost.mfu:.1%}")
    yield from asked.note_lines()
    yield from wrapped("how sure", how_sure(recorded_accuracy(), request))


def _speed_text(found: Strategy) -> str:
    speed = found.cost.tokens_per_s_per_gpu
    around = error_model_of(found.run, recorded_accuracy()).around("throughput", speed)
    low = three_digits(around.low)
    high = three_digits(around.high)
    return f"{three_digits(speed)} tokens/s a device ({low} to {high}, 8 in 10)"


def _tree(
    asked: ParsedRequest, options: argparse.Namespace, limits: Mapping[str, Strategy | None]
) -> object:
    said = request_tree(asked.request)
    if options.what == "cluster":
        del said["gpus"]
    tree = {
        "schema": "parallel3d.limits/1",
        "input": said,
        "limits": {name: found and _limit_tree(name, found) for name, found in limits.items()},
        "notes": asked.model.notes,
    }
    return rounded(tree)


def _limit_tree(name: str, found: Strategy) -> dict[str, object]:
    q = found.request
    return {
        "gpus": q.gpus,
        "seq_len": q.seq_len,
        "global_batch_size": q.global_batch_size,
        "model": model_tree(q.shape),
        "strategy": strategy_tree(found, None, error_model_of(found.run, recorded_accuracy())),
        "told": _told(name, q),
    }


def sweep_answer(options: argparse.Namespace) -> Reply:
    """Plans for each size, and chooses the cheapest within --max-days where that is given."""
    if options.max_days is not None and options.tokens is None:
        raise ConfigError(f"--max-days {options.max_days:g}: of how many tokens? add --tokens 1T")
    asked = read_request(
        options, gpus=max(options.gpus), fixed=read_fixed(options), asks="--gpus 64-512"
    )
    found = sweep(asked.request, options.gpus)
    chosen = None
    fitting = [*_strategies(found)]
    if options.max_days is not None:
        fitting = [best for best in fitting if best.length(options.tokens).days <= options.max_days]
        chosen = min(fitting, key=lambda best: best.length(options.tokens).gpu_hours, default=None)
    return Reply(
        page=lambda: [*_sizes_page(asked.request, options, found, chosen), *asked.note_lines()],
        tree=lambda: _sizes_tree(asked, options, found, chosen),
        status=0 if fitting else NOTHING_FITS,
    )


def _sizes_page(
    request: PlanRequest,
    options: argparse.Namespace,
    sizes: dict[int, Strategy | str],
    chosen: Strategy | None,
) -> Iterator[str]:
    usable = request.usable_bytes
    fitting = [*_strategies(sizes)]
    yield from header(request, has_size=False)
    yield ""
    axes = shown_axes([each.parallel for each in fitting])
    head = f"   gpus{layout_head(axes)}{f'GiB of {usable / GIB:.1f}':>16}      tok/s/gpu  scaling"
    yield head + ("   days  price" if options.tokens is not None else " step s")
    for gpus, found in sizes.items():
        start = f"{'>' if found is chosen else ' '}{gpus:>6}"
        if isinstance(found, str):
            first, *more = wrapped("", f"{'':>4}{found}")
            yield from (f"{start}{first[len(start) :]}", *more)
            continue
        total = found.memory.total
        speed = found.cost.tokens_per_s_per_gpu
        scaling = speed / fitting[0].cost.tokens_per_s_per_gpu
        line = f"{start}{layout_columns(found.parallel, axes)}{gib(total):>6} {bar(total / usable)}"
        line += f"{speed:>10,.0f}{scaling:>9.0%}"
        if options.tokens is None:
            yield f"{line}{found.cost.step_time_s:>7.3g}"
        else:
            length = found.length(options.tokens)
            yield f"{line}{days_column(length.days)}{money(length.price):>7}"
    yield ""
    if options.max_days is not None and chosen is None:
        yield from wrapped("in time", f"none is done within {options.max_days:g} days")
    if chosen is not None:
        length = chosen.length(options.tokens)
        told = f"{chosen.request.gpus} devices: {length.days:.3g} days"
        hours = f"{length.gpu_hours:,.0f} GPU-hours, the fewest within {options.max_days:g} days"
        yield from wrapped("in time", f"{told}, {hours}; {_speed_text(chosen)}")
        yield from wrapped("layout", layout_text(chosen.parallel))
    yield from wrapped("how sure", how_sure(recorded_accuracy(), request))


def _strategies(sizes: dict[int, Strategy | str]) -> Iterator[Strategy]:
    yield from (found for found in sizes.values() if isinstance(found, Strategy))


def _sizes_tree(
    asked: ParsedRequest,
    options: argparse.Namespace,
    sizes: dict[int, Strategy | str],
    chosen: Strategy | None,
) -> object:
    said = request_tree(asked.request)
    rows = []
    tokens = options.tokens
    del said["gpus"]
    for gpus, found in sizes.items():
        row: dict[str, object] = {"gpus": gpus, "strategy": None, "none": None}
        if isinstance(found, str):
            row["none"] = found
        else:
            length = None if tokens is None else found.length(tokens)
            spread = error_model_of(found.run, recorded_accuracy())
            row["strategy"] = strategy_tree(found, length, spread)
        rows.append(row)
    tree = {
        "schema": "parallel3d.sweep/1",
        "input": {**said, "tokens": tokens, "max_days": options.max_days},
        "sizes": rows,
        "chosen": chosen and chosen.request.gpus,
        "notes": asked.model.notes,
    }
    return rounded(tree)
