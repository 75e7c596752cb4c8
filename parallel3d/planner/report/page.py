"""A plan as a page for people: what to use, what it needs and takes, what was rejected, and how sure that is.

Plain ASCII and at most 100 columns, whatever it is printed on; `bold` marks the winner on a terminal. Pure functions of
a `Plan`, so the page is tested as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.report.reasons import limits, reasons
from parallel3d.planner.report.text import (
    bar,
    days_column,
    gib,
    layout_columns,
    layout_text,
    links_text,
    memory_text,
    money,
    si,
    time_text,
    wrapped,
)
from parallel3d.planner.search.candidate import planned_shape
from parallel3d.planner.search.question import Answer, Question, RunLength, Strategy, run_length
from parallel3d.planner.search.ranking import Objective, WhyNot, at_size, slower_by

_MOST_REJECTED = 3
_MOST_SHOWN = 5
_RANKED = {
    "throughput": "ranked by tokens per second, ties by memory",
    "memory": "ranked by memory, the leanest layout of each tp and pp, whatever its speed",
    "cost": "ranked by GPU-hours a token, halves of the cluster among them",
}


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """What `parallel3d-plan score` found, on the day it was recorded; errors in per cent."""

    date: str
    throughput_runs: int
    throughput_median: float
    throughput_p90: float
    memory_runs: int
    memory_median: float
    memory_p90: float
    fit_accuracy: float
    runs_by_hardware: dict[str, int]


@dataclass(frozen=True)
class VerifiedLayout:
    """A layout whose fullest pipeline rank was run dry, and the device's bytes in use: the estimate's, and those with
    the dry run's tensors."""

    parallel: ParallelConfig
    rank: int
    estimated_bytes: float
    bytes: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A question, its answer, and what was asked beside it."""

    question: Question
    answer: Answer
    objective: Objective = "throughput"
    seconds: float = 0.0
    top: int | None = None  # lines of the table
    tokens: float | None = None
    why: WhyNot | None = None
    remedies: tuple[str, ...] = ()
    accuracy: Accuracy | None = None
    notes: tuple[str, ...] = ()  # on what the model's file says
    commands: tuple[str, ...] = ()  # what to type next
    verified: tuple[VerifiedLayout, ...] = ()  # the layouts that --verify ran dry, in their order

    @property
    def best(self) -> Strategy | None:
        return self.answer.strategies[0] if self.answer.strategies else None

    def length(self, found: Strategy) -> RunLength | None:
        return None if self.tokens is None else run_length(at_size(self.question, found), found, self.tokens)


def page(plan: Plan, *, bold: Callable[[str], str] = str) -> str:
    """The whole page, which ends with a newline."""
    lines = [*header(plan.question), ""]
    best = plan.best
    if best is None:
        lines += [*_nothing_fits(plan), *(_verified(plan) if plan.verified else ())]
    else:
        lines += [*_table(plan, bold), *_rejected_lines(plan), "", *wrapped("searched", searched_text(plan))]
        lines += _winner(plan, best)
    if plan.why is not None:
        lines += wrapped("why not", why_text(plan, plan.why))
    lines += [line for note in plan.notes for line in wrapped("note", note)]
    lines += wrapped("how sure", how_sure(plan))
    lines += [part for command in plan.commands for part in _command(command)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def header(q: Question) -> Iterator[str]:
    """What was asked: the model, the batch, the hardware."""
    shape, cluster = q.shape, q.cluster
    batch = f"batch {q.global_batch_size} = {si(q.global_batch_size * q.seq_len)} tokens"
    numbers = f"{si(total_parameters(shape))} parameters, {shape.layers} layers"
    yield from wrapped("model", f"{shape.name}, {numbers}  sequence {q.seq_len}  {batch}  {q.precision}")
    nodes = -(-q.gpus // cluster.gpus_per_node)
    size = f"{nodes} node{'s' * (nodes > 1)} of {cluster.gpus_per_node}"
    yield from wrapped("hardware", f"{q.gpus} x {cluster.device.name}, {size}  links {links_text(cluster)}")


def _table(plan: Plan, bold: Callable[[str], str]) -> Iterator[str]:
    sizes = _sizes_differ(plan)
    head = "  #" + " gpus" * sizes + "  tp  pp  vs  dp s x r  mb recompute"
    head += f"{f'GiB of {plan.question.usable_bytes / GIB:.1f}':>17}       tok/s/gpu    MFU" + " step s" * (not sizes)
    if plan.tokens is not None:
        head += "   days" + "  price" * (plan.question.cluster.device.price_per_hour is not None)
    yield head
    for number, each in _shown(plan):
        line = f"{'>' if number == 1 else ' '}{number:>2}{_row(plan, each, sizes)}"
        yield bold(line) if number == 1 else line


def _row(plan: Plan, found: Strategy, sizes: bool) -> str:
    total, usable = found.memory.total, plan.question.usable_bytes
    text = f"{found.parallel.world_size:>5}" if sizes else ""
    text += f"{layout_columns(found.parallel)}{gib(total):>7} {bar(total / usable)} {total / usable:>4.0%}"
    text += f"{found.cost.tokens_per_s_per_gpu:>10,.0f}{found.cost.mfu:>7.1%}"
    text += "" if sizes else f"{found.cost.step_time_s:>7.3g}"
    length = plan.length(found)
    if length is not None:
        text += days_column(length.days)
        text += f" {money(length.price):>6}" if length.price is not None else ""
    return text


def _rejected_lines(plan: Plan) -> Iterator[str]:
    gap = " " * 5 if _sizes_differ(plan) else ""
    for each in plan.answer.rejected[:_MOST_REJECTED]:
        reason = each.reason.replace("pipeline rank", "rank").replace("most of all for", "most for")
        yield f"  -{gap}{layout_columns(each.parallel)}  {reason}"


def _sizes_differ(plan: Plan) -> bool:
    return len({each.parallel.world_size for each in plan.answer.strategies}) > 1


def _shown(plan: Plan) -> list[tuple[int, Strategy]]:
    """Returns the strategies of the table, with their places."""
    return list(enumerate(plan.answer.strategies, 1))[: plan.top or _MOST_SHOWN]


def searched_text(plan: Plan) -> str:
    answer = plan.answer
    more = len(answer.rejected) - _MOST_REJECTED
    rest = f"; {more} more tp x pp have no layout that fits" if more > 0 else ""
    slower = sum(each.reason.startswith("slower") for each in answer.left_out)
    rest += f"; {slower} more are slower" if slower else ""
    ruled_out = len(answer.left_out) - slower
    rest += f"; {ruled_out} more break a rule (--json says which)" if ruled_out else ""
    looked = f"{answer.considered:,} layouts in the order of time, with the memory of {answer.checked:,} of them"
    return f"{looked}; {_RANKED[plan.objective]}{rest}"


def _winner(plan: Plan, best: Strategy) -> Iterator[str]:
    q = at_size(plan.question, best)
    microbatches = q.global_batch_size // (best.parallel.dp * best.parallel.microbatch_size)
    yield from wrapped(
        "layout 1", f"{layout_text(best.parallel)}; {microbatches} microbatch{'es' * (microbatches > 1)}"
    )
    vocab = planned_shape(q, best.parallel.tp).vocab
    if vocab != q.shape.vocab:
        yield from wrapped("", f"with the vocabulary padded from {q.shape.vocab} to {vocab}, which tp divides")
    for number, line in enumerate(reasons(q, replace(plan.answer, strategies=(best,)))):
        yield from wrapped("" if number else "because", line)
    yield from wrapped("memory", f"GiB on pipeline rank {best.memory.rank}, the fullest: {memory_text(best.memory)}")
    yield from _verified(plan)
    yield from wrapped("time", f"{best.cost.step_time_s:.3g} s a step: {time_text(best.cost.parts)}")
    yield from wrapped("run", run_text(plan, best))
    yield from wrapped("limits", "; ".join(limits(q, best)))


def _verified(plan: Plan) -> Iterator[str]:
    """Yields what the dry runs say, or offers one."""
    for each in plan.verified:
        found = f"{each.bytes / GIB:.1f} GiB by a dry run of the real code, {each.estimated_bytes / GIB:.1f} estimated"
        if each.fits:
            yield from wrapped("verified", f"layout 1 holds {found}, on pipeline rank {each.rank}")
        else:
            yield from wrapped("refused", f"{layout_text(each.parallel)}: {found}: it does not fit, the next is taken")
    if not plan.verified and plan.question.program.is_parallel3d:
        yield from wrapped("exactly", "--verify runs layout 1's fullest rank dry and prints its exact memory")


def run_text(plan: Plan, best: Strategy) -> str:
    tokens = best.cost.tokens_per_s_per_gpu * best.parallel.world_size
    text = f"{si(tokens)} tokens/s, {best.cost.model_flops_per_gpu / 1e12:.3g} TFLOP/s a device"
    if best.parallel.recompute != "none":
        text += f" (with recompute {best.cost.hfu:.1%} of the peak)"
    length = plan.length(best)
    if length is None or plan.tokens is None:
        return f"{text}; --tokens 2T --price 2.5 would say days and price"
    price = f", {money(length.price)}" if length.price is not None else "; --price 2.5 would say what it costs"
    return f"{text}; {si(plan.tokens)} tokens: {length.days:,.1f} days, {length.gpu_hours:,.0f} GPU-hours{price}"


def _nothing_fits(plan: Plan) -> Iterator[str]:
    q, rejected = plan.question, plan.answer.rejected
    nearest = rejected[0]
    share, usable = nearest.short_bytes / q.usable_bytes, f"the {q.usable_bytes / GIB:.1f} GiB that a device may use"
    needs = f"{share:.0%} more memory than {usable}" if share < 10 else f"{1 + share:,.0f} times {usable}"
    yield f"nothing fits: needs {needs}"
    yield from wrapped("nearest", f"{layout_text(nearest.parallel)}: {nearest.reason}")
    for each in rejected[1:_MOST_REJECTED]:
        yield from wrapped("then", f"{layout_text(each.parallel)}: {each.reason}")
    for number, line in enumerate(plan.remedies or ("nothing that was tried: more devices, shorter sequences",)):
        yield from wrapped("" if number else "would do", line)


def why_text(plan: Plan, why: WhyNot) -> str:
    best, found = plan.best, why.found
    if why.refused:
        return f"{why.asked}: no such layout: {why.refused}"
    if why.rejected is not None:
        return f"{why.asked}: does not fit: at its leanest ({layout_text(why.rejected.parallel)}) {why.rejected.reason}"
    if found is None or best is None:
        return f"{why.asked}: fits where what is fixed does not"
    if found.parallel == best.parallel:
        return f"{why.asked}: it is layout 1"
    ratio = found.cost.tokens_per_s_per_gpu / best.cost.tokens_per_s_per_gpu - 1
    parts = [f"{name} {seconds:+.2g} s" for name, seconds in slower_by(best, found)[:3] if abs(seconds) > 5e-3]
    causes = f" ({', '.join(parts)} a step)" if parts else ""
    speed = f"{-ratio:.1%} fewer" if ratio < 0 else f"{ratio:.1%} more"
    memory = f"{gib(found.memory.total)} GiB"
    return f"{why.asked}: at its best {layout_text(found.parallel)}: {speed} tokens/s than layout 1{causes}, {memory}"


def how_sure(plan: Plan) -> str:
    known = plan.accuracy
    if known is None:
        return "no score is recorded; see parallel3d-plan score"
    runs = known.runs_by_hardware.get(plan.question.cluster.device_file, 0)
    here = f"{runs} of them on this device" if runs else "none of them on this device, so trust its figures less"
    return (
        f"median error {known.throughput_median:.1f}% of speed ({known.throughput_runs} published runs of other "
        f"programs, 90% within {known.throughput_p90:.0f}%) and {known.memory_median:.1f}% of memory "
        f"({known.memory_runs} runs), {here}; scored {known.date}"
    )


def _command(command: str) -> Iterator[str]:
    """Not wrapped, since it is copied."""
    yield f"next      {command}"
