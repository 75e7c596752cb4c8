"""`parallel3d-plan limits`: the smallest cluster that holds a model; the longest sequence, the largest batch and the
largest model that a cluster holds. `parallel3d-plan sweep`: the same run on clusters of several sizes, and the cheapest
that is done in time."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, prod

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.model.spread import spread_of
from parallel3d.planner.report.json import model_tree, question_tree, strategy_tree
from parallel3d.planner.report.page import header, header_of_sizes, how_sure, three_digits
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
from parallel3d.planner.search.limits import (
    largest_batch,
    largest_model,
    largest_named,
    longest_sequence,
    smallest_cluster,
)
from parallel3d.planner.search.question import Question, RunLength, Strategy
from parallel3d.planner.search.space import check_fixed
from parallel3d.tools.plan.inputs import ParsedQuestion, read_fixed, read_question
from parallel3d.tools.plan.models import all_named
from parallel3d.tools.plan.score import recorded_accuracy
from parallel3d.tools.reply import NOTHING_FITS, Reply

# The limits that are found for a word of the command line, where that is more than the one of its name.
_NAMES = {"all": ("cluster", "sequence", "batch", "model", "named"), "model": ("model", "named")}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One of the limits: what is told of it, and a layout that fits the question at its limit, the best one for a
    cluster; or the reason why there is no such question."""

    name: str
    told: str
    strategy: Strategy | None = None
    length: RunLength | None = None  # the whole run, for a cluster and a known number of tokens


def answer(options: argparse.Namespace) -> Reply:
    """Finds the limit that was asked for, or all of them."""
    fixed = read_fixed(options)
    axes = (fixed.pp, fixed.tp, fixed.dp_shard, fixed.dp_replicate)
    # The fewest devices are the answer of `cluster`, and no part of the question.
    needed = prod(axis or 1 for axis in axes) if options.what == "cluster" else None
    asked = read_question(options, gpus=options.gpus or needed, fixed=fixed)
    check_fixed(asked.question)
    limits = [_limit(name, asked.question, options.tokens) for name in _NAMES.get(options.what, (options.what,))]
    return Reply(
        page=lambda: _page(asked, options, limits),
        tree=lambda: _tree(asked, options, limits),
        status=0 if all(limit.strategy for limit in limits) else NOTHING_FITS,
    )


def _limit(name: str, question: Question, run_tokens: float | None) -> Limit:
    on = f"on {question.gpus} devices"
    if name == "cluster":
        found = smallest_cluster(question)
        none = "no number of devices holds it: one sequence of a microbatch is not divided far enough"
    elif name == "sequence":
        found, none = longest_sequence(question), f"not even short sequences fit {on}"
    elif name == "batch":
        found = largest_batch(question)
        none = f"not even one sequence of {question.seq_len} tokens on each data rank fits {on}"
    else:
        found = largest_model(question) if name == "model" else largest_named(question, _planned_shapes(question))
        none = f"none fits {on} at sequences of {question.seq_len}"
        if name == "model" and question.shape.experts is not None:
            none = "not told of a mixture, whose experts may grow in number or in size"
    if found is None:
        return Limit(name=name, told=none)
    q, shape = found.question, found.question.shape
    if name == "cluster":
        nodes = -(-q.gpus // q.cluster.gpus_per_node)
        (best,) = fastest(q, top=1)
        told = f"{q.gpus} device{'s' * (q.gpus > 1)} ({nodes} node{'s' * (nodes > 1)}) hold it"
        length = None if run_tokens is None else best.length(run_tokens)
        return Limit(name=name, told=told, strategy=best, length=length)
    if name == "sequence":
        ends = shape.positions == "learned" and q.seq_len == shape.position_rows
        told = f"sequences of up to {q.seq_len:,} tokens" + ends * ", where its table of positions ends"
    elif name == "batch":
        told = f"{q.global_batch_size:,} sequences at once; more by accumulation"
    else:
        width = f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, ffn {shape.ffn_hidden}"
        told = f"{si(total_parameters(shape))} parameters, {shape.name} ({width})"
    return Limit(name=name, told=told, strategy=found)


def _planned_shapes(question: Question) -> list[ModelShape]:
    """Returns the named models that the program can train; mixtures are of those that have their axis."""
    return [shape for shape in all_named() if shape.experts is None or "ep" in question.program.axes]


def _page(asked: ParsedQuestion, options: argparse.Namespace, limits: list[Limit]) -> Iterator[str]:
    question = asked.question
    yield from header_of_sizes(question) if options.what == "cluster" else header(question)
    yield ""
    for limit in limits:
        yield from wrapped(limit.name, limit.told)
        if limit.strategy is None:
            continue
        total, cost = limit.strategy.memory.total, limit.strategy.cost
        share = total / question.usable_bytes
        held = f"{gib(total)} GiB of {question.usable_bytes / GIB:.1f} {bar(share)} {share:.0%}"
        yield from wrapped("", f"{held}  {layout_text(limit.strategy.parallel)}")
        kind = "the best layout" if limit.name == "cluster" else "a layout that fits"
        around = spread_of(limit.strategy.run, recorded_accuracy()).around("throughput", cost.tokens_per_s_per_gpu)
        range_text = f"{three_digits(around.low)} to {three_digits(around.high)}, 8 in 10"
        speed = (
            f"{kind}: {three_digits(cost.tokens_per_s_per_gpu)} tokens/s a device ({range_text}), MFU {cost.mfu:.1%}"
        )
        if limit.length is not None:
            price = f", {money(limit.length.price)}" if limit.length.price is not None else ""
            speed += f"; {si(options.tokens)} tokens: {limit.length.days:,.1f} days{price}"
        yield from wrapped("", speed)
    yield from asked.note_lines()
    yield from wrapped("how sure", how_sure(recorded_accuracy(), question))


def _tree(asked: ParsedQuestion, options: argparse.Namespace, limits: list[Limit]) -> object:
    said = question_tree(asked.question)
    if options.what == "cluster":
        del said["gpus"]
    found = {
        limit.name: {
            **{key: getattr(limit.strategy.question, key) for key in ("gpus", "seq_len", "global_batch_size")},
            "model": model_tree(limit.strategy.question.shape),
            "strategy": strategy_tree(limit.strategy, limit.length, spread_of(limit.strategy.run, recorded_accuracy())),
            "told": limit.told,
        }
        for limit in limits
        if limit.strategy is not None
    }
    return rounded({
        "schema": "parallel3d.limits/1",
        "input": {**said, "tokens": options.tokens},
        "limits": {limit.name: found.get(limit.name) for limit in limits},
        "none": {limit.name: limit.told for limit in limits if limit.strategy is None},
        "notes": asked.model.notes,
    })  # fmt: skip


def sweep_answer(options: argparse.Namespace) -> Reply:
    """Plans for each size, and chooses the cheapest within --max-days where that is given."""
    if options.max_days is not None and options.tokens is None:
        raise ConfigError(f"--max-days {options.max_days:g}: of how many tokens? add --tokens 1T")
    asked = read_question(options, gpus=max(options.gpus), fixed=read_fixed(options), asks="--gpus 64-512")
    found, chosen = sweep(asked.question, options.gpus), None
    fitting = [best for best in found.values() if isinstance(best, Strategy)]
    if options.max_days is not None:
        fitting = [best for best in fitting if best.length(options.tokens).days <= options.max_days]
        chosen = min(fitting, key=lambda best: best.length(options.tokens).gpu_hours, default=None)
    return Reply(
        page=lambda: [*_sizes_page(asked.question, options, found, chosen), *asked.note_lines()],
        tree=lambda: _sizes_tree(asked, options, found, chosen),
        status=0 if fitting else NOTHING_FITS,
    )


def _sizes_page(
    question: Question, options: argparse.Namespace, sizes: dict[int, Strategy | str], chosen: Strategy | None
) -> Iterator[str]:
    cluster, usable = question.cluster, question.usable_bytes
    yield from header_of_sizes(question)
    if options.tokens is not None and (hourly := cluster.device.price_per_hour) is not None:
        whose = f" ({cluster.device.price_from})" if cluster.device.price_from else ""
        yield from wrapped("price", f"${hourly:.2f} an hour of a device{whose}")
    yield ""
    axes = shown_axes([each.parallel for each in sizes.values() if isinstance(each, Strategy)])
    head = f"   gpus{layout_head(axes)}{f'GiB of {usable / GIB:.1f}':>16}      tok/s/gpu  scaling"
    yield head + ("   days  price" if options.tokens is not None else " step s")
    least = next((each.cost.tokens_per_s_per_gpu for each in sizes.values() if isinstance(each, Strategy)), 1.0)
    for gpus, found in sizes.items():
        start = f"{'>' if found is chosen else ' '}{gpus:>6}"
        if isinstance(found, str):
            first, *more = wrapped("", f"{'':>4}{found}")
            yield from (f"{start}{first[len(start) :]}", *more)
            continue
        share, speed = found.memory.total / usable, found.cost.tokens_per_s_per_gpu
        line = f"{start}{layout_columns(found.parallel, axes)}{gib(found.memory.total):>6} {bar(share)}"
        line += f"{speed:>10,.0f}{speed / least:>9.0%}"
        if options.tokens is None:
            yield f"{line}{found.cost.step_time_s:>7.3g}"
        else:
            length = found.length(options.tokens)
            yield f"{line}{days_column(length.days)}{money(length.price):>7}"
    yield ""
    recorded = recorded_accuracy()
    if options.max_days is not None and chosen is None:
        yield from wrapped("in time", f"none is done within {options.max_days:g} days")
    if chosen is not None:
        length = chosen.length(options.tokens)
        around = spread_of(chosen.run, recorded).around("throughput", length.days)
        days = f"{length.days:.3g} days ({three_digits(around.low)} to {three_digits(around.high)}, 8 in 10)"
        told = f"{chosen.question.gpus} devices: {days}, {length.gpu_hours:,.0f} GPU-hours"
        yield from wrapped("in time", f"{told}, the fewest of those done within {options.max_days:g} days")
        yield from wrapped("layout", layout_text(chosen.parallel))
    found_sizes = [each for each in sizes.values() if isinstance(each, Strategy)]
    if found_sizes:
        widths = sorted({f"{exp(spread_of(each.run, recorded).throughput):.2f}" for each in found_sizes})
        told = "tok/s/gpu, days and price" if options.tokens is not None else "tok/s/gpu and step s"
        factors = f"a factor of {widths[0]}" + (len(widths) > 1) * f" to {widths[-1]}"
        yield from wrapped("range", f"{told} lie within {factors} of what each row says, 8 in 10")
    yield from wrapped("how sure", how_sure(recorded, question))


def _sizes_tree(
    asked: ParsedQuestion, options: argparse.Namespace, sizes: dict[int, Strategy | str], chosen: Strategy | None
) -> object:
    said = question_tree(asked.question)
    del said["gpus"]
    tokens = options.tokens

    def tree(found: Strategy) -> dict[str, object]:
        length = None if tokens is None else found.length(tokens)
        return strategy_tree(found, length, spread_of(found.run, recorded_accuracy()))

    return rounded({
        "schema": "parallel3d.sweep/1",
        "input": {**said, "tokens": tokens, "max_days": options.max_days},
        "sizes": [
            {"gpus": gpus, "strategy": None, "none": found}
            if isinstance(found, str)
            else {"gpus": gpus, "strategy": tree(found), "none": None}
            for gpus, found in sizes.items()
        ],
        "chosen": chosen and chosen.question.gpus,
        "notes": asked.model.notes,
    })  # fmt: skip
