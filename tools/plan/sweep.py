"""`parallel3d-plan sweep`: the same run on clusters of several sizes, and the cheapest that is done in time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB
from parallel3d.tools.arguments import Parser, amount, plan_parser
from parallel3d.tools.plan.options import add_constraints, add_options
from parallel3d.tools.plan.units import tokens

if TYPE_CHECKING:  # --help need not wait for the planner
    from parallel3d.planner.search.question import Question
    from parallel3d.planner.search.sweep import Size

NOTHING_FITS = 3
_MOST_SIZES = 32
_EPILOG = """\
examples:
  parallel3d-plan sweep --model llama3-70b --gpu h100 --gpus 64-1024 --seq-len 8192 --global-batch 1024
  parallel3d-plan sweep --model llama3-8b --gpu a100 --gpus 16,24,32,64 --seq-len 4096 --global-batch 512 \\
      --tokens 1T --max-days 30 --price 1.8

columns: vs stages on each rank, dp s x r data ranks (sharded x replicated), mb microbatch, scaling: tokens/s of a
device, over those on the fewest
exit status: 0 done, 2 a bad input, 3 no size fits, or none is done within --max-days
"""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.max_days is not None and options.tokens is None:
        raise ConfigError(f"--max-days {options.max_days:g}: of how many tokens? add --tokens 1T")
    from dataclasses import replace

    from parallel3d.planner.search.sweep import cheapest, sweep
    from parallel3d.tools.plan.question import note_lines, read_fixed, read_question

    asked = read_question(options, gpus=max(options.gpus), asks="--gpus 64-512")
    question = replace(asked.question, fixed=read_fixed(options))
    sizes = sweep(question, options.gpus, options.tokens)
    fitting = [size for size in sizes if size.strategy is not None]
    chosen = None if options.max_days is None else cheapest(fitting, most_days=options.max_days)
    if options.json:
        print(json.dumps({**_tree(question, options, sizes, chosen), "notes": asked.model.notes}))
    else:
        print("\n".join([*_page(question, options, sizes, chosen), *note_lines(asked)]))
    return 0 if chosen or (fitting and options.max_days is None) else NOTHING_FITS


def _parser() -> Parser:
    parser = plan_parser(
        "sweep",
        takes="--model X --gpu NAME --gpus N,N,... --seq-len N --global-batch N [options]",
        does="The best layout on each of several numbers of devices, and what the larger ones cost.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--gpus", metavar="N,N,...", type=_sizes, required=True, help="numbers of devices, or 64-1024: doublings"
    )
    parser.add_argument("--tokens", metavar="N", type=tokens, help="of the whole run: days and price of each")
    parser.add_argument(
        "--max-days", metavar="D", type=amount("days", zero=False), help="mark the cheapest that is done in so many"
    )
    add_options(parser, gpus=False)
    add_constraints(parser.add_argument_group("the layout"))
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    """Of 16,24,32 or 64-1024."""
    first, dash, last = text.partition("-")
    parts = [first, last] if dash else text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers of devices, such as 16,24,32 or 64-1024")
    numbers = [int(part) for part in parts]
    if dash:
        low, high = numbers
        numbers = [low << power for power in range(_MOST_SIZES) if low << power <= high]
        if not numbers:
            raise argparse.ArgumentTypeError(f"{text!r} must begin with the smaller number, such as 64-1024")
    if len(numbers) > _MOST_SIZES:
        raise argparse.ArgumentTypeError(f"{len(numbers)} sizes: at most {_MOST_SIZES} are tried at once")
    return tuple(numbers)


def _page(question: Question, options: argparse.Namespace, sizes: Sequence[Size], chosen: Size | None) -> Iterator[str]:
    from parallel3d.planner.report.page import header
    from parallel3d.planner.report.text import (
        bar,
        days_column,
        gib,
        layout_columns,
        layout_text,
        links_text,
        money,
        wrapped,
    )

    model, *_ = header(question)
    yield model
    cluster, usable = question.cluster, question.usable_bytes
    yield from wrapped(
        "hardware", f"{cluster.device.name}, nodes of {cluster.gpus_per_node}  links {links_text(cluster)}"
    )
    yield ""
    head = f"   gpus  tp  pp  vs  dp s x r  mb recompute{f'GiB of {usable / GIB:.1f}':>16}      tok/s/gpu  scaling"
    yield head + ("   days  price" if options.tokens is not None else " step s")
    least = next((size.tokens_per_s_per_gpu for size in sizes if size.strategy), 1.0)
    for size in sizes:
        start = f"{'>' if size is chosen else ' '}{size.question.gpus:>6}"
        found = size.strategy
        if found is None:
            first, *more = wrapped("", f"{'':>4}{size.none}")
            yield from (f"{start}{first[len(start) :]}", *more)
            continue
        share, speed = found.memory.total / usable, size.tokens_per_s_per_gpu
        line = f"{start}{layout_columns(found.parallel)}{gib(found.memory.total):>6} {bar(share)}"
        line += f"{speed:>10,.0f}{speed / least:>9.0%}"
        if size.length is None:
            yield f"{line}{found.cost.step_time_s:>7.3g}"
        else:
            yield f"{line}{days_column(size.length.days)}{money(size.length.price):>7}"
    if options.max_days is None:
        return
    yield ""
    if chosen is None or chosen.strategy is None or chosen.length is None:
        yield from wrapped("in time", f"none is done within {options.max_days:g} days")
        return
    told = f"{chosen.question.gpus} devices: {chosen.length.days:.3g} days, {chosen.length.gpu_hours:,.0f} GPU-hours"
    yield from wrapped("in time", f"{told}, the fewest of those done within {options.max_days:g} days")
    yield from wrapped("layout", layout_text(chosen.strategy.parallel))


def _tree(
    question: Question, options: argparse.Namespace, sizes: Sequence[Size], chosen: Size | None
) -> dict[str, Any]:
    from parallel3d.planner.report.json import question_tree, rounded_tree, strategy_tree

    asked = question_tree(question)
    del asked["gpus"]
    return rounded_tree({
        "schema": "parallel3d.sweep/1",
        "input": {**asked, "tokens": options.tokens, "max_days": options.max_days},
        "sizes": [
            {
                "gpus": size.question.gpus,
                "strategy": None if size.strategy is None else strategy_tree(size.question, size.strategy, size.length),
                "none": size.none or None,
            }
            for size in sizes
        ],
        "chosen": None if chosen is None else chosen.question.gpus,
    })  # fmt: skip
