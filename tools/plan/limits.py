"""`parallel3d-plan limits`: the smallest cluster that holds a model; the longest sequence, the
largest batch and the largest model that a cluster holds. `parallel3d-plan sweep`: the same run on
clusters of several sizes, and the cheapest that is done in time."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import ModelShape
from parallel3d.planner.model.spread import spread_of
from parallel3d.planner.report.json import model_tree, question_tree, strategy_tree
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
from parallel3d.planner.search.limits import (
    largest_batch,
    largest_model,
    largest_named,
    longest_sequence,
    smallest_cluster,
)
from parallel3d.planner.search.question import Question, RunLength, Strategy
from parallel3d.planner.search.space import check_fixed
from parallel3d.tools.cli_output import NOTHING_FITS, Reply
from parallel3d.tools.plan.inputs import ParsedQuestion, read_fixed, read_question
from parallel3d.tools.plan.models import all_named
from parallel3d.tools.plan.score import recorded_accuracy

# The limits that are found for a word of the command line, where that is more than the one of its
# name.
_NAMES = {"all": ("cluster", "sequence", "batch", "model", "named"), "model": ("model", "named")}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One of the limits: what is told of it, and a layout that fits the question at its limit, the
    best one for a cluster; or the reason why there is no such question."""

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
    limits = [
        _limit(name, asked.question, options.tokens)
        for name in _NAMES.get(options.what, (options.what,))
    ]
    return Reply(
        page=lambda: _page(asked, options, limits),
        tree=lambda: _tree(asked, options, limits),
        status=0 if all(limit.strategy for limit in limits) else NOTHING_FITS,
    )


def _limit(name: str, question: Question, run_tokens: float | None) -> Limit:
    none = f"nothing fits on {question.gpus} devices"
    if name == "cluster":
        found = smallest_cluster(question)
        none = "no number of devices holds one sequence"
    elif name == "sequence":
        found = longest_sequence(question)
    elif name == "batch":
        found = largest_batch(question)
    elif name == "model":
        found = largest_model(question)
    else:
        found = largest_named(question, _planned_shapes(question))
    if found is None:
        return Limit(name=name, told=none)
    q = found.question
    shape = found.question.shape
    length = None
    if name == "cluster":
        (found,) = fastest(q, top=1)
        told = f"devices that hold it: {q.gpus}"
        length = None if run_tokens is None else found.length(run_tokens)
    elif name == "sequence":
        told = f"sequences of up to {q.seq_len:,} tokens"
    elif name == "batch":
        told = f"{q.global_batch_size:,} sequences at once; more by accumulation"
    else:
        width = f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads"
        told = f"{si(total_parameters(shape))} parameters, {shape.name} ({width})"
    return Limit(name=name, told=told, strategy=found, length=length)


def _planned_shapes(question: Question) -> list[ModelShape]:
    """Returns the named models that the program can train; mixtures are of those that have their
    axis."""
    return [
        shape for shape in all_named() if shape.experts is None or "ep" in question.program.axes
    ]


def _page(asked: ParsedQuestion, options: argparse.Namespace, limits: list[Limit]) -> Iterator[str]:
    question = asked.question
    yield from header(question, has_size=options.what != "cluster")
    yield ""
    for limit in limits:
        yield from wrapped(limit.name, limit.told)
        if limit.strategy is None:
            continue
        total = limit.strategy.memory.total
        cost = limit.strategy.cost
        share = total / question.usable_bytes
        held = f"{gib(total)} GiB of {question.usable_bytes / GIB:.1f} {bar(share)} {share:.0%}"
        yield from wrapped("", f"{held}  {layout_text(limit.strategy.parallel)}")
        kind = "the best layout" if limit.name == "cluster" else "a layout that fits"
        speed = f"{kind}: {_speed_text(limit.strategy)}, MFU {cost.mfu:.1%}"
        if limit.length is not None:
            price = "" if limit.length.price is None else f", {money(limit.length.price)}"
            speed += f"; {si(options.tokens)} tokens: {limit.length.days:,.1f} days{price}"
        yield from wrapped("", speed)
    yield from asked.note_lines()
    yield from wrapped("how sure", how_sure(recorded_accuracy(), question))


def _speed_text(found: Strategy) -> str:
    speed = found.cost.tokens_per_s_per_gpu
    around = spread_of(found.run, recorded_accuracy()).around("throughput", speed)
    low = three_digits(around.low)
    high = three_digits(around.high)
    return f"{three_digits(speed)} tokens/s a device ({low} to {high}, 8 in 10)"


def _tree(asked: ParsedQuestion, options: argparse.Namespace, limits: list[Limit]) -> object:
    said = question_tree(asked.question)
    found = {}
    none = {}
    if options.what == "cluster":
        del said["gpus"]
    for limit in limits:
        found[limit.name] = None if limit.strategy is None else _limit_tree(limit, limit.strategy)
        if limit.strategy is None:
            none[limit.name] = limit.told
    tree = {
        "schema": "parallel3d.limits/1",
        "input": {**said, "tokens": options.tokens},
        "limits": found,
        "none": none,
        "notes": asked.model.notes,
    }
    return rounded(tree)


def _limit_tree(limit: Limit, strategy: Strategy) -> dict[str, object]:
    q = strategy.question
    spread = spread_of(strategy.run, recorded_accuracy())
    return {
        "gpus": q.gpus,
        "seq_len": q.seq_len,
        "global_batch_size": q.global_batch_size,
        "model": model_tree(q.shape),
        "strategy": strategy_tree(strategy, limit.length, spread),
        "told": limit.told,
    }


def sweep_answer(options: argparse.Namespace) -> Reply:
    """Plans for each size, and chooses the cheapest within --max-days where that is given."""
    if options.max_days is not None and options.tokens is None:
        raise ConfigError(f"--max-days {options.max_days:g}: of how many tokens? add --tokens 1T")
    asked = read_question(
        options, gpus=max(options.gpus), fixed=read_fixed(options), asks="--gpus 64-512"
    )
    found = sweep(asked.question, options.gpus)
    chosen = None
    fitting = [*_strategies(found)]
    if options.max_days is not None:
        fitting = [best for best in fitting if best.length(options.tokens).days <= options.max_days]
        chosen = min(fitting, key=lambda best: best.length(options.tokens).gpu_hours, default=None)
    return Reply(
        page=lambda: [*_sizes_page(asked.question, options, found, chosen), *asked.note_lines()],
        tree=lambda: _sizes_tree(asked, options, found, chosen),
        status=0 if fitting else NOTHING_FITS,
    )


def _sizes_page(
    question: Question,
    options: argparse.Namespace,
    sizes: dict[int, Strategy | str],
    chosen: Strategy | None,
) -> Iterator[str]:
    usable = question.usable_bytes
    fitting = [*_strategies(sizes)]
    yield from header(question, has_size=False)
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
        told = f"{chosen.question.gpus} devices: {length.days:.3g} days"
        hours = f"{length.gpu_hours:,.0f} GPU-hours, the fewest within {options.max_days:g} days"
        yield from wrapped("in time", f"{told}, {hours}; {_speed_text(chosen)}")
        yield from wrapped("layout", layout_text(chosen.parallel))
    yield from wrapped("how sure", how_sure(recorded_accuracy(), question))


def _strategies(sizes: dict[int, Strategy | str]) -> Iterator[Strategy]:
    yield from (found for found in sizes.values() if isinstance(found, Strategy))


def _sizes_tree(
    asked: ParsedQuestion,
    options: argparse.Namespace,
    sizes: dict[int, Strategy | str],
    chosen: Strategy | None,
) -> object:
    said = question_tree(asked.question)
    rows = []
    tokens = options.tokens
    del said["gpus"]
    for gpus, found in sizes.items():
        row: dict[str, object] = {"gpus": gpus, "strategy": None, "none": None}
        if isinstance(found, str):
            row["none"] = found
        else:
            length = None if tokens is None else found.length(tokens)
            spread = spread_of(found.run, recorded_accuracy())
            row["strategy"] = strategy_tree(found, length, spread)
        rows.append(row)
    tree = {
        "schema": "parallel3d.sweep/1",
        "input": {**said, "tokens": tokens, "max_days": options.max_days},
        "sizes": rows,
        "chosen": chosen and chosen.question.gpus,
        "notes": asked.model.notes,
    }
    return rounded(tree)
