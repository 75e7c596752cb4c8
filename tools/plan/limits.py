"""`parallel3d-plan limits`: the smallest cluster that holds a model; the longest sequence, the largest batch and the
largest model that a cluster holds."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.report.json import model_tree, question_tree, rounded_tree, strategy_tree
from parallel3d.planner.report.page import header
from parallel3d.planner.report.text import bar, gib, layout_text, money, si, wrapped
from parallel3d.planner.search.fastest import fastest
from parallel3d.planner.search.limits import (
    Extent,
    largest_batch,
    largest_model,
    largest_named,
    longest_sequence,
    smallest_cluster,
)
from parallel3d.planner.search.question import Question, RunLength, Strategy, run_length
from parallel3d.tools.plan.inputs import read_fixed, read_question, with_fixed
from parallel3d.tools.plan.models import all_named
from parallel3d.tools.plan.options import LIMITS
from parallel3d.tools.reply import NOTHING_FITS, Reply


@dataclass(frozen=True, kw_only=True)
class Limit:
    """One of the limits, in words: the question at its limit with a layout that fits, the best one for a cluster, or
    what to say where there is no such question."""

    name: str
    none: str
    at: Question | None = None
    told: str = ""
    strategy: Strategy | None = None
    length: RunLength | None = None  # the whole run, for a cluster and a known number of tokens


def answer(options: argparse.Namespace) -> Reply:
    """Finds the limit that was asked for, or all of them."""
    fixed = read_fixed(options)
    axes = (fixed.pp, fixed.tp, fixed.dp_shard, fixed.dp_replicate)
    # The fewest devices are the answer of `cluster`, and no part of the question.
    needed = prod(axis or 1 for axis in axes) if options.what == "cluster" else None
    asked = read_question(options, gpus=options.gpus or needed)
    question = with_fixed(asked.question, fixed)
    finders: dict[str, Callable[[], list[Limit]]] = {
        "cluster": lambda: [_cluster(question, options.tokens)],
        "sequence": lambda: [_sequence(question)],
        "batch": lambda: [_batch(question)],
        "model": lambda: _models(question),
    }
    limits = [limit for name in LIMITS if options.what in ("all", name) for limit in finders[name]()]
    return Reply(
        page=lambda: [*_page(question, options, limits), *asked.note_lines()],
        tree=lambda: {**_tree(question, options, limits), "notes": asked.model.notes},
        status=0 if all(limit.at for limit in limits) else NOTHING_FITS,
    )


def _cluster(question: Question, run_tokens: float | None) -> Limit:
    found = smallest_cluster(question)
    if found is None:
        none = "no number of devices holds it: one sequence of a microbatch is not divided far enough"
        return Limit(name="cluster", none=none)
    q = found.question
    (best,) = fastest(q, top=1)
    nodes = -(-q.gpus // q.cluster.gpus_per_node)
    told = f"{q.gpus} device{'s' * (q.gpus > 1)} ({nodes} node{'s' * (nodes > 1)}) hold it"
    length = None if run_tokens is None else run_length(q, best, run_tokens)
    return Limit(name="cluster", none="", at=q, told=told, strategy=best, length=length)


def _sequence(question: Question) -> Limit:
    def told(q: Question) -> str:
        ends = q.shape.positions == "learned" and q.seq_len == q.shape.position_rows
        return f"sequences of up to {q.seq_len:,} tokens" + ends * ", where its table of positions ends"

    none = f"not even short sequences fit on {question.gpus} devices"
    return _limit("sequence", longest_sequence(question), none, told)


def _batch(question: Question) -> Limit:
    none = f"not even one sequence of {question.seq_len} tokens on each data rank fits on {question.gpus} devices"
    found = largest_batch(question)
    return _limit("batch", found, none, lambda q: f"{q.global_batch_size:,} sequences at once; more by accumulation")


def _models(question: Question) -> list[Limit]:
    def told(q: Question) -> str:
        shape = q.shape
        width = f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, ffn {shape.ffn_hidden}"
        return f"{si(total_parameters(shape))} parameters, {shape.name} ({width})"

    none = f"none fits on {question.gpus} devices at sequences of {question.seq_len}"
    found = {"model": largest_model(question), "named": largest_named(question, all_named())}
    return [_limit(name, extent, none, told) for name, extent in found.items()]


def _limit(name: str, found: Extent | None, none: str, told: Callable[[Question], str]) -> Limit:
    if found is None:
        return Limit(name=name, none=none)
    return Limit(name=name, none=none, at=found.question, told=told(found.question), strategy=found.strategy)


def _page(question: Question, options: argparse.Namespace, limits: list[Limit]) -> Iterator[str]:
    lines = list(header(question))
    yield from lines if options.what != "cluster" else (line for line in lines if not line.startswith("hardware"))
    yield ""
    for limit in limits:
        if limit.strategy is None:
            yield from wrapped(limit.name, limit.none)
            continue
        found = limit.strategy
        share = found.memory.total / question.usable_bytes
        yield from wrapped(limit.name, limit.told)
        held = f"{gib(found.memory.total)} GiB of {question.usable_bytes / GIB:.1f} {bar(share)} {share:.0%}"
        yield from wrapped("", f"{held}  {layout_text(found.parallel)}")
        kind = "the best layout" if limit.name == "cluster" else "a layout that fits"
        speed = f"{kind}: {found.cost.tokens_per_s_per_gpu:,.0f} tokens/s a device, MFU {found.cost.mfu:.1%}"
        if limit.length is not None:
            price = f", {money(limit.length.price)}" if limit.length.price is not None else ""
            speed += f"; {si(options.tokens)} tokens: {limit.length.days:,.1f} days{price}"
        yield from wrapped("", speed)


def _tree(question: Question, options: argparse.Namespace, limits: list[Limit]) -> dict[str, Any]:
    def tree(limit: Limit) -> dict[str, Any] | None:
        q = limit.at
        if q is None or limit.strategy is None:
            return None
        numbers = {"gpus": q.gpus, "seq_len": q.seq_len, "global_batch_size": q.global_batch_size}
        found = strategy_tree(q, limit.strategy, limit.length)
        return {**numbers, "model": model_tree(q.shape), "strategy": found, "told": limit.told}

    asked = question_tree(question)
    if options.what == "cluster":
        del asked["gpus"]
    return rounded_tree({
        "schema": "parallel3d.limits/1",
        "input": {**asked, "tokens": options.tokens},
        "limits": {limit.name: tree(limit) for limit in limits},
        "none": {limit.name: limit.none for limit in limits if limit.at is None},
    })  # fmt: skip
