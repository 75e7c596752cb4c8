"""What a person asks after the ranking: how many days and how much money, what would fit where nothing does, and in
words why the best layout is the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel3d.planner.report.text import gib
from parallel3d.planner.search.candidate import strategy
from parallel3d.planner.search.fastest import one_that_fits
from parallel3d.planner.search.limits import smallest_cluster
from parallel3d.planner.search.question import Answer, Question, Strategy

_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """How long a token budget takes, and what it costs where the hardware file has a price."""

    days: float
    gpu_hours: float
    price: float | None


def run_length(question: Question, strategy: Strategy, tokens: float) -> RunLength:
    seconds = tokens / (strategy.cost.tokens_per_s_per_gpu * question.gpus)
    gpu_hours = seconds / 3600 * question.gpus
    hourly = question.cluster.device.price_per_hour
    price = None if hourly is None else gpu_hours * hourly
    return RunLength(days=seconds / _SECONDS_PER_DAY, gpu_hours=gpu_hours, price=price)


def remedies(question: Question) -> Iterator[str]:
    """Where nothing fits: what would, in words, each tried and not guessed."""
    found = smallest_cluster(question)
    if found is not None and found.question.gpus > question.gpus:
        yield f"{found.question.gpus} devices instead of {question.gpus}"
    length = question.seq_len // 2
    while length >= 512:
        if one_that_fits(replace(question, seq_len=length)) is not None:
            yield f"sequences of {length} tokens instead of {question.seq_len}"
            break
        length //= 2
    free = replace(question, fixed=type(question.fixed)())
    if free != question and one_that_fits(free) is not None:
        yield "leaving free what is fixed"


def reasons(question: Question, answer: Answer) -> Iterator[str]:
    """Why the best layout is the best: the field's rules of thumb, each from this plan's own numbers."""
    if not answer.strategies:
        return
    best = answer.strategies[0]
    parallel, parts, step = best.parallel, best.cost.parts, best.cost.step_time_s
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
        without = strategy(question, replace(parallel, recompute="none")).memory.total - question.usable_bytes
        why = f"without it {without / 2**30:.1f} GiB are missing" if without > 0 else "it would fit without, and faster"
        yield f"recompute {parallel.recompute}: {parts.recompute / step:.0%} of the step; {why}"
