"""A plan as a report for people: what to use, what it needs and takes, what was rejected, and how
sure that is.

Plain ASCII and at most 100 columns, whatever it is printed on; `bold` marks the winner on a
terminal. Pure functions of a `Plan`, so the report is tested as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.model.parameters import active_parameters, total_parameters
from parallel3d.planner.model.planned_run import PlannedRun, other_axes
from parallel3d.planner.model.uncertainty import LEVEL, ErrorModel, Figure, error_model_of
from parallel3d.planner.report.text import (
    bar,
    days_column,
    gib,
    layout_columns,
    layout_head,
    layout_text,
    links_text,
    memory_text,
    money,
    scales_text,
    shown_axes,
    si,
    time_text,
    wrapped,
)
from parallel3d.planner.search.fastest import Objective
from parallel3d.planner.search.request import PlanRequest, PlanResult, RunLength, Strategy

_MOST_REJECTED = 3
_MOST_SHOWN = 5
_RANKED = {
    "throughput": "ranked by tokens per second",
    "memory": "ranked by memory, the leanest layout of each tp and pp, whatever its speed",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """A request, its answer, and what was asked beside it. Its repr is the report."""

    request: PlanRequest
    result: PlanResult
    objective: Objective = "throughput"
    seconds: float = 0.0
    top: int | None = None  # lines of the table
    tokens: float | None = None
    # what --why asked, with the answer or the rule that it breaks
    why: tuple[str, PlanResult | str] | None = None
    remedies: tuple[str, ...] = ()
    # what the recorded score found (docs/plan.md); errors in per cent
    accuracy: dict[str, Any]
    notes: tuple[str, ...] = ()  # on what the model's file says
    commands: tuple[str, ...] = ()  # what to type next
    # The layouts whose fullest rank --verify ran dry, with the device's bytes in use with the dry
    # run's tensors.
    verified: tuple[tuple[Strategy, float], ...] = ()

    def __repr__(self) -> str:
        return page(self)

    @property
    def best(self) -> Strategy | None:
        if self.result.strategies:
            return self.result.strategies[0]
        return None

    def length(self, found: Strategy) -> RunLength | None:
        if self.tokens is None:
            return None
        return found.length(self.tokens)

    def spread(self, found: Strategy) -> ErrorModel:
        """How far off the figures of a layout may be."""
        return error_model_of(found.run, self.accuracy)


def page(plan: Plan, *, bold: Callable[[str], str] = str) -> str:
    """Returns the whole report, which ends with a newline."""
    lines = [*header(plan.request), ""]
    if plan.best is None:
        usable = plan.request.usable_bytes
        share = plan.result.rejected[0].short_bytes / usable
        most = f"the {usable / GIB:.1f} GiB that a device may use"
        lines.append(f"nothing fits: needs {share:.0%} more memory than {most}")
    else:
        lines += [*_table(plan, bold), ""]
    for label, text in _advice(plan):
        # what is copied is not wrapped
        lines += [f"next      {text}"] if label == "next" else wrapped(label, text)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def header(q: PlanRequest, *, has_size: bool = True) -> Iterator[str]:
    """Yields what was asked: the model, the batch, the hardware, how many devices unless `has_size`
    is false."""
    shape = q.shape
    cluster = q.cluster
    active = f", {si(active_parameters(shape))} of them for a token" if shape.experts else ""
    model = f"{si(total_parameters(shape))} parameters{active}, {shape.layers} layers"
    batch = f"batch {q.global_batch_size} = {si(q.global_batch_size * q.seq_len)} tokens"
    text = f"{shape.name}, {model}  sequence {q.seq_len}  {batch}  {q.precision}"
    yield from wrapped("model", text)
    count = f"{q.gpus} x " if has_size else ""
    node = f"{cluster.gpus_per_node} a node  links {links_text(cluster)}"
    yield from wrapped("hardware", f"{count}{cluster.device.name}, {node}")
    corrected = scales_text(cluster.scales)
    if corrected:
        yield from wrapped("anchored", f"by measured runs: {corrected}")


def _advice(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields what a report says beside its table: a label, empty in a row that continues the last,
    and a text."""
    best = plan.best
    result = plan.result
    q = plan.request
    if best is None:
        for each in result.rejected[:_MOST_REJECTED]:
            yield "nearest", f"{layout_text(each.parallel)}: {each.reason}"
        nothing = ("nothing that was tried: more devices, shorter sequences",)
        yield from _one_label("would do", plan.remedies or nothing)
        yield from _verified(plan)
    else:
        looked = f"the memory of {result.checked:,} layouts, all others by bounds"
        yield "searched", f"{looked}; {_RANKED[plan.objective]}"
        microbatches = best.run.layout.microbatches
        yield "layout 1", f"{layout_text(best.parallel)}; microbatches: {microbatches}"
        vocab = best.run.shape.vocab
        if vocab != q.shape.vocab:
            yield "", f"with the vocabulary padded from {q.shape.vocab} to {vocab}"
        yield from _one_label("because", reasons(best))
        memory = best.memory
        yield "memory", f"GiB on pipeline rank {memory.rank}, the fullest: {memory_text(memory)}"
        yield from _verified(plan)
        if not plan.verified and q.framework.is_parallel3d and not q.shape.lacks_module:
            yield "exactly", "--verify runs layout 1's fullest rank dry and prints its exact memory"
        yield "time", f"{best.cost.step_time_s:.3g} s a step: {time_text(best.cost.parts)}"
        yield "run", _run(plan, best)
        if best.goodput:
            saves = f"saves every {best.goodput.interval_s / 60:.3g} min"
            yield "goodput", f"{best.goodput.share:.1%} of the time trains if the job {saves}"
        yield "range", _ranges(plan, best)
        left = (q.usable_bytes - memory.total) / GIB
        yield "limits", f"{left:.1f} GiB are left under {q.memory_rule}"
    if plan.why is not None:
        asked, other = plan.why
        yield "why not", f"{asked}: {_why_not(other, best)}"
    for note in (*_framework_notes(q), *plan.notes):
        yield "note", note
    yield "how sure", how_sure(plan.accuracy, q)
    for command in plan.commands:
        yield "next", command


def _framework_notes(request: PlanRequest) -> Iterator[str]:
    """Yields what this project's own trainer does not have of a plan, and what is assumed in its
    place."""
    framework = request.framework
    shape = request.shape
    cluster = request.cluster
    if not framework.is_parallel3d:
        yield f"priced for {framework.name}, not for this project's trainer: no recipe is written"
    elif shape.lacks_module:
        lacks = f"this project's trainer lacks {shape.lacks_module}"
        yield f"{lacks}: priced as if it had them, and no recipe is written"
    if cluster.device.is_cpu and cluster.measured is None:
        yield (
            "cpu is an order of magnitude, of one core: parallel3d-plan calibrate -o mine.yaml "
            "measures this machine"
        )
    if shape.experts is not None:
        yield "all experts are taken to get equally many tokens: uneven ones take longer"


def how_sure(known: Mapping[str, Any], about: PlanRequest | PlannedRun) -> str:
    """Returns the recorded errors on sources that nothing was set on."""
    own = ""
    if about.shape.experts is not None:
        own = "mixtures were never fitted to a run (25 published ones: 13% off, most too fast); "
    elif about.framework.is_parallel3d:
        own = "parallel3d itself was never measured on a GPU; "
    errors = known["blind"]
    return (
        f"{own}median error on published runs whose source was left out "
        f"{errors['throughput_median']:.1f}% of speed "
        f"(90% within {errors['throughput_p90']:.0f}%) and {errors['memory_median']:.1f}% of memory"
        f" ({errors['memory_p90']:.0f}%); scored {known['date']}"
    )


def _ranges(plan: Plan, best: Strategy) -> str:
    """Returns the ranges in which the best layout's figures lie in so many cases of ten."""
    spread = plan.spread(best)
    length = plan.length(best)

    def between(figure: Figure, value: float, unit: str) -> str:
        around = spread.around(figure, value)
        return f"{three_digits(around.low)} to {three_digits(around.high)} {unit}"

    told = [
        between("throughput", best.cost.step_time_s, "s a step"),
        between("throughput", best.cost.tokens_per_s_per_gpu, "tokens/s a device"),
        between("memory", best.memory.total / GIB, "GiB"),
    ]
    if length is not None:
        told.append(between("throughput", length.days, "days"))
    return f"{', '.join(told)}; {10 * LEVEL:.0f} in 10"


def three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def reasons(best: Strategy) -> Iterator[str]:
    """Yields why the best layout is the best, from this plan's own numbers."""
    request = best.request
    parallel = best.parallel
    parts = best.cost.parts
    if parallel.tp == parallel.pp == 1:
        yield f"the model fits at {gib(best.memory.total)} GiB a device without tp or pp"
    cp, ep = other_axes(parallel)
    for axis, size, seconds, what in (
        ("tp", parallel.tp, parts.tp, "its traffic"),
        ("pp", parallel.pp, parts.pp_bubble, "its bubble"),
        ("cp", cp, parts.cp, "its traffic"),
        ("ep", ep, parts.ep, "its traffic"),
        ("data parallel over", parallel.dp, parts.dp, "traffic that nothing hides"),
    ):
        if size > 1:
            yield f"{axis} {size}: {what} takes {seconds / parts.total:.0%} of the step"
    if parallel.recompute != "none":
        none = replace(parallel, recompute="none", recompute_every=None)
        without = replace(best, parallel=none).memory.total - request.usable_bytes
        share = f"recompute: {parts.recompute / parts.total:.0%} of the step"
        if without > 0:
            yield f"{share}; without it {without / GIB:.1f} GiB are missing"
        else:
            yield f"{share}; it would fit without, and faster"


def _one_label(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in texts:
        yield label, text
        label = ""


def _table(plan: Plan, bold: Callable[[str], str]) -> Iterator[str]:
    """Yields the best strategies, and below them the layouts that are nearest to fitting."""
    found = plan.result.strategies
    usable = plan.request.usable_bytes
    rejected = plan.result.rejected[:_MOST_REJECTED]
    layouts = [each.parallel for each in found] + [each.parallel for each in rejected]
    axes = shown_axes(layouts)
    head = f"  # gpus{layout_head(axes)}{f'GiB of {usable / GIB:.1f}':>17}  fits tok/s/gpu    MFU"
    yield head + (" step s" if plan.tokens is None else "   days  price")
    # The first of several layouts that differ in no column stands for all.
    rows: dict[str, Strategy] = {}
    for each in found:
        columns = f"{each.parallel.world_size:>5}{layout_columns(each.parallel, axes)}"
        rows.setdefault(columns, each)
    for number, (columns, each) in enumerate([*rows.items()][: plan.top or _MOST_SHOWN], 1):
        total = each.memory.total
        spread = plan.spread(each)
        length = plan.length(each)
        chance = spread.chance_to_fit(total, each.request.cluster.device.memory_bytes)
        fits = f"{min(0.99, chance):.2f}"
        mark = ">" if number == 1 else " "
        line = f"{mark}{number:>2}{columns}{gib(total):>7} {bar(total / usable)} {fits:>4}"
        line += f"{each.cost.tokens_per_s_per_gpu:>10,.0f}{each.cost.mfu:>7.1%}"
        if length is None:
            line += f"{each.cost.step_time_s:>7.3g}"
        else:
            line += f"{days_column(length.days)} {money(length.price):>6}"
        yield bold(line) if number == 1 else line
    for refused in rejected:
        columns = f"{refused.parallel.world_size:>5}{layout_columns(refused.parallel, axes)}"
        yield f"  -{columns}  {refused.reason}"


def _verified(plan: Plan) -> Iterator[tuple[str, str]]:
    for each, bytes_ in plan.verified:
        memory = each.memory
        exact = f"{bytes_ / GIB:.1f} GiB by a dry run of the real code"
        found = f"{exact}, {memory.total / GIB:.1f} estimated"
        if bytes_ <= each.request.usable_bytes:
            yield "verified", f"layout 1 holds {found}, on pipeline rank {memory.rank}"
        else:
            layout = layout_text(each.parallel)
            yield "refused", f"{layout}: {found}: it does not fit, the next is taken"


def _run(plan: Plan, best: Strategy) -> str:
    tokens = si(best.cost.tokens_per_s_per_gpu * best.parallel.world_size)
    flops = three_digits(best.cost.model_flops_per_gpu / 1e12)
    text = f"{tokens} tokens/s, {flops} TFLOP/s a device"
    length = plan.length(best)
    if length is None or plan.tokens is None:
        return f"{text}; --tokens 2T --price 2.5 would say days and price"
    text += (
        f"; {si(plan.tokens)} tokens: {length.days:,.1f} days, {length.gpu_hours:,.0f} GPU-hours"
    )
    if length.price is None:
        return f"{text}; --price 2.5 would say what it costs"
    device = plan.request.cluster.device
    hourly = " ".join((f"${device.price_per_hour:.2f} an hour", device.price_from)).strip()
    return f"{text}, {money(length.price)} at {hourly}"


def _why_not(other: PlanResult | str, best: Strategy | None) -> str:
    if isinstance(other, str):
        return f"no such layout: {other}"
    if not other.strategies:
        nearest = other.rejected[0]
        return f"does not fit: at its leanest ({layout_text(nearest.parallel)}) {nearest.reason}"
    if best is None:
        return "fits where what is fixed does not"
    found = other.strategies[0]
    if found.parallel == best.parallel:
        return "it is layout 1"
    ratio = found.cost.tokens_per_s_per_gpu / best.cost.tokens_per_s_per_gpu - 1
    layout = layout_text(found.parallel)
    held = gib(found.memory.total)
    times = time_text(found.cost.parts)
    return f"at its best {layout}: {ratio:+.1%} tokens/s, {held} GiB; a step of it is {times}"
