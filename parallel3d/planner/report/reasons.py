"""Why the best layout is the best, and what breaks first: sentences from a plan's own numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.report.text import gib
from parallel3d.planner.search.question import Strategy


def reasons(best: Strategy) -> Iterator[str]:
    """Why the best layout is the best: the field's rules of thumb, each from this plan's own numbers."""
    question, parallel, parts, step = best.question, best.parallel, best.cost.parts, best.cost.step_time_s
    if parallel.tp == parallel.pp == 1:
        yield f"data parallel alone: the model fits at {gib(best.memory.total)} GiB a device without tp or pp"
    if parallel.tp > 1:
        where = "within a node" if parallel.tp <= question.cluster.gpus_per_node else "across nodes"
        yield f"tp {parallel.tp} {where}: its traffic takes {parts.tp / step:.0%} of the step"
    if parallel.pp > 1:
        bubble, transfers = parts.pp_bubble / step, parts.pp_p2p / step
        yield f"pp {parallel.pp}: its bubble takes {bubble:.0%} of the step and its transfers {transfers:.0%}"
    if parallel.dp > 1:
        yield f"data parallel over {parallel.dp}: {parts.dp / step:.0%} of the step is traffic that nothing hides"
    if parallel.recompute != "none":
        without = replace(best, parallel=replace(parallel, recompute="none")).memory.total - question.usable_bytes
        why = f"without it {without / GIB:.1f} GiB are missing" if without > 0 else "it would fit without, and faster"
        yield f"recompute {parallel.recompute}: {parts.recompute / step:.0%} of the step; {why}"


def limits(best: Strategy) -> Iterator[str]:
    """What breaks first: how much memory is left, and what twice as long or as many sequences would need."""
    question = best.question
    left = question.usable_bytes - best.memory.total
    yield f"{left / GIB:.1f} GiB are left under --mem-fraction {question.memory_fraction:g}"
    longer = Strategy(replace(question, seq_len=2 * question.seq_len), best.parallel).memory.total
    yield f"sequences of {2 * question.seq_len} {_fits(longer - question.usable_bytes)}"
    twice = replace(best.parallel, microbatch_size=2 * best.parallel.microbatch_size)
    if question.global_batch_size % (twice.dp * twice.microbatch_size) == 0:
        more = Strategy(question, twice).memory.total
        yield f"microbatches of {twice.microbatch_size} {_fits(more - question.usable_bytes)}"


def _fits(short: float) -> str:
    return f"need {short / GIB:.1f} GiB more" if short > 0 else "fit too"
