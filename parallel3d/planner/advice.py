"""What a person asks after the ranking: how small a cluster would do, how far a sequence may grow, how many
days and how much money, and in words why the best layout is the best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parallel3d.errors import ConfigError
from parallel3d.planner.priced import strategy
from parallel3d.planner.question import Answer, Question, Strategy
from parallel3d.planner.search import fastest

_MOST_DOUBLINGS = 16
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


def smallest_cluster(question: Question) -> tuple[int, Strategy] | None:
    """The fewest devices that hold the model, and their best strategy: parts of a node, then whole nodes that divide
    the batch. None where no number of them does (up to the batch's own)."""
    node = question.cluster.gpus_per_node
    most = question.global_batch_size * node * 16
    sizes = [*(n for n in range(1, node) if node % n == 0), *_whole_nodes(node, most)]
    for gpus in sizes:
        best = _best(replace(question, gpus=gpus))
        if best is not None:
            return gpus, best
    return None


def largest_sequence(question: Question) -> int:
    """The longest sequence, by doublings of the question's, that still fits; 0 where not even the question's does."""
    length = 0
    for doublings in range(_MOST_DOUBLINGS):
        longer = question.seq_len * 2**doublings
        if _best(replace(question, seq_len=longer)) is None:
            break
        length = longer
    return length


def remedies(question: Question) -> Iterator[str]:
    """Where nothing fits: what would, in words, each tried and not guessed."""
    found = smallest_cluster(question)
    if found is not None and found[0] > question.gpus:
        yield f"{found[0]} devices instead of {question.gpus}"
    length = question.seq_len // 2
    while length >= 512:
        if _best(replace(question, seq_len=length)) is not None:
            yield f"sequences of {length} tokens instead of {question.seq_len}"
            break
        length //= 2
    if any(value is not None for value in vars(question.fixed).values()):
        free = replace(question, fixed=type(question.fixed)())
        if _best(free) is not None:
            yield "leaving free what is fixed"


def reasons(question: Question, answer: Answer) -> Iterator[str]:
    """Why the best layout is the best: the field's rules of thumb, each from this plan's own numbers."""
    if not answer.strategies:
        return
    best = answer.strategies[0]
    parallel, parts, step = best.parallel, best.cost.parts, best.cost.step_time_s
    if parallel.tp == parallel.pp == 1:
        yield f"data parallel alone: the model fits at {best.memory.total / 2**30:.1f} GiB a device without tp or pp"
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


def _whole_nodes(node: int, most: int) -> Iterator[int]:
    nodes = 1
    while nodes * node <= most:
        yield nodes * node
        nodes = nodes + 1 if nodes < 8 else nodes * 2


def _best(question: Question) -> Strategy | None:
    try:
        found = fastest(question, top=1)
    except ConfigError:  # the batch or the shape does not divide
        return None
    return found[0] if found else None
