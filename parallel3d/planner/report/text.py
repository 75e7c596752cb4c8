"""Texts of a plan's figures: bars, layouts, memory by kind, time by cause, amounts, lines of a
report."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.hardware.cluster import Cluster, Scales
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.planned_run import FrameworkLayout, other_axes
from parallel3d.planner.time.block import TimeParts

WIDTH = 80
MEMORY_KINDS = tuple(f.name for f in fields(RankMemory) if f.name not in ("rank", "moment"))
TIME_KINDS = tuple(f.name for f in fields(TimeParts))
_BAR = 8  # characters


def bar(share: float) -> str:
    """Draws how full a device is: [########--]."""
    full = min(_BAR, round(share * _BAR))
    return f"[{'#' * full}{'-' * (_BAR - full)}]"


def layout_text(parallel: ParallelConfig) -> str:
    """A layout as overrides of a recipe would say it, without what is at its default."""
    plain = asdict(FrameworkLayout())
    said = []
    for key, value in asdict(parallel).items():
        if value != plain[key]:
            said.append(f"{key}={'true' if value is True else value}")
    return " ".join(said) or "one device, nothing parallel"


def shown_axes(layouts: Iterable[ParallelConfig]) -> tuple[str, ...]:
    """Returns which axes of other frameworks any of these layouts uses."""
    sizes = [other_axes(parallel) for parallel in layouts]
    most = [max(of_axis) for of_axis in zip(*sizes, strict=True)]
    return tuple(axis for axis, size in zip(("cp", "ep"), most, strict=False) if size > 1)


def layout_columns(parallel: ParallelConfig, axes: Sequence[str]) -> str:
    """Writes a layout in columns: tp, pp, stages a rank, other `axes`, data ranks (sharded x
    replicated), microbatch, recompute."""
    cp, ep = other_axes(parallel)
    sizes = {"cp": cp, "ep": ep}
    more = "".join(f"{sizes[axis]:>4}" for axis in axes)
    data = f"{parallel.dp_shard} x {parallel.dp_replicate}"
    recompute: str = parallel.recompute
    if parallel.recompute_every:
        recompute = f"every {parallel.recompute_every}"
    return (
        f"{parallel.tp:>4}{parallel.pp:>4}{parallel.virtual_stages:>4}{more} "
        f"{data:>9}{parallel.microbatch_size:>4} {recompute:<9}"
    )


def layout_head(axes: Sequence[str]) -> str:
    """Returns the heads of those columns."""
    return f"  tp  pp  vs{''.join(f'  {axis}' for axis in axes)}  dp s x r  mb recompute"


def telling_ranks(ranks: Sequence[RankMemory], most: int) -> list[RankMemory]:
    """Returns all pipeline ranks, or if there are more than `most` those that may differ: the first
    and the last ones, the middle, the one with the highest peak."""
    if len(ranks) <= most:
        return [*ranks]
    last = len(ranks) - 1
    worst = max(ranks, key=lambda memory: memory.total)
    return [ranks[rank] for rank in sorted({0, 1, last // 2, last - 1, last, worst.rank})]


def memory_text(memory: RankMemory) -> str:
    total = memory.total
    kinds = _largest_first(memory, MEMORY_KINDS, 0.05 * total)
    return ", ".join(f"{kind} {gib(getattr(memory, kind), of=total)}" for kind in kinds)


def time_text(parts: TimeParts) -> str:
    kinds = _largest_first(parts, TIME_KINDS, 0.02 * parts.total)
    return ", ".join(f"{kind} {getattr(parts, kind) / parts.total:.1%}" for kind in kinds)


def _largest_first(figures: object, kinds: Sequence[str], least: float) -> list[str]:
    shown = [kind for kind in kinds if getattr(figures, kind) >= least]
    return sorted(shown, key=lambda kind: getattr(figures, kind), reverse=True)


def gib(bytes_: float, *, of: float | None = None) -> str:
    """74.7, and two digits of what is less than one (or a part of it), as of a small model on a
    CPU."""
    if (of or bytes_) >= GIB:
        return f"{bytes_ / GIB:.1f}"
    return f"{bytes_ / GIB:.2g}"


def si(number: float) -> str:
    """8.03B: three digits and a letter."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:
            scaled = float(f"{number / limit:.3g}")
            return f"{scaled:g}{letter}"
    return f"{number:.3g}"


def scales_text(scales: Scales) -> str:
    """Returns what measured runs correct, and by how much; empty if nothing was measured."""
    said = []
    if scales.timed:
        slower = (
            f"arithmetic takes {scales.arithmetic:.2f}, links in a node {scales.node:.2f} and the "
            f"network {scales.network:.2f}"
        )
        said.append(f"{slower} times as long as predicted")
    if scales.weighed:
        said.append(f"memory beside states is {scales.memory:.2f} times what is counted")
    return ", ".join(said)


def links_text(cluster: Cluster) -> str:
    """Returns the bandwidth of a device's links of both kinds."""
    node = f"{cluster.node.bandwidth / 1e9:g} GB/s in nodes of {cluster.gpus_per_node}"
    return f"{node}, {cluster.network.bandwidth / 1e9:g} GB/s between them"


def days_column(days: float) -> str:
    if days < 1000:
        return f"{days:>7.3g}"
    return f"{days:>7,.0f}"


def money(dollars: float | None) -> str:
    if dollars is None:
        return "-"
    return f"${si(dollars)}"


def wrapped(name: str, text: str, end: str = "") -> list[str]:
    """Returns lines of the report, the name in the margin of the first. All lines but the last end
    with `end`: a backslash in a command."""
    lines = textwrap.wrap(
        text,
        WIDTH - len(end),
        initial_indent=f"{name:<10}",
        subsequent_indent=" " * 10,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line + end for line in lines[:-1]] + lines[-1:]
