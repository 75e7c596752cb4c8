"""`parallel3d-plan limits`: the smallest cluster that holds a model; the longest sequence, the largest batch and the
largest model that a cluster holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from parallel3d.planner.hardware.units import GIB
from parallel3d.tools.arguments import Parser, plan_parser
from parallel3d.tools.plan.options import add_constraints, add_options
from parallel3d.tools.plan.units import tokens

if TYPE_CHECKING:  # --help need not wait for the planner
    from parallel3d.planner.search.limits import Extent
    from parallel3d.planner.search.question import Question, RunLength, Strategy

WHAT = ("cluster", "sequence", "batch", "model")
NOTHING_FITS = 3
_EPILOG = """\
examples:
  parallel3d-plan limits cluster --model llama3-70b --gpu h100 --seq-len 8192 --global-batch 1024 --tokens 2T
  parallel3d-plan limits sequence --model llama3-8b --gpu h100 --gpus 64 --seq-len 8192 --global-batch 512
  parallel3d-plan limits --model llama3-8b --gpu l4 --gpus 8 --seq-len 2048 --global-batch 64 --fix recompute=none

cluster   the fewest devices that hold the model, with its best layout there (no --gpus needed)
sequence  the longest that fits, to a 16th of the last doubling
batch     the most sequences at once; a larger batch fits as several microbatches
model     the largest of this kind (layers grow with the width), and the largest that has a name
exit status: 0 done, 2 a bad input, 3 something that was asked has no answer
"""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """An answer, in words, with a layout that fits: for a cluster the best one, else any."""

    name: str
    none: str  # what to say where there is none
    extent: Extent | None = None
    told: str = ""
    strategy: Strategy | None = None
    length: RunLength | None = None


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    from parallel3d.planner.search.constraints import check_fixed
    from parallel3d.tools.plan.question import note_lines, read_fixed, read_question

    fixed = read_fixed(options)
    axes = (fixed.pp, fixed.tp, fixed.dp_shard, fixed.dp_replicate)
    # The fewest devices are the answer, and no part of the question.
    needed = prod(axis or 1 for axis in axes) if options.what == "cluster" else None
    asked = read_question(options, gpus=options.gpus or needed)
    question = replace(asked.question, fixed=fixed)
    check_fixed(question)
    limits = [limit for name in WHAT if options.what in ("all", name) for limit in _FINDERS[name](question, options)]
    if options.json:
        print(json.dumps({**_tree(question, options, limits), "notes": asked.model.notes}))
    else:
        print("\n".join([*_page(question, options, limits), *note_lines(asked)]))
    return 0 if all(limit.extent for limit in limits) else NOTHING_FITS


def _parser() -> Parser:
    parser = plan_parser(
        "limits",
        takes="[cluster|sequence|batch|model] --model X --gpu NAME --gpus N --seq-len N --global-batch N [options]",
        does="How far it goes: the smallest cluster, the longest sequence, the largest batch and model.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "what", nargs="?", choices=("all", *WHAT), default="all", metavar="WHAT", help="one of the four (all)"
    )
    parser.add_argument("--tokens", metavar="N", type=tokens, help="of the whole run: days and price on that cluster")
    add_options(parser)
    add_constraints(parser.add_argument_group("the layout"))
    return parser


def _cluster(question: Question, options: argparse.Namespace) -> Iterator[Limit]:
    from parallel3d.planner.search.fastest import fastest
    from parallel3d.planner.search.limits import smallest_cluster
    from parallel3d.planner.search.question import run_length

    limit = Limit(
        name="cluster",
        extent=smallest_cluster(question),
        none="no number of devices holds it: one sequence of a microbatch is not divided far enough",
    )
    if limit.extent is not None:
        q = limit.extent.question
        (best,) = fastest(q, top=1)
        nodes = -(-q.gpus // q.cluster.gpus_per_node)
        told = f"{q.gpus} device{'s' * (q.gpus > 1)} ({nodes} node{'s' * (nodes > 1)}) hold it"
        length = None if options.tokens is None else run_length(q, best, options.tokens)
        limit = replace(limit, strategy=best, told=told, length=length)
    yield limit


def _sequence(question: Question, options: argparse.Namespace) -> Iterator[Limit]:
    from parallel3d.planner.search.limits import longest_sequence

    found = longest_sequence(question)
    none = f"not even short sequences fit on {question.gpus} devices"
    yield _limit("sequence", found, none, _sequence_text)


def _sequence_text(question: Question) -> str:
    shape, length = question.shape, question.seq_len
    ends = shape.positions == "learned" and length == shape.position_rows
    return f"sequences of up to {length:,} tokens" + ends * ", where its table of positions ends"


def _batch(question: Question, options: argparse.Namespace) -> Iterator[Limit]:
    from parallel3d.planner.search.limits import largest_batch

    found = largest_batch(question)
    none = f"not even one sequence of {question.seq_len} tokens on each data rank fits on {question.gpus} devices"
    yield _limit("batch", found, none, lambda q: f"{q.global_batch_size:,} sequences at once; more by accumulation")


def _model(question: Question, options: argparse.Namespace) -> Iterator[Limit]:
    from parallel3d.models import shape_cards
    from parallel3d.planner.model.named import named_shape, shape_names
    from parallel3d.planner.model.shapes import total_parameters
    from parallel3d.planner.report.text import si
    from parallel3d.planner.search.limits import largest_model, largest_named

    def numbers(q: Question) -> str:
        shape = q.shape
        width = f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads, ffn {shape.ffn_hidden}"
        return f"{si(total_parameters(shape))} parameters, {shape.name} ({width})"

    cards = shape_cards()
    shapes = [named_shape(name, cards) for name in shape_names(cards)]
    none = f"none fits on {question.gpus} devices at sequences of {question.seq_len}"
    yield _limit("model", largest_model(question), none, numbers)
    yield _limit("named", largest_named(question, shapes), none, numbers)


def _limit(name: str, found: Extent | None, none: str, told: Callable[[Question], str]) -> Limit:
    if found is None:
        return Limit(name=name, none=none)
    return Limit(name=name, none=none, extent=found, told=told(found.question), strategy=found.strategy)


_FINDERS: dict[str, Callable[[Question, argparse.Namespace], Iterator[Limit]]] = {
    "cluster": _cluster,
    "sequence": _sequence,
    "batch": _batch,
    "model": _model,
}


def _page(question: Question, options: argparse.Namespace, limits: list[Limit]) -> Iterator[str]:
    from parallel3d.planner.report.page import header
    from parallel3d.planner.report.text import bar, gib, layout_text, money, si, wrapped

    lines = list(header(question))
    yield from lines if options.what != "cluster" else (line for line in lines if not line.startswith("hardware"))
    yield ""
    for limit in limits:
        if limit.extent is None or limit.strategy is None:
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
    from parallel3d.planner.report.json import model_tree, question_tree, rounded_tree, strategy_tree

    def tree(limit: Limit) -> dict[str, Any] | None:
        if limit.extent is None or limit.strategy is None:
            return None
        q = limit.extent.question
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
        "none": {limit.name: limit.none for limit in limits if limit.extent is None},
    })  # fmt: skip
