"""`parallel3d-plan sweep`: the same run on clusters of several sizes, and the cheapest that is done in time."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.report.json import question_tree, rounded_tree, strategy_tree
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
from parallel3d.planner.search.question import Question
from parallel3d.planner.search.sweep import ClusterSize, cheapest, sweep
from parallel3d.tools.plan.inputs import read_fixed, read_question
from parallel3d.tools.reply import NOTHING_FITS, Reply


def answer(options: argparse.Namespace) -> Reply:
    """Plans for each size, and chooses the cheapest within --max-days where that is given."""
    if options.max_days is not None and options.tokens is None:
        raise ConfigError(f"--max-days {options.max_days:g}: of how many tokens? add --tokens 1T")
    asked = read_question(options, gpus=max(options.gpus), asks="--gpus 64-512")
    question = replace(asked.question, fixed=read_fixed(options))
    sizes = sweep(question, options.gpus, options.tokens)
    fitting = [size for size in sizes if size.strategy is not None]
    chosen = None if options.max_days is None else cheapest(fitting, most_days=options.max_days)
    return Reply(
        page=lambda: [*_page(question, options, sizes, chosen), *asked.note_lines()],
        tree=lambda: {**_tree(question, options, sizes, chosen), "notes": asked.model.notes},
        status=0 if chosen or (fitting and options.max_days is None) else NOTHING_FITS,
    )


def _page(
    question: Question, options: argparse.Namespace, sizes: Sequence[ClusterSize], chosen: ClusterSize | None
) -> Iterator[str]:
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
    question: Question, options: argparse.Namespace, sizes: Sequence[ClusterSize], chosen: ClusterSize | None
) -> dict[str, Any]:
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
