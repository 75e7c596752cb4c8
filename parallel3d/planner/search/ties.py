"""Layouts whose speeds differ by less than the planner can tell: the one that is safer to run goes
first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from parallel3d.planner.search.request import PlanResult, Strategy

# Two layouts of one job share most of what a prediction has wrong, yet not all: this share of their
# speed is unsure.
TIE = 0.02


def tied(strategies: Sequence[Strategy]) -> int:
    """Returns how many of the first strategies are as fast as the fastest of all, as far as can be
    told."""
    least = (1 - TIE) * max(map(_speed, strategies), default=0.0)
    for index, each in enumerate(strategies):
        if _speed(each) < least:
            return index
    return len(strategies)


def settle_ties(answer: PlanResult) -> PlanResult:
    """Returns an answer, fastest first, with its tied layouts in another order."""
    return replace(answer, strategies=(*settled(answer.strategies),))


def settled(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Returns layouts, fastest first, with those that are tied in another order: less memory (in
    tenths of a device) first, then tp within a node, then the simpler schedule."""
    equal = tied(strategies)
    safest_first = sorted(strategies[:equal], key=_risks)
    return [*safest_first, *strategies[equal:]]


def _risks(found: Strategy) -> tuple[float, ...]:
    parallel = found.parallel
    node = found.request.cluster.gpus_per_node
    tenths = round(10 * found.memory.total / found.request.usable_bytes)
    tp_across_nodes = 0
    if parallel.tp > node:
        tp_across_nodes = parallel.tp
    return tenths, tp_across_nodes, parallel.stages, -_speed(found)


def _speed(found: Strategy) -> float:
    return found.cost.tokens_per_s_per_gpu
