"""What "best" means: the fastest, the leanest, or the cheapest per token; and how the user's own layout compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from parallel3d.errors import ConfigError
from parallel3d.planner.search.constraints import check_fixed
from parallel3d.planner.search.fastest import fastest, leanest, search
from parallel3d.planner.search.question import Answer, Fixed, Question, Rejected, Strategy
from parallel3d.planner.time.parts import TimeParts
from parallel3d.planner.time.step import BlockTimeCache

Objective = Literal["throughput", "memory", "cost"]
_FROM_THE_WHOLE = 2


@dataclass(frozen=True, kw_only=True)
class WhyNot:
    """The best layout with what the user asked `--why` for: it fits (`found`), does not (`rejected`), or breaks a rule
    (`refused`)."""

    asked: str
    found: Strategy | None = None
    rejected: Rejected | None = None
    refused: str = ""


def rank(question: Question, objective: Objective, *, top: int) -> Answer:
    """Returns the answer with its strategies in the order of an objective. By cost `question.gpus` is the most, and
    halves of it compete."""
    answer = search(question, top=top)
    if objective == "memory" and answer.strategies:
        return replace(answer, strategies=tuple(leanest(question, top=top)))
    if objective == "cost":
        return replace(answer, strategies=_cheapest(question, answer, top))
    return answer


def compare(question: Question, wanted: Fixed, asked: str) -> WhyNot:
    """The best that the cluster can do with `wanted`, in the place of what else is fixed."""
    try:
        other = replace(question, fixed=wanted)
        check_fixed(other)
        answer = search(other, top=1)
    except ConfigError as error:
        return WhyNot(asked=asked, refused=str(error))
    if answer.strategies:
        return WhyNot(asked=asked, found=answer.strategies[0])
    return WhyNot(asked=asked, rejected=answer.rejected[0])


def slower_by(best: Strategy, other: Strategy) -> list[tuple[str, float]]:
    """By cause, the seconds that a step of `other` takes more (or less), the largest difference first."""
    parts = ((f.name, getattr(other.cost.parts, f.name) - getattr(best.cost.parts, f.name)) for f in fields(TimeParts))
    return sorted(parts, key=lambda part: -abs(part[1]))


def at_size(question: Question, found: Strategy) -> Question:
    """The question as it is for a strategy that may take fewer devices."""
    return replace(question, gpus=found.parallel.world_size)


def _cheapest(question: Question, whole: Answer, top: int) -> tuple[Strategy, ...]:
    """The best of the cluster and of its halves, down to the first that is less efficient than its double: with fewer
    devices the bubble and the traffic of data parallelism shrink, until memory forces what is slower."""
    found = list(whole.strategies[:_FROM_THE_WHOLE])
    gpus, best = question.gpus, _efficiency(whole.strategies)
    blocks: BlockTimeCache = {}
    while gpus % 2 == 0:
        gpus //= 2
        try:
            smaller = fastest(replace(question, gpus=gpus), top=1, blocks=blocks)
        except ConfigError:  # what is fixed, or the batch, does not divide so few
            continue
        found.extend(smaller)
        if _efficiency(smaller) < best:
            break
        best = _efficiency(smaller)
    return tuple(sorted(found, key=lambda each: -each.cost.tokens_per_s_per_gpu)[:top])


def _efficiency(strategies: Sequence[Strategy]) -> float:
    """Tokens per second and device of the best; 0 where nothing fits."""
    return strategies[0].cost.tokens_per_s_per_gpu if strategies else 0.0
