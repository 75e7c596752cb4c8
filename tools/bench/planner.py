"""`bench planner`: this planner's errors on published runs, and another planner's on the very same runs.

A run that the peer cannot express is left out of both. Both are asked about the run that `planner.published` reads, so
that a field which the source leaves open has one value, and both are judged by the same measured figure. llm-analysis
assumes an efficiency and is asked twice: at the one that its documentation advises, and at the one that makes its own
median error on these runs smallest, which nobody who plans could know.

The peers are not part of an installed package: a checkout has them in tools/bench/peers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from parallel3d.errors import ConfigError
from parallel3d.planner.published.cases import CaseFile, PublishedCase, read_cases
from parallel3d.planner.published.score import Prediction, Score, score
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.bench.report import Options, ResultRow, chosen

CASES = Path(__file__).parents[1] / "cases" / "published.json"
ADVISED = 0.5  # llm-analysis's README, "How to Set FLOPS and Memory Efficiency"
BAR = 1.0  # ours / peer: to be the better one
_EFFICIENCIES = [step / 1000 for step in range(1, 1001)]


class Peer(Protocol):
    """Another planner."""

    def cannot(self, case: PublishedCase) -> str:
        """Returns why the planner cannot express a case; empty where it can."""

    def predict(self, case: PublishedCase) -> Prediction:
        """Returns the prediction of a case that the planner can express."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a score, smaller is better, and how many runs the number is over."""

    name: str
    unit: str
    value: Callable[[Score], float | None]
    runs: Callable[[Score], int]


THROUGHPUT = (
    Figure(
        name="throughput median",
        unit="abs_error_percent",
        value=lambda of: of.throughput.median,
        runs=lambda of: of.throughput.cases,
    ),
    Figure(
        name="throughput 90th percentile",
        unit="abs_error_percent",
        value=lambda of: of.throughput.p90,
        runs=lambda of: of.throughput.cases,
    ),
)
MEMORY = (
    Figure(
        name="peak memory median",
        unit="abs_error_percent",
        value=lambda of: of.memory.median,
        runs=lambda of: of.memory.cases,
    ),
    Figure(
        name="fit or out of memory",
        unit="balanced_error_percent",
        value=lambda of: None if of.fit.balanced_accuracy is None else 100 - of.fit.balanced_accuracy,
        runs=lambda of: of.fit.cases,
    ),
)
_FIGURES = {  # by the peer and what is assumed for it; memory does not depend on llm-analysis's efficiency
    f"llm-analysis at {ADVISED:g}": (*THROUGHPUT, *MEMORY),
    "llm-analysis fitted": THROUGHPUT,
    "Calculon as is": (*THROUGHPUT, *MEMORY),
    "Calculon approximated": (*THROUGHPUT, *MEMORY),
}


@dataclass(frozen=True, kw_only=True)
class SameRuns:
    """The runs that both planners can express, and how many others the peer cannot, by the reason."""

    both: CaseFile
    left_out: Mapping[str, int]


def bench_planner(options: Options) -> list[ResultRow]:
    """Returns the rows of every case that `options` names. Raises ConfigError where a peer is not installed."""
    if options.rounds is not None or options.steps is not None:
        raise ConfigError("bench planner: times nothing, so it takes no --rounds and no --steps; leave them out")
    names = {f"{who}: {figure.name}": (who, figure) for who, figures in _FIGURES.items() for figure in figures}
    wanted = {name: names[name] for name in chosen(names, options)}
    peers = {who: _peer(who) for who in dict.fromkeys(who for who, _ in wanted.values())}
    file = read_cases(CASES, [HARDWARE])
    there_are = score(counted(file))
    scores = {who: both_scores(who, peer, file) for who, peer in peers.items()}
    return [row(name, figure, *scores[who], of=figure.runs(there_are)) for name, (who, figure) in wanted.items()]


def _peer(who: str) -> Peer:
    """Returns the planner of that name. Raises ConfigError where it, or the checkout's peers, are not there."""
    try:
        from parallel3d.tools.bench.peers.calculon import Calculon
        from parallel3d.tools.bench.peers.llm_analysis import LlmAnalysis
    except ModuleNotFoundError as missing:
        raise ConfigError(
            "bench planner: the other planners are not part of an installed package; run it in a checkout of "
            "parallel3d, which has them in tools/bench/peers"
        ) from missing
    if who.startswith("llm-analysis"):
        return LlmAnalysis(efficiency=ADVISED)
    return Calculon(approximate=who == "Calculon approximated")


def both_scores(who: str, peer: Peer, file: CaseFile) -> tuple[Score, Score]:
    """Returns our score and the peer's, over the runs that the peer can express."""
    runs = same_runs(file, peer)
    for why, number in runs.left_out.items():
        print(f"{who} cannot express {number} runs: {why}", file=sys.stderr)
    ours, theirs = score(runs.both), score(runs.both, peer.predict)
    for name, why in (*ours.skipped, *theirs.skipped):  # else the two would be judged by different runs
        raise ConfigError(f"bench planner: {who}: {name}: {why}; mend it, or say in the peer's `cannot` why it cannot")
    if who == "llm-analysis fitted":
        from parallel3d.tools.bench.peers.llm_analysis import LlmAnalysis

        best = fitted_efficiency(throughput_ratios(theirs), ADVISED)
        print(f"{who}: efficiency {best:g}", file=sys.stderr)
        theirs = score(runs.both, LlmAnalysis(efficiency=best).predict)
    return ours, theirs


def counted(file: CaseFile) -> CaseFile:
    """Returns the dense bf16 and fp16 runs of a file without its duplicates."""
    cases = tuple(case for case in file.cases if not case.apart and "duplicate" not in case.tags)
    return CaseFile(cases=cases, skipped=())


def same_runs(file: CaseFile, peer: Peer) -> SameRuns:
    """Returns the runs that are counted and that the peer can express."""
    every = counted(file).cases
    reasons = {case.id: peer.cannot(case) for case in every}
    return SameRuns(
        both=CaseFile(cases=tuple(case for case in every if not reasons[case.id]), skipped=()),
        left_out=Counter(why for why in reasons.values() if why),
    )


def row(case: str, figure: Figure, ours: Score, peer: Score, *, of: int) -> ResultRow:
    """Returns the row of one figure. `of` is the number of all runs, those that the peer cannot express included."""
    our_error, peer_error = figure.value(ours), figure.value(peer)
    if our_error is None or peer_error is None:
        raise ConfigError(f"bench planner: {case}: no run of {of} can be expressed by both; nothing to compare")
    return ResultRow(
        case=f"{case} ({figure.runs(ours)} of {of} runs)",
        ours=our_error,
        peer=peer_error,
        unit=figure.unit,
        ratio=our_error / peer_error,
        bar=BAR,
    )


def throughput_ratios(predicted: Score) -> list[float]:
    """Returns predicted over measured throughput of each run that was timed."""
    return [1 + case.errors_pct["throughput"] / 100 for case in predicted.cases if "throughput" in case.errors_pct]


def fitted_efficiency(ratios: Sequence[float], at: float) -> float:
    """Returns the efficiency with the smallest median error, to a thousandth, for a planner whose throughput is in
    proportion to its efficiency. `ratios` are its predicted over measured throughputs at the efficiency `at`."""
    return min(_EFFICIENCIES, key=lambda efficiency: median(abs(ratio * efficiency / at - 1) for ratio in ratios))
