"""A plan as a report for people that is read in half a minute, and the explanation behind it.

The report is plain ASCII, at most 22 lines of 80 columns. `bold` marks the winner on a terminal.
Both are pure functions of a `Plan`, so they are tested as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.model.parameters import (
    active_parameters,
    model_flops_per_token,
    total_parameters,
)
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.uncertainty import LEVEL, Figure
from parallel3d.planner.report.text import (
    TIME_KINDS,
    bar,
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
from parallel3d.planner.search.neighbours import Neighbour
from parallel3d.planner.search.request import PlanRequest, PlanResult, RunLength, Strategy
from parallel3d.planner.search.ties import TIE

_MOST_LINES = 22
_MOST_REJECTED = 3
_MOST_SHOWN = 4  # the winner and three rivals


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """A request, its result, and answers to what else the user asked. Its repr is the report."""

    request: PlanRequest
    result: PlanResult
    objective: Objective = "throughput"
    seconds: float = 0.0
    top: int | None = None  # lines of the table
    tokens: float | None = None
    # what --why asked, with the result or the rule that it breaks
    why: tuple[str, PlanResult | str] | None = None
    remedies: tuple[str, ...] = ()
    # what gains more than 5%, by the key of the request that it changes
    neighbours: Mapping[str, Neighbour | None] = field(default_factory=dict)
    accuracy: dict[str, Any]  # accuracy.json (docs/plan.md); errors in per cent
    notes: tuple[str, ...] = ()  # on what the model's file says
    commands: tuple[str, ...] = ()  # what to type next
    # the layouts that --verify ran dry, with the bytes that a device needs by the dry run
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

    @property
    def least_days(self) -> float | None:
        """Days that the tokens take at least, if matmuls ran all the time."""
        if self.tokens is None:
            return None
        request = self.request
        device = request.cluster.device
        flops = model_flops_per_token(request.shape, request.seq_len) * self.tokens
        rate = device.peak(request.precision) * device.matmul_efficiency * request.gpus
        return flops / rate / 86400


def page(plan: Plan, *, bold: Callable[[str], str] = str) -> str:
    """Returns the report, which ends with a newline. Notes without room are in the explanation."""
    best = plan.best
    lines = [*header(plan.request), ""]
    if best is not None:
        lines += [*_table(plan, bold), ""]
    rows = [*(_remedies(plan) if best is None else _summary(plan, best)), *_answers(plan)]
    rows += [("note", note) for note in all_notes(plan)]
    lines += _labelled(rows)
    end: list[str] = []
    for command in plan.commands or _usual_next(plan):
        is_script = "\n" in command
        end += [f"next      {command}"] if is_script else wrapped("next", command, " \\")
    room = _MOST_LINES - len(end)
    if len(lines) > room:
        lines = [*lines[: room - 1], "more      --explain"]
    return "".join(f"{line.rstrip()}\n" for line in (*lines, *end))


def _usual_next(plan: Plan) -> Iterator[str]:
    q = plan.request
    if plan.best is not None:
        is_own = q.framework.is_parallel3d and not q.shape.lacks_module
        yield f"the same command with {'--emit-recipe plan.yaml' if is_own else '--explain'}"


def explanation(plan: Plan) -> Iterator[str]:
    """Yields what led to the report: the search, the reasons, all notes, how sure it is."""
    checked = f"the memory of {plan.result.checked:,} layouts, all others by bounds"
    rows = [("searched", f"{checked}; ranked by {plan.objective}")]
    if plan.best is not None:
        rows += [("because", reason) for reason in reasons(plan.best)]
        rejected = plan.result.rejected[:_MOST_REJECTED]
        rows += [("no room", f"{_sizes(each.parallel)} {each.reason}") for each in rejected]
    rows += [("note", note) for note in all_notes(plan)]
    rows.append(("how sure", how_sure(plan.accuracy, plan.request)))
    yield from _labelled(rows)


def _labelled(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for label, text in rows:
        yield from wrapped(label, text)


def header(q: PlanRequest, *, has_size: bool = True) -> Iterator[str]:
    """Yields what was asked: the model, the batch, the hardware, how many devices unless `has_size`
    is false."""
    shape = q.shape
    cluster = q.cluster
    active = f", {si(active_parameters(shape))} active" if shape.experts else ""
    model = f"{shape.name}, {si(total_parameters(shape))} parameters{active}"
    batch = f"{q.global_batch_size} x {q.seq_len} tokens"
    yield from wrapped("model", f"{model}; {batch}, {q.precision}")
    count = f"{q.gpus} x " if has_size else ""
    yield from wrapped("hardware", f"{count}{cluster.device.name}; {links_text(cluster)}")
    corrected = scales_text(cluster.scales)
    if corrected:
        yield from wrapped("anchored", f"by measured runs: {corrected}")


def _summary(plan: Plan, best: Strategy) -> Iterator[tuple[str, str]]:
    """Yields labels and texts about the winner."""
    memory = best.memory
    cost = best.cost
    parts = cost.parts
    length = plan.length(best)
    usable = plan.request.usable_bytes
    yield "layout", layout_text(best.parallel)
    held = f"{bar(memory.total / usable)} {gib(memory.total)} of {usable / GIB:.1f} GiB"
    yield "memory", f"{held} on rank {memory.rank}: {memory_text(memory)}"
    yield "time", f"{cost.step_time_s:.3g} s a step: {time_text(parts)}"
    speed = cost.tokens_per_s_per_gpu
    rate = f"{si(speed * best.parallel.world_size)} tokens/s"
    rate += f", {three_digits(cost.model_flops_per_gpu / 1e12)} TFLOP/s/gpu"
    ranges = [
        _between(best, "throughput", speed, "tok/s/gpu"),
        _between(best, "memory", memory.total / GIB, "GiB"),
    ]
    if length is not None:
        rate += f"; {three_digits(length.days)} days, {si(length.gpu_hours)} GPU-hours"
        rate += f", {money(length.price)}" if length.price is not None else ""
        ranges.append(_between(best, "throughput", length.days, "days"))
    yield "speed", rate
    if best.goodput:
        saves = f"saves every {best.goodput.interval_s / 60:.3g} min"
        yield "goodput", f"{best.goodput.share:.1%} of the time trains if the job {saves}"
    yield "range", f"{', '.join(ranges)} ({10 * LEVEL:.0f} in 10)"
    losses = {kind: getattr(parts, kind) for kind in TIME_KINDS if kind != "compute"}
    largest = max(losses, key=lambda kind: losses[kind])
    if losses[largest] < 0.03 * parts.total:
        largest = "compute"
    share = getattr(parts, largest) / parts.total
    left = f"{(usable - memory.total) / GIB:.1f} GiB are left"
    yield "limits", f"{largest} takes {share:.0%} of the time; {left}"


def _answers(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields what --verify and --why asked, and what the winner is compared with."""
    best = plan.best
    for each, bytes_ in plan.verified:
        fits = "fits" if bytes_ <= plan.request.usable_bytes else "does not fit"
        exact = f"{bytes_ / GIB:.1f} GiB by a dry run of the real code"
        estimated = f"{each.memory.total / GIB:.1f} estimated"
        yield "verified", f"{_sizes(each.parallel)} {fits}: {exact}, {estimated}"
    for other in plan.result.strategies[1:2]:
        gain = _gain(other, plan.result.strategies[0])
        if abs(gain) <= TIE:
            sizes = f"{_sizes(other.parallel)} mb {other.parallel.microbatch_size}"
            yield "runner-up", f"{sizes} is equal within error ({gain:+.1%} tokens/s)"
    for key, neighbour in plan.neighbours.items():
        if neighbour is not None:
            other = neighbour.strategy
            size = getattr(other.request, key)
            asked = getattr(plan.request, key)
            gains = f"{neighbour.gain:+.0%} tok/s/gpu"
            label = "batch"
            if key == "gpus":
                label = "devices"
                gains += f" ({(1 + neighbour.gain) * size / asked - 1:+.0%} in all)"
            yield label, f"{size} instead of {asked}: {gains}, {_sizes(other.parallel)}"
    if plan.why is not None:
        words, answer = plan.why
        yield "why not", f"{words}: {_why_not(answer, best)}"


def _gain(other: Strategy, best: Strategy) -> float:
    return other.cost.tokens_per_s_per_gpu / best.cost.tokens_per_s_per_gpu - 1


def _sizes(parallel: ParallelConfig) -> str:
    return f"tp {parallel.tp} pp {parallel.pp} dp {parallel.dp}"


def _remedies(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields what would fit if nothing does, and how long the tokens take at least."""
    rejected = plan.result.rejected
    usable = plan.request.usable_bytes
    more = f"{rejected[0].short_bytes / usable:.0%} more"
    yield "no layout", f"fits: {more} than the {usable / GIB:.1f} GiB of a device is needed"
    for each in rejected[:_MOST_REJECTED]:
        yield "nearest", f"{_sizes(each.parallel)}: {each.reason}"
    for remedy in plan.remedies or ("nothing that was tried: more devices, shorter sequences",):
        yield "would fit", remedy
    if plan.least_days is not None:
        days = plan.least_days
        time = f"{days:,.1f} days" if days < 730 else f"{days / 365.25:,.0f} years"
        on = f"{plan.request.gpus} x {plan.request.cluster.device.name}"
        yield "time", f"at least {time} on {on}, if all of it were matmuls"


def all_notes(plan: Plan) -> Iterator[str]:
    """Yields what the model's file says, what this project's trainer lacks, and what is assumed."""
    yield from plan.notes
    q = plan.request
    if not q.framework.is_parallel3d:
        yield f"priced for {q.framework.name}, which is not this project's trainer"
    elif q.shape.lacks_module:
        yield f"this project's trainer lacks {q.shape.lacks_module}: priced as if it had them"
    if q.cluster.device.is_cpu and q.cluster.measured is None:
        yield "an order of magnitude: parallel3d-plan calibrate -o mine.yaml measures this CPU"
    if q.shape.experts is not None:
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


def three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _between(found: Strategy, figure: Figure, value: float, unit: str) -> str:
    around = found.errors.around(figure, value)
    return f"{three_digits(around.low)} to {three_digits(around.high)} {unit}"


def reasons(best: Strategy) -> Iterator[str]:
    """Yields why the best layout needs no tp and pp, and why it needs recompute."""
    parallel = best.parallel
    if parallel.tp == parallel.pp == 1:
        yield f"the model fits at {gib(best.memory.total)} GiB a device without tp or pp"
    if parallel.recompute != "none":
        none = replace(parallel, recompute="none", recompute_every=None)
        missing = replace(best, parallel=none).memory.total - best.request.usable_bytes
        if missing > 0:
            yield f"without recompute {missing / GIB:.1f} GiB are missing"


def _table(plan: Plan, bold: Callable[[str], str]) -> Iterator[str]:
    """Yields the best layouts, the winner marked."""
    found = plan.result.strategies[: plan.top or _MOST_SHOWN]
    axes = shown_axes([each.parallel for each in found])
    last = "step s" if plan.tokens is None else "days"
    yield f" {layout_head(axes)}{'GiB':>7}{'tok/s/gpu':>11}{'MFU':>8}{last:>8}"
    mark = ">"
    for each in found:
        cost = each.cost
        length = plan.length(each)
        time = three_digits(cost.step_time_s if length is None else length.days)
        line = f"{mark}{layout_columns(each.parallel, axes)}{gib(each.memory.total):>7}"
        line += f"{cost.tokens_per_s_per_gpu:>11,.0f}{cost.mfu:>8.1%}{time:>8}"
        yield bold(line) if mark == ">" else line
        mark = " "


def _why_not(other: PlanResult | str, best: Strategy | None) -> str:
    if isinstance(other, str):
        return other
    if not other.strategies:
        nearest = other.rejected[0]
        return f"does not fit: {_sizes(nearest.parallel)} {nearest.reason}"
    if best is None:
        return "fits where what is fixed does not"
    found = other.strategies[0]
    if found.parallel == best.parallel:
        return "it is the winner"
    held = f"{gib(found.memory.total)} GiB"
    return f"{_gain(found, best):+.1%} tokens/s, {held}; {time_text(found.cost.parts)}"
