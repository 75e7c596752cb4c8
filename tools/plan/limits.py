"""`parallel3d-plan limits` finds the smallest cluster, longest sequence, largest batch and largest
model. `parallel3d-plan sweep` compares devices and cluster sizes. With --max-days, it also finds
the cheapest that meets this deadline.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf, prod

from parallel3d.config.recipe import Coordinates
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.report.json import model_tree, request_tree, strategy_tree
from parallel3d.planner.report.page import (
    bar,
    gib,
    header,
    layout_columns,
    layout_text,
    money,
    si,
    three_digits,
    wrapped,
)
from parallel3d.planner.search.best_layouts import search, sweep
from parallel3d.planner.search.request import PlanRequest, Strategy
from parallel3d.planner.search.size_limits import (
    largest_batch,
    largest_model,
    longest_sequence,
    smallest_cluster,
)
from parallel3d.planner.search.space import check_fixed
from parallel3d.tools.cli_output import NOTHING_FITS, Reply
from parallel3d.tools.plan.accuracy import how_sure
from parallel3d.tools.plan.hardware import file_of
from parallel3d.tools.plan.inputs import ParsedRequest, read_fixed, read_request
from parallel3d.tools.plan.models import all_named

# A request with its best layout, or with the reason why none fits.
Row = tuple[PlanRequest, Strategy | str]


def answer(options: argparse.Namespace) -> Reply:
    """Finds the limit named by `options.what`, or all four."""
    fixed = read_fixed(options)
    # `cluster` searches for this number, but a request needs one that the fixed axes allow.
    needed = None
    if options.what == "cluster":
        needed = prod(getattr(fixed, axis) or 1 for axis in Coordinates._fields)
    asked = read_request(options, gpus=options.gpus or needed, fixed=fixed)
    check_fixed(asked.request)
    limits = dict(_limits(asked.request, options.what))
    return Reply(
        page=_page(asked, options, limits),
        tree=lambda: _tree(asked, options, limits),
        status=0 if all(limits.values()) else NOTHING_FITS,
    )


def _limits(request: PlanRequest, what: str) -> Iterator[tuple[str, Strategy | None]]:
    """Yields each limit's name with a layout that reaches it (for `cluster` the best), or None."""
    if what in ("all", "cluster"):
        found = smallest_cluster(request)
        yield "cluster", found and search(found.request).strategies[0]
    if what in ("all", "sequence"):
        yield "sequence", longest_sequence(request)
    if what in ("all", "batch"):
        yield "batch", largest_batch(request)
    if what in ("all", "model"):
        shapes = [shape for shape in all_named() if not replace(request, shape=shape).lacks_experts]
        yield "model", largest_model(request, shapes)


def _told(name: str, request: PlanRequest) -> str:
    shape = request.shape
    width = f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads"
    return {
        "cluster": f"{request.gpus} devices hold the model",
        "sequence": f"sequences of up to {request.seq_len:,} tokens",
        "batch": f"{request.global_batch_size:,} sequences in one microbatch; more by accumulation",
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
            if name == "cluster":
                nothing = "no number of devices holds one sequence"
            yield from wrapped(name, nothing)
            continue
        yield from wrapped(name, _told(name, found.request))
        total = found.memory.total
        share = total / request.usable_bytes
        held = f"{gib(total)} GiB of {request.usable_bytes / GIB:.1f} {bar(share)} {share:.0%}"
        yield from wrapped("", f"{held}  {layout_text(found.parallel)}")
        kind = "the best layout" if name == "cluster" else "a layout that fits"
        speed = f"{three_digits(found.cost.tokens_per_s_per_gpu)} tokens/s per device"
        off = f"({_off(found)}, 8 in 10)"
        yield from wrapped("", f"{kind}: {speed} {off}, MFU {found.cost.mfu:.1%}")
    yield from asked.note_lines()
    yield from wrapped("how sure", how_sure(request))


def _off(found: Strategy) -> str:
    """Formats the error range of the speed, which covers 8 of 10 cases, such as "+-7%"."""
    return f"+-{found.errors.throughput:.0%}"


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
        "strategy": strategy_tree(found),
        "told": _told(name, q),
    }


def sweep_answer(options: argparse.Namespace) -> Reply:
    """Plans each number of devices for each device of --gpu. Selects the cheapest within
    --max-days.
    """
    max_days = vars(options).get("max_days")
    if max_days is not None and options.tokens is None:
        raise ConfigError(f"--max-days {max_days:g}: needs a number of tokens; add --tokens 1T")
    sizes = options.gpus if isinstance(options.gpus, tuple) else ()
    devices = [name and file_of(name) for name in (options.gpu or "").split(",")]
    rows: list[Row] = []
    for device in devices:
        on_device = argparse.Namespace(**{**vars(options), "gpu": device})
        asked = read_request(
            on_device,
            gpus=max(sizes, default=options.gpus),
            fixed=read_fixed(options),
            asks="--gpus 64-512",
        )
        request = asked.request
        for gpus, best in sweep(request, sizes or [request.gpus]).items():
            rows.append((replace(request, gpus=gpus), best))
    chosen = None
    fitting = [found for _, found in rows if isinstance(found, Strategy)]
    if max_days is not None:
        fitting = [best for best in fitting if best.length(options.tokens).days <= max_days]
        runs = [best.length(options.tokens) for best in fitting]
        costs = [(run.price or inf, run.gpu_hours) for run in runs]
        chosen = fitting[costs.index(min(costs))] if costs else None
    rows.sort(key=_rank)
    return Reply(
        page=_sizes_page(asked, rows, options.tokens, max_days, chosen),
        tree=lambda: _sizes_tree(asked, options, rows, chosen),
        status=0 if fitting else NOTHING_FITS,
    )


def _rank(row: Row) -> tuple[int, float]:
    """Sort key: fewest devices first, then fastest. Rows without a layout come last."""
    request, found = row
    return request.gpus, 0.0 if isinstance(found, str) else -found.cost.tokens_per_s_per_gpu


def _sizes_page(
    asked: ParsedRequest,
    rows: list[Row],
    tokens: float | None,
    max_days: float | None,
    chosen: Strategy | None,
) -> Iterator[str]:
    yield from dict.fromkeys(
        line for request, _ in rows for line in header(request, has_size=False)
    )
    yield ""
    width = max(len(request.cluster.name) for request, _ in rows)
    fitting = [found.parallel for _, found in rows if isinstance(found, Strategy)]
    columns = layout_columns(fitting)
    yield f"{'device':<{width}}   gpus{next(columns)}    GiB tok/s/gpu  range    MFU" + (
        " step s $/1M tok" if tokens is None else "   days    price"
    )
    for request, found in rows:
        mark = ">" if found is chosen else " "
        start = f"{mark}{request.cluster.name:<{width}}{request.gpus:>6}"
        if isinstance(found, str):
            yield from wrapped(f"{start}  ", found)
            continue
        line = f"{start}{next(columns)}{gib(found.memory.total):>7}"
        line += f"{found.cost.tokens_per_s_per_gpu:>10,.0f}{_off(found):>7}{found.cost.mfu:>7.1%}"
        length = found.length(tokens or 1e6)
        time = found.cost.step_time_s if tokens is None else length.days
        yield f"{line}{three_digits(time):>7}{money(length.price):>9}"
    yield ""
    if max_days is not None and chosen is None:
        yield from wrapped("in time", f"no size finishes within {max_days:g} days")
    if chosen is not None and tokens is not None:
        length = chosen.length(tokens)
        told = f"{chosen.request.gpus} x {chosen.request.cluster.name}: {length.days:.3g} days"
        hours = f"{length.gpu_hours:,.0f} GPU-hours, the cheapest within {max_days:g} days"
        yield from wrapped("in time", f"{told}, {hours}")
        yield from wrapped("layout", layout_text(chosen.parallel))
    yield from wrapped("how sure", how_sure(request))
    yield from asked.note_lines()


def _sizes_tree(
    asked: ParsedRequest, options: argparse.Namespace, rows: list[Row], chosen: Strategy | None
) -> object:
    said = request_tree(rows[0][0])
    sizes = []
    tokens = options.tokens
    del said["gpus"]
    for request, found in rows:
        row: dict[str, object] = {"device": request.cluster.name, "gpus": request.gpus}
        row |= {"strategy": None, "none": None}
        if isinstance(found, str):
            row["none"] = found
        else:
            row["strategy"] = strategy_tree(found, tokens)
        sizes.append(row)
    tree = {
        "schema": "parallel3d.sweep/1",
        "input": {**said, "tokens": tokens, "max_days": vars(options).get("max_days")},
        "sizes": sizes,
        "chosen": chosen and chosen.request.gpus,
        "notes": asked.model.notes,
    }
    return rounded(tree)
