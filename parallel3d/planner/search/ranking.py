"""What "best" means: the fastest, the leanest, or the cheapest per token; how the user's own layout compares; and the
same run on clusters of several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.search.fastest import fastest, leanest, search
from parallel3d.planner.search.question import Answer, Fixed, Question, RunLength, Strategy
from parallel3d.planner.search.space import check_fixed

Objective = Literal["throughput", "memory", "cost"]
_FROM_THE_WHOLE = 2


@dataclass(frozen=True, kw_only=True)
class ClusterSize:
    """The best layout on so many devices, or in `none` the reason why no layout fits. `length` is that of the run,
    where its tokens are known."""

    gpus: int
    strategy: Strategy | None = None
    none: str = ""
    length: RunLength | None = None


def rank(question: Question, objective: Objective, *, top: int) -> Answer:
    """Returns the answer with its strategies in the order of an objective. By cost `question.gpus` is the most, and
    its halves compete, down to the first that is less efficient than its double: with fewer devices the bubble and the
    traffic of data parallelism shrink, until memory forces what is slower."""

    def efficiency(strategies: Sequence[Strategy]) -> float:
        return strategies[0].cost.tokens_per_s_per_gpu if strategies else 0.0

    answer = search(question, top=top)
    if objective == "memory" and answer.strategies:
        return replace(answer, strategies=tuple(leanest(question, top=top)))
    if objective != "cost":
        return answer
    found = list(answer.strategies[:_FROM_THE_WHOLE])
    gpus, best = question.gpus, efficiency(answer.strategies)
    while gpus % 2 == 0:
        gpus //= 2
        try:
            smaller = fastest(replace(question, gpus=gpus))
        except ConfigError:  # what is fixed, or the batch, does not divide so few
            continue
        found.extend(smaller)
        if efficiency(smaller) < best:
            break
        best = efficiency(smaller)
    found.sort(key=lambda each: -each.cost.tokens_per_s_per_gpu)
    return replace(answer, strategies=tuple(found[:top]))


def compare(question: Question, wanted: Fixed) -> Answer | str:
    """Returns the best that the cluster can do with `wanted` in the place of what is fixed, or the rule that `wanted`
    breaks."""
    try:
        other = replace(question, fixed=wanted)
        check_fixed(other)
        return search(other, top=1)
    except ConfigError as error:
        return str(error)


def sweep(question: Question, sizes: Iterable[int], tokens: float | None = None) -> list[ClusterSize]:
    """Answers the question at each size, smallest first. Raises ConfigError where the question allows no layout at any
    size, whatever the memory."""
    found: list[ClusterSize] = []
    refused: list[ConfigError] = []
    for gpus in sorted(set(sizes)):
        asked = replace(question, gpus=gpus)
        try:
            check_fixed(asked)
            best = next(iter(fastest(asked)), None)
        except ConfigError as error:
            refused.append(error)
            found.append(ClusterSize(gpus=gpus, none=str(error)))
            continue
        if best is None:
            short = f"{search(asked, top=1).rejected[0].short_bytes / GIB:.1f} GiB"
            none = f"does not fit: {short} are missing in the leanest layout"
            found.append(ClusterSize(gpus=gpus, none=none))
        else:
            length = None if tokens is None else best.length(tokens)
            found.append(ClusterSize(gpus=gpus, strategy=best, length=length))
    if len(refused) == len(found):
        raise refused[-1]
    return found


def cheapest(sizes: Iterable[ClusterSize], *, most_days: float) -> ClusterSize | None:
    """The fewest GPU-hours among those whose run, of known length, is done in time. None where none is."""
    in_time = [size for size in sizes if size.length is not None and size.length.days <= most_days]
    return min(in_time, key=lambda size: size.length.gpu_hours if size.length else 0.0, default=None)
