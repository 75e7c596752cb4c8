"""A plan as a page for people: what to use, what it needs and takes, what was rejected, and how sure that is.

Plain ASCII and at most 100 columns, whatever it is printed on; `bold` marks the winner on a terminal. Pure functions of
a `Plan`, so the page is tested as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.model.parameters import active_parameters, computed_share, total_parameters
from parallel3d.planner.model.planned_run import PlannedRun, other_axes
from parallel3d.planner.model.spread import LEVEL, Figure, Spread, spread_of
from parallel3d.planner.report.text import (
    TIME_KINDS,
    anchored_lines,
    bar,
    days_column,
    gib,
    layout_columns,
    layout_head,
    layout_text,
    links_text,
    memory_text,
    money,
    shown_axes,
    si,
    time_text,
    wrapped,
)
from parallel3d.planner.search.fastest import Objective
from parallel3d.planner.search.question import Answer, Question, RunLength, Strategy
from parallel3d.planner.search.ties import TIE, tied

_MOST_REJECTED = 3
_MOST_SHOWN = 5
_MOSTLY_COMPUTED = 0.85  # a smaller share of the counted operations is told beside them
_RANKED = {
    "throughput": "ranked by tokens per second",
    "memory": "ranked by memory, the leanest layout of each tp and pp, whatever its speed",
    "cost": "ranked by GPU-hours a token, halves of the cluster among them",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A question, its answer, and what was asked beside it."""

    question: Question
    answer: Answer
    objective: Objective = "throughput"
    seconds: float = 0.0
    top: int | None = None  # lines of the table
    tokens: float | None = None
    why: tuple[str, Answer | str] | None = None  # what --why asked, with the answer or the rule that it breaks
    remedies: tuple[str, ...] = ()
    accuracy: dict[str, Any] | None = None  # what the recorded score found (docs/plan.md); errors in per cent
    notes: tuple[str, ...] = ()  # on what the model's file says
    commands: tuple[str, ...] = ()  # what to type next
    # The layouts whose fullest rank --verify ran dry, with the device's bytes in use with the dry run's tensors.
    verified: tuple[tuple[Strategy, float], ...] = ()

    @property
    def best(self) -> Strategy | None:
        return self.answer.strategies[0] if self.answer.strategies else None

    def length(self, found: Strategy) -> RunLength | None:
        return None if self.tokens is None else found.length(self.tokens)

    def spread(self, found: Strategy) -> Spread | None:
        """How far off the figures of a layout may be; None where no score is recorded."""
        return None if self.accuracy is None else spread_of(found.run, self.accuracy)


def page(plan: Plan, *, bold: Callable[[str], str] = str) -> str:
    """The whole page, which ends with a newline."""
    lines = [*header(plan.question), ""]
    if plan.best is None:
        lines.append(f"nothing fits: {missing_memory(plan)}")
    else:
        lines += [*_table(plan, bold), ""]
    for label, text in advice(plan):
        lines += [f"next      {text}"] if label == "next" else wrapped(label, text)  # what is copied is not wrapped
    return "\n".join(line.rstrip() for line in lines) + "\n"


def header(q: Question) -> Iterator[str]:
    """What was asked: the model, the batch, the hardware."""
    cluster, nodes = q.cluster, -(-q.gpus // q.cluster.gpus_per_node)
    size = f"{nodes} node{'s' * (nodes > 1)} of {cluster.gpus_per_node}"
    yield from model_lines(q)
    yield from wrapped("hardware", f"{q.gpus} x {cluster.device.name}, {size}  links {links_text(cluster)}")
    yield from anchored_lines(cluster.scales)


def header_of_sizes(q: Question) -> Iterator[str]:
    """Yields the same, without a number of devices."""
    device, per_node = q.cluster.device.name, q.cluster.gpus_per_node
    yield from model_lines(q)
    yield from wrapped("hardware", f"{device}, nodes of {per_node}  links {links_text(q.cluster)}")
    yield from anchored_lines(q.cluster.scales)


def model_lines(q: Question) -> Iterator[str]:
    """What is trained, and on how much at once."""
    shape = q.shape
    batch = f"batch {q.global_batch_size} = {si(q.global_batch_size * q.seq_len)} tokens"
    active = f", {si(active_parameters(shape))} of them for a token" if shape.experts is not None else ""
    numbers = f"{si(total_parameters(shape))} parameters{active}, {shape.layers} layers"
    yield from wrapped("model", f"{shape.name}, {numbers}  sequence {q.seq_len}  {batch}  {q.precision}")


def advice(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields what every page says beside its tables: a label, empty where a row goes on with the last, and a text."""
    best, answer = plan.best, plan.answer
    if best is None:
        for label, each in zip(("nearest", "then", "then"), answer.rejected, strict=False):
            yield label, f"{layout_text(each.parallel)}: {each.reason}"
        yield from _one_label("would do", plan.remedies or ("nothing that was tried: more devices, shorter sequences",))
        yield from _verified(plan)
    else:
        q, parallel, memory = best.question, best.parallel, best.memory
        slower = sum(each.reason.startswith("slower") for each in answer.left_out)
        counts = [
            (len(answer.rejected) - _MOST_REJECTED, "tp x pp ha{ve} no layout that fits"),
            (slower, "{are} slower"),
            (len(answer.left_out) - slower, "break{s} a rule (--json says which)"),
        ]
        one, many = {"ve": "s", "are": "is", "s": "s"}, {"ve": "ve", "are": "are", "s": ""}
        rest = "".join(f"; {n} more {what.format(**(one if n == 1 else many))}" for n, what in counts if n > 0)
        looked = f"{answer.considered:,} layouts in the order of time, with the memory of {answer.checked:,} of them"
        yield "searched", f"{looked}; {_RANKED[plan.objective]}{rest}"
        if plan.objective == "throughput" and (equal := tied(answer.strategies)) > 1:
            first = f"layouts 1 {'and' if equal == 2 else 'to'} {equal}"
            closer = f"{first} are within {TIE:.0%}, closer than the planner can tell"
            less = "less memory (in tenths of a device) goes first"
            yield "ties", f"{closer}: {less}, then tp within a node, then the simpler schedule"
        microbatches = q.global_batch_size // (parallel.dp * parallel.microbatch_size)
        yield "layout 1", f"{layout_text(parallel)}; {microbatches} microbatch{'es' * (microbatches > 1)}"
        vocab = q.planned_shape(parallel.tp).vocab
        if vocab != q.shape.vocab:
            yield "", f"with the vocabulary padded from {q.shape.vocab} to {vocab}, which tp divides"
        yield from _one_label("because", reasons(best))
        yield "memory", f"GiB on pipeline rank {memory.rank}, the fullest: {memory_text(memory)}"
        yield from _verified(plan)
        if not plan.verified and q.program.is_parallel3d and not q.shape.lacks_module:
            yield "exactly", "--verify runs layout 1's fullest rank dry and prints its exact memory"
        yield "time", f"{best.cost.step_time_s:.3g} s a step: {time_text(best.cost.parts)}"
        yield "run", _run(plan, best)
        if (spread := plan.spread(best)) is not None:
            yield "range", _ranges(best, plan.length(best), spread)
        yield "limits", "; ".join(limits(best))
    if plan.why is not None:
        asked, other = plan.why
        yield "why not", f"{asked}: {_why_not(other, best)}"
    yield from (("note", note) for note in (*_engine_notes(plan.question), *plan.notes))
    if (known := plan.accuracy) is None:
        yield "how sure", "no score is recorded; see parallel3d-plan score"
    else:
        yield "how sure", how_sure(known, plan.question)
    yield from (("next", command) for command in plan.commands)


def _engine_notes(question: Question) -> Iterator[str]:
    """Yields what this project's own trainer does not have of a plan, and what is assumed in its place."""
    program, shape = question.program, question.shape
    if not program.is_parallel3d:
        lacks = ["no mixtures of experts"] * (shape.experts is not None)
        lacks += ["no context parallelism"] * ("cp" in program.axes)
        has = f" which has {' and '.join(lacks)}," if lacks else ""
        yield f"priced for {program.name}, not for this project's trainer,{has} so that no recipe is written"
    elif shape.lacks_module:
        yield f"this project's trainer lacks {shape.lacks_module}: priced as if it had them, and no recipe is written"
    if question.cluster.device.is_cpu and question.cluster.measured is None:
        yield "cpu is an order of magnitude, of one core: parallel3d-plan calibrate -o mine.yaml measures this machine"
    if shape.experts is not None:
        yield "all experts are taken to get equally many tokens: uneven ones take longer, and more memory on some ranks"


def how_sure(known: Mapping[str, Any], about: Question | PlannedRun) -> str:
    """The recorded errors, those on sources that nothing was set on first."""
    blind, fitted = known["blind"], known["fitted"]
    runs = known["runs_by_hardware"].get(about.cluster.device_file, 0)
    scales = about.cluster.scales
    if about.program.name in (*scales.timed, *scales.weighed):
        return _how_sure_anchored(known)
    here = f"{runs} of these runs are on this device" if runs else "none of these runs is on this device: trust it less"
    own = "parallel3d itself was never measured on a GPU; " if about.program.is_parallel3d else ""
    if about.shape.experts is not None:
        own = (
            "mixtures were never fitted to a run: 25 published ones came out 13% off (median, most too fast); of dense "
        )
        own += "models "
    return (
        f"{own}median error on published runs whose source was left out {blind['throughput_median']:.1f}% of speed "
        f"({known['throughput_runs']} runs, 90% within {blind['throughput_p90']:.0f}%) and "
        f"{blind['memory_median']:.1f}% of memory ({known['memory_runs']} runs, {blind['memory_p90']:.0f}%); fitted to "
        f"them {fitted['throughput_median']:.1f}% and {fitted['memory_median']:.1f}%; {here}; scored {known['date']}"
    )


def _how_sure_anchored(known: Mapping[str, Any]) -> str:
    """The recorded errors on sources left out, with and without one run of each that has corrected the others."""
    before, after = known["not_anchored"], known["anchored"]
    return (
        f"one run of each published source, left out else, brought the median error on the source's other runs from "
        f"{before['throughput_median']:.1f}% to {after['throughput_median']:.1f}% of speed (90% within "
        f"{after['throughput_p90']:.0f}%) and from {before['memory_median']:.1f}% to {after['memory_median']:.1f}% of "
        f"memory ({after['memory_p90']:.0f}%); scored {known['date']}"
    )


def _ranges(best: Strategy, length: RunLength | None, spread: Spread) -> str:
    """Returns the ranges in which the best layout's figures lie in so many cases of ten."""

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
        if length.price is not None:
            around = spread.around("throughput", length.price)
            told.append(f"{money(around.low)} to {money(around.high)}")
    return f"{', '.join(told)}; {10 * LEVEL:.0f} in 10"


def three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def missing_memory(plan: Plan) -> str:
    """How far the leanest layout is from fitting."""
    share, usable = plan.answer.rejected[0].short_bytes / plan.question.usable_bytes, plan.question.usable_bytes / GIB
    needs = f"{share:.0%} more memory than" if share < 10 else f"{1 + share:,.0f} times"
    return f"needs {needs} the {usable:.1f} GiB that a device may use"


def reasons(best: Strategy) -> Iterator[str]:
    """Why the best layout is the best: the field's rules of thumb, each from this plan's own numbers."""
    question, parallel, parts, step = best.question, best.parallel, best.cost.parts, best.cost.step_time_s
    if parallel.world_size == 1:
        yield f"one device: the model fits at {gib(best.memory.total)} GiB"
    elif parallel.tp == parallel.pp == 1:
        yield f"data parallel alone: the model fits at {gib(best.memory.total)} GiB a device without tp or pp"
    if parallel.tp > 1:
        where = "within a node" if parallel.tp <= question.cluster.gpus_per_node else "across nodes"
        yield f"tp {parallel.tp} {where}: its traffic takes {parts.tp / step:.0%} of the step"
    if parallel.pp > 1:
        bubble, transfers = parts.pp_bubble / step, parts.pp_p2p / step
        yield f"pp {parallel.pp}: its bubble takes {bubble:.0%} of the step and its transfers {transfers:.0%}"
    cp, ep = other_axes(parallel)
    if cp > 1:
        tokens = question.seq_len // cp
        sent = f"keys and values on their way take {parts.cp / step:.0%} of the step"
        yield f"cp {cp}: {tokens:,} tokens of a sequence on each rank; {sent}"
    if ep > 1:
        where = "within a node" if ep <= question.cluster.gpus_per_node else "across nodes"
        yield f"ep {ep} {where}: tokens on their way to experts and back take {parts.ep / step:.0%} of the step"
    if parallel.dp > 1:
        yield f"data parallel over {parallel.dp}: {parts.dp / step:.0%} of the step is traffic that nothing hides"
    if parallel.recompute != "none":
        none = replace(parallel, recompute="none", recompute_every=None)
        without = replace(best, parallel=none).memory.total - question.usable_bytes
        why = f"without it {without / GIB:.1f} GiB are missing" if without > 0 else "it would fit without, and faster"
        what = f"one block of {parallel.recompute_every}" if parallel.recompute_every else parallel.recompute
        yield f"recompute {what}: {parts.recompute / step:.0%} of the step; {why}"


def limits(best: Strategy) -> Iterator[str]:
    """What breaks first: how much memory is left, and what twice as long or as many sequences would need."""
    question = best.question
    left = question.usable_bytes - best.memory.total
    yield f"{left / GIB:.1f} GiB are left under {question.memory_rule}"
    longer = Strategy(replace(question, seq_len=2 * question.seq_len), best.parallel).memory.total
    yield f"sequences of {2 * question.seq_len} {_fits(longer - question.usable_bytes)}"
    twice = replace(best.parallel, microbatch_size=2 * best.parallel.microbatch_size)
    if question.global_batch_size % (twice.dp * twice.microbatch_size) == 0:
        more = Strategy(question, twice).memory.total
        yield f"microbatches of {twice.microbatch_size} {_fits(more - question.usable_bytes)}"


def _fits(short: float) -> str:
    return f"need {short / GIB:.1f} GiB more" if short > 0 else "fit too"


def _one_label(label: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for number, text in enumerate(texts):
        yield "" if number else label, text


def _table(plan: Plan, bold: Callable[[str], str]) -> Iterator[str]:
    """Yields the best strategies, and below them the layouts that are nearest to fitting."""
    answer, usable = plan.answer, plan.question.usable_bytes
    sizes = len({each.parallel.world_size for each in answer.strategies}) > 1
    axes = shown_axes(
        [
            *(each.parallel for each in answer.strategies),
            *(each.parallel for each in answer.rejected[:_MOST_REJECTED]),
        ]
    )
    # A row has a hundred columns at the most: a step's seconds give way to days where a layout has more axes.
    has_step = not sizes and (plan.tokens is None or not axes)
    head = "  #" + " gpus" * sizes + layout_head(axes)
    head += f"{f'GiB of {usable / GIB:.1f}':>17}  fits tok/s/gpu    MFU" + " step s" * has_step
    if plan.tokens is not None:
        head += "   days" + "  price" * (plan.question.cluster.device.price_per_hour is not None)
    yield head
    # The first of several layouts that differ in no column stands for all.
    told = {layout_columns(each.parallel, axes): each for each in reversed(answer.strategies)}
    shown = [each for each in answer.strategies if told[layout_columns(each.parallel, axes)] is each]
    for number, found in enumerate(shown[: plan.top or _MOST_SHOWN], 1):
        total, length, spread = found.memory.total, plan.length(found), plan.spread(found)
        limit = found.question.cluster.device.memory_bytes
        fits = "-" if spread is None else f"{min(0.99, spread.chance_to_fit(total, limit)):.2f}"
        line = f"{'>' if number == 1 else ' '}{number:>2}" + f"{found.parallel.world_size:>5}" * sizes
        line += f"{layout_columns(found.parallel, axes)}{gib(total):>7} {bar(total / usable)} {fits:>4}"
        line += f"{found.cost.tokens_per_s_per_gpu:>10,.0f}{found.cost.mfu:>7.1%}"
        line += f"{found.cost.step_time_s:>7.3g}" * has_step
        if length is not None:
            line += days_column(length.days)
            line += f" {money(length.price):>6}" if length.price is not None else ""
        yield bold(line) if number == 1 else line
    for each in answer.rejected[:_MOST_REJECTED]:
        reason = each.reason.replace("pipeline rank", "rank").replace("most of all for", "most for")
        yield f"  -{' ' * 5 * sizes}{layout_columns(each.parallel, axes)}  {reason}"


def _verified(plan: Plan) -> Iterator[tuple[str, str]]:
    for each, bytes_ in plan.verified:
        memory = each.memory
        found = f"{bytes_ / GIB:.1f} GiB by a dry run of the real code, {memory.total / GIB:.1f} estimated"
        if bytes_ <= each.question.usable_bytes:
            yield "verified", f"layout 1 holds {found}, on pipeline rank {memory.rank}"
        else:
            yield "refused", f"{layout_text(each.parallel)}: {found}: it does not fit, the next is taken"


def _run(plan: Plan, best: Strategy) -> str:
    tokens = best.cost.tokens_per_s_per_gpu * best.parallel.world_size
    text = f"{si(tokens)} tokens/s, {three_digits(best.cost.model_flops_per_gpu / 1e12)} TFLOP/s a device"
    if best.parallel.recompute != "none":
        text += f" (with recompute {best.cost.hfu:.1%} of the peak)"
    share = computed_share(best.question.shape, best.question.seq_len)
    if share < _MOSTLY_COMPUTED:
        computed = f"{three_digits(share * best.cost.model_flops_per_gpu / 1e12)} TFLOP/s, {share * best.cost.mfu:.1%}"
        text += f", and without the half of attention that is counted and not computed {computed}"
    length = plan.length(best)
    if length is None or plan.tokens is None:
        return f"{text}; --tokens 2T --price 2.5 would say days and price"
    device = plan.question.cluster.device
    price = "; --price 2.5 would say what it costs"
    if length.price is not None:
        whose = f" ({device.price_from})" if device.price_from else ""
        price = f", {money(length.price)} at ${device.price_per_hour:.2f} an hour{whose}"
    return f"{text}; {si(plan.tokens)} tokens: {length.days:,.1f} days, {length.gpu_hours:,.0f} GPU-hours{price}"


def _why_not(other: Answer | str, best: Strategy | None) -> str:
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
    more = [(kind, getattr(found.cost.parts, kind) - getattr(best.cost.parts, kind)) for kind in TIME_KINDS]
    more.sort(key=lambda each: -abs(each[1]))
    parts = [f"{kind} {seconds:+.2g} s" for kind, seconds in more[:3] if abs(seconds) > 5e-3]
    causes = f" ({', '.join(parts)} a step)" if parts else ""
    speed = f"{-ratio:.1%} fewer" if ratio < 0 else f"{ratio:.1%} more"
    text = f"at its best {layout_text(found.parallel)}: {speed} tokens/s than layout 1{causes}"
    return f"{text}, {gib(found.memory.total)} GiB"
