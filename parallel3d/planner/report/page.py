"""The text report of a plan, in ASCII and at most 22 lines of 80 columns, and number formats that
other reports share."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.hardware.cluster import Scales
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.parameters import (
    active_parameters,
    model_flops_per_token,
    total_parameters,
)
from parallel3d.planner.model.uncertainty import Figure
from parallel3d.planner.search.best_layouts import Objective
from parallel3d.planner.search.neighbours import Neighbour
from parallel3d.planner.search.request import PlanRequest, PlanResult, Strategy
from parallel3d.planner.search.ties import TIE
from parallel3d.planner.time.step import TimeParts

WIDTH = 80
MEMORY_KINDS = tuple(f.name for f in fields(RankMemory) if f.name not in ("rank", "moment"))
TIME_KINDS = tuple(f.name for f in fields(TimeParts))
MORE_AXES = ("cp", "ep")  # Axes that tables show only if some layout uses them.
_BAR = 8  # Width of a memory bar in characters.
_MOST_LINES = 22
_MOST_REJECTED = 3
_MOST_SHOWN = 4  # Default number of rows in the table.


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """A request, its result, and further data for the report, which is its repr."""

    request: PlanRequest
    result: PlanResult
    objective: Objective
    seconds: float
    top: int | None  # Maximum number of rows in the table. None: the default.
    tokens: float | None
    # The layout of --why, and its result or the rule that it breaks.
    why: tuple[str, PlanResult | str] | None
    remedies: tuple[str, ...]
    # Alternatives that gain at least 5%, keyed by the request's field that they change.
    neighbours: Mapping[str, Neighbour | None]
    accuracy: dict[str, Any]  # content of accuracy.json, errors in percent
    notes: tuple[str, ...]  # notes on the model file
    commands: tuple[str, ...] = ()  # commands to run next
    # Layouts of --verify, with their bytes per device in the dry run.
    verified: tuple[tuple[Strategy, float], ...] = ()

    def __repr__(self) -> str:
        return page(self)

    @property
    def best(self) -> Strategy | None:
        return next(iter(self.result.strategies), None)

    @property
    def least_days(self) -> float | None:
        """Lower bound on the days to train on `tokens`, from the time of matmuls only."""
        if self.tokens is None:
            return None
        q = self.request
        device = q.cluster.device
        flops = model_flops_per_token(q.shape, q.seq_len) * self.tokens
        rate = device.peak(q.precision) * device.matmul_efficiency * q.gpus
        return flops / rate / 86400


def page(plan: Plan) -> str:
    """Returns the report, ending with a newline. If it exceeds 22 lines, the last ones before the
    commands are omitted."""
    best = plan.best
    lines = [*header(plan.request), ""]
    if best is None:
        rows = _remedies(plan)
    else:
        lines += [*_table(plan), ""]
        rows = _summary(plan, best)
    notes = [("note", note) for note in all_notes(plan)]
    lines += labelled([*rows, *_answers(plan), *notes])
    end: list[str] = []
    for command in next_commands(plan):
        is_script = "\n" in command
        end += [f"next      {command}"] if is_script else wrapped("next", command, " \\")
    room = _MOST_LINES - len(end)
    if len(lines) > room:
        lines = [*lines[: room - 1], "more      --explain"]
    return "".join(f"{line.rstrip()}\n" for line in (*lines, *end))


def next_commands(plan: Plan) -> Sequence[str]:
    """Returns the commands to run next. Without a layout that fits, there are none."""
    q = plan.request
    trains = q.framework.is_parallel3d and not q.shape.lacks_module
    option = "--emit-recipe plan.yaml" if trains else "--explain"
    if plan.best is None or plan.commands:
        return plan.commands
    return [f"the same command with {option}"]


def labelled(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields the lines of (label, text) rows, wrapped to `WIDTH`."""
    for label, text in rows:
        yield from wrapped(label, text)


def header(q: PlanRequest, *, has_size: bool = True) -> Iterator[str]:
    """Yields model and hardware lines. `has_size` includes the number of devices."""
    shape = q.shape
    cluster = q.cluster
    active = f", {si(active_parameters(shape))} active" if shape.experts else ""
    model = f"{shape.name}, {si(total_parameters(shape))} parameters{active}"
    yield from wrapped(
        "model", f"{model}; {q.global_batch_size} x {q.seq_len} tokens, {q.precision}"
    )
    count = f"{q.gpus} x " if has_size else ""
    node = f"{cluster.node.gb_per_s:g} GB/s in nodes of {cluster.gpus_per_node}"
    links = f"{node}, {cluster.network.gb_per_s:g} GB/s between them"
    yield from wrapped("hardware", f"{count}{cluster.device.name}; {links}")
    corrected = scales_text(cluster.scales)
    if corrected:
        yield from wrapped("corrected", f"by measured runs: {corrected}")


def _summary(plan: Plan, best: Strategy) -> Iterator[tuple[str, str]]:
    """Yields the rows about the best layout."""
    memory = best.memory
    cost = best.cost
    parts = cost.parts
    usable = plan.request.usable_bytes
    yield "layout", layout_text(best.parallel)
    held = f"{bar(memory.total / usable)} {gib(memory.total)} of {usable / GIB:.1f} GiB"
    yield "memory", f"{held} on rank {memory.rank}: {memory_text(memory)}"
    yield "time", f"{cost.step_time_s:.3g} s per step: {time_text(parts)}"
    speed = cost.tokens_per_s_per_gpu
    total = si(speed * best.parallel.world_size)
    rate = f"{total} tokens/s, {three_digits(cost.model_flops_per_gpu / 1e12)} TFLOP/s/gpu"
    ranges = [
        _between(best, "throughput", speed, "tok/s/gpu"),
        _between(best, "memory", memory.total / GIB, "GiB"),
    ]
    if plan.tokens is not None:
        length = best.length(plan.tokens)
        rate += f"; {three_digits(length.days)} days, {si(length.gpu_hours)} GPU-hours"
        if length.price is not None:
            rate += f", {money(length.price)}"
        ranges.append(_between(best, "throughput", length.days, "days"))
    yield "speed", rate
    if best.goodput:
        minutes = best.goodput.interval_s / 60
        saves = f"with a checkpoint every {minutes:.3g} min"
        yield "goodput", f"{best.goodput.share:.1%} of the time is training {saves}"
    yield "range", f"{', '.join(ranges)} (8 in 10)"
    losses = largest_first(parts, TIME_KINDS[1:], 0.03)  # without compute
    share, largest = (losses or largest_first(parts, TIME_KINDS, 0))[0]
    left = f"{(usable - memory.total) / GIB:.1f} GiB are left"
    yield "limits", f"{largest} takes {share:.0%} of the time; {left}"


def _answers(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields the rows for --verify and --why, and for alternatives to the best layout."""
    best = plan.best
    for each, bytes_ in plan.verified:
        fits = "fits" if bytes_ <= plan.request.usable_bytes else "does not fit"
        exact = f"{bytes_ / GIB:.1f} GiB in a dry run of the trainer"
        estimated = each.memory.total / GIB
        yield "verified", f"{_sizes(each.parallel)} {fits}: {exact}, {estimated:.1f} estimated"
    for other in plan.result.strategies[1:2]:
        gain = _gain(other, plan.result.strategies[0])
        if abs(gain) <= TIE:
            sizes = f"{_sizes(other.parallel)} mb {other.parallel.microbatch_size}"
            yield "runner-up", f"{sizes} is equal within error ({gain:+.1%} tokens/s)"
    for key, neighbour in plan.neighbours.items():
        if neighbour:
            other = neighbour.strategy
            size = getattr(other.request, key)
            asked = getattr(plan.request, key)
            gains = f"{neighbour.gain:+.0%} tok/s/gpu"
            label = "batch"
            if key == "gpus":
                gains += f" ({(1 + neighbour.gain) * size / asked - 1:+.0%} in all)"
                label = "devices"
            yield label, f"{size} instead of {asked}: {gains}, {_sizes(other.parallel)}"
    if plan.why:
        words, answer = plan.why
        yield "why not", f"{words}: {_why_not(answer, best)}"


def _gain(other: Strategy, best: Strategy) -> float:
    return other.cost.tokens_per_s_per_gpu / best.cost.tokens_per_s_per_gpu - 1


def _sizes(parallel: ParallelConfig) -> str:
    cp = f" cp {parallel.cp}" if parallel.cp > 1 else ""
    return f"tp {parallel.tp} pp {parallel.pp}{cp} dp {parallel.dp}"


def _remedies(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields rows for a plan without a layout that fits: nearest layouts, remedies, least time."""
    request = plan.request
    usable = request.usable_bytes
    more = plan.result.rejected[0].short_bytes / usable
    yield (
        "no layout",
        f"fits: the nearest needs {more:.0%} more than the {usable / GIB:.1f} GiB per device",
    )
    for each in plan.result.rejected[:_MOST_REJECTED]:
        yield "nearest", f"{_sizes(each.parallel)}: {each.reason}"
    for remedy in plan.remedies or ("no single change: use more devices and shorter sequences",):
        yield "would fit", remedy
    days = plan.least_days
    if days is not None:
        time = f"{days:,.1f} days" if days < 730 else f"{days / 365.25:,.0f} years"
        yield "time", f"at least {time} on these devices, even with matmuls only"


def all_notes(plan: Plan) -> Iterator[str]:
    """Yields notes on the model file, missing modules and assumptions."""
    yield from plan.notes
    q = plan.request
    if not q.framework.is_parallel3d:
        yield f"estimate for {q.framework.name}, not for parallel3d"
    elif q.shape.lacks_module:
        yield f"parallel3d lacks {q.shape.lacks_module}: estimated as if it had them"
    if q.cluster.device.is_cpu and q.cluster.measured is None:
        yield "off by up to 10x: measure this CPU by parallel3d-plan calibrate -o mine.yaml"
    if q.shape.experts is not None:
        rows = f"memory counts {q.imbalance:g} x the mean rows of a rank (--imbalance)"
        yield f"assumes a balanced router, so imbalanced experts take longer; {rows}"


def three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _between(found: Strategy, figure: Figure, value: float, unit: str) -> str:
    around = found.errors.around(figure, value)
    return f"{three_digits(around.low)} to {three_digits(around.high)} {unit}"


def reasons(best: Strategy) -> Iterator[str]:
    """Yields reasons why the best layout does without tp and pp, and why it needs recompute."""
    parallel = best.parallel
    if parallel.tp == parallel.pp == 1:
        yield f"the model fits at {gib(best.memory.total)} GiB per device without tp or pp"
    none = replace(parallel, recompute="none", recompute_every=None)
    missing = replace(best, parallel=none).memory.total - best.request.usable_bytes
    if missing > 0:
        yield f"without recompute it needs {missing / GIB:.1f} GiB more"


def _table(plan: Plan) -> Iterator[str]:
    """Yields the table of the best layouts, with the winner marked."""
    found = plan.result.strategies[: plan.top or _MOST_SHOWN]
    head, *rows = layout_columns([each.parallel for each in found])
    last = "step s" if plan.tokens is None else "days"
    yield f" {head}{'GiB':>7}{'tok/s/gpu':>11}{'MFU':>8}{last:>8}"
    for index, each in enumerate(found):
        cost = each.cost
        time = cost.step_time_s if plan.tokens is None else each.length(plan.tokens).days
        line = f"{rows[index]}{gib(each.memory.total):>7}"
        line += f"{cost.tokens_per_s_per_gpu:>11,.0f}{cost.mfu:>8.1%}{three_digits(time):>8}"
        yield f" {line}" if index else f">{line}"


def _why_not(other: PlanResult | str, best: Strategy | None) -> str:
    if isinstance(other, str):
        return other
    if not other.strategies:
        nearest = other.rejected[0]
        return f"does not fit: {_sizes(nearest.parallel)} {nearest.reason}"
    found = other.strategies[0]
    if best is None:
        return "it fits, but no layout fits the fixed options"
    if found.parallel == best.parallel:
        return "it is the winner"
    held = f"{gib(found.memory.total)} GiB"
    return f"{_gain(found, best):+.1%} tokens/s, {held}; {time_text(found.cost.parts)}"


def bar(share: float) -> str:
    """Draws a memory bar such as [######--]."""
    full = min(_BAR, round(share * _BAR))
    return f"[{'#' * full}{'-' * (_BAR - full)}]"


def layout_text(parallel: ParallelConfig) -> str:
    """Returns a layout as recipe overrides, without defaults."""
    keys = own_keys(parallel).items()
    said = [f"{key}={'true' if value is True else value}" for key, value in keys]
    return " ".join(said) or "one device, no parallelism"


def own_keys(parallel: ParallelConfig) -> dict[str, Any]:
    """Returns the keys of a layout without defaults."""
    plain = asdict(ParallelConfig())
    return {key: value for key, value in asdict(parallel).items() if value != plain[key]}


def layout_columns(layouts: Sequence[ParallelConfig]) -> Iterator[str]:
    """Yields the header of a table of layouts, then the row of each.

    `vs` is the number of virtual stages, `dp s x r` that of data-parallel ranks (sharded x
    replicated), `mb` the microbatch size.
    """
    axes = []
    for axis in MORE_AXES:
        if any((getattr(parallel, axis) or 1) > 1 for parallel in layouts):
            axes.append(axis)
    yield f"  tp  pp  vs{''.join(f'  {axis}' for axis in axes)}  dp s x r  mb recompute"
    for parallel in layouts:
        more = "".join(f"{getattr(parallel, axis):>4}" for axis in axes)
        recompute: str = parallel.recompute
        if parallel.recompute_every:
            recompute = f"every {parallel.recompute_every}"
        sizes = f"{parallel.tp:>4}{parallel.pp:>4}{parallel.virtual_stages:>4}{more}"
        data = f"{parallel.dp_shard} x {parallel.dp_replicate}"
        yield f"{sizes} {data:>9}{parallel.microbatch_size:>4} {recompute:<9}"


def memory_text(memory: RankMemory) -> str:
    kinds = largest_first(memory, MEMORY_KINDS, 0.05)
    return ", ".join(f"{kind} {gib(share * memory.total)}" for share, kind in kinds)


def time_text(parts: TimeParts) -> str:
    kinds = largest_first(parts, TIME_KINDS, 0.02)
    return ", ".join(f"{kind} {share:.1%}" for share, kind in kinds)


def largest_first(
    figures: RankMemory | TimeParts, kinds: Sequence[str], least: float
) -> list[tuple[float, str]]:
    """Returns (share of the total, kind), largest first, without shares below `least`."""
    shares = [(getattr(figures, kind) / figures.total, kind) for kind in kinds]
    return sorted([each for each in shares if each[0] >= least], reverse=True)


def gib(bytes_: float) -> str:
    """Formats bytes in GiB: one decimal, or two significant digits below 1 GiB."""
    if bytes_ >= GIB:
        return f"{bytes_ / GIB:.1f}"
    return f"{bytes_ / GIB:.2g}"


def si(number: float) -> str:
    """Formats a number with three significant digits and a suffix, such as 8.03B."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:
            scaled = float(f"{number / limit:.3g}")  # 1000 instead of 1e+03
            return f"{scaled:g}{letter}"
    return f"{number:.3g}"


def scales_text(scales: Scales) -> str:
    """Describes the corrections from measured runs, or returns "" if there are none."""
    said = []
    if scales.timed:
        slower = (
            f"arithmetic takes {scales.arithmetic:.2f}, links in a node {scales.node:.2f} and the "
            f"network {scales.network:.2f}"
        )
        said.append(f"{slower} times as long as predicted")
    if scales.weighed:
        said.append(f"memory except states is {scales.memory:.2f} times the estimate")
    return ", ".join(said)


def money(dollars: float | None) -> str:
    if dollars is None:
        return "-"
    return f"${si(dollars)}"


def wrapped(name: str, text: str, end: str = "") -> list[str]:
    """Wraps text with a label in the margin. All lines except the last end with `end`, such as a
    backslash."""
    lines = textwrap.wrap(
        text,
        WIDTH - len(end),
        initial_indent=f"{name:<10}",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line + end for line in lines[:-1]] + lines[-1:]
