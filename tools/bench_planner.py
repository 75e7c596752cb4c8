"""`bench planner`: this planner's errors on published runs, and another's on the very same runs.

A run that the other cannot express is left out of both. Both are asked about the job that `planner.cases` reads, so
that a field which the source leaves open has one value, and both are judged by the same measured figure
(`planner.score`). llm-analysis assumes an efficiency. It is asked twice: at the one that its documentation advises, and
at the one of all that makes its own median error on these runs smallest, which nobody who plans could know.
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
from parallel3d.planner.cases import Case, CaseFile, read_cases
from parallel3d.planner.score import Prediction, Score, score
from parallel3d.tools.bench_report import Options, Row, chosen
from parallel3d.tools.plan_score import HARDWARE

CASES = Path(__file__).parent / "cases" / "published.json"
ADVISED = 0.5  # llm-analysis's README, "How to Set FLOPS and Memory Efficiency"
BAR = 1.0  # ours / peer: to be the better one
_EFFICIENCIES = [step / 1000 for step in range(1, 1001)]


class Peer(Protocol):
    """Another planner."""

    def cannot(self, case: Case) -> str:
        """Why it cannot express a case; empty where it can."""

    def predict(self, case: Case) -> Prediction:
        """What it says of a case that it can express."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a score, smaller is better."""

    name: str
    unit: str
    value: Callable[[Score], float | None]
    runs: Callable[[Score], int]  # that it is over


THROUGHPUT = (
    Figure(
        name="throughput, median",
        unit="abs_error_percent",
        value=lambda of: of.throughput.median,
        runs=lambda of: of.throughput.cases,
    ),
    Figure(
        name="throughput, 90th percentile",
        unit="abs_error_percent",
        value=lambda of: of.throughput.p90,
        runs=lambda of: of.throughput.cases,
    ),
)
MEMORY = (
    Figure(
        name="peak memory, median",
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
_FIGURES = {  # by what the peer assumes, which its memory does not depend on
    f"llm-analysis at {ADVISED:g}": (*THROUGHPUT, *MEMORY),
    "llm-analysis fitted": THROUGHPUT,
}


@dataclass(frozen=True, kw_only=True)
class SameRuns:
    """The runs that both can express, those that there are, and why the peer cannot express the others."""

    both: CaseFile
    all: CaseFile
    left_out: Mapping[str, int]  # by reason


def bench_planner(options: Options) -> list[Row]:
    """The rows of every case that `options` names. Raises ConfigError where the peer is not installed."""
    from parallel3d.tools.llm_analysis_peer import LlmAnalysis

    if options.rounds is not None or options.steps is not None:
        raise ConfigError("bench planner: times nothing, so it takes no --rounds and no --steps; leave them out")
    wanted = chosen([f"{who}: {figure.name}" for who, figures in _FIGURES.items() for figure in figures], options)
    peer = LlmAnalysis(efficiency=ADVISED)
    runs = same_runs(read_cases(CASES, [HARDWARE]), peer)
    for why, number in runs.left_out.items():
        print(f"llm-analysis cannot express {number} runs: {why}", file=sys.stderr)
    ours, advised = score(runs.both), score(runs.both, peer.predict)
    best = fitted_efficiency(throughput_ratios(advised), ADVISED)
    print(f"llm-analysis's efficiency: {ADVISED:g} as advised, {best:g} fitted to these runs", file=sys.stderr)
    theirs = (advised, score(runs.both, LlmAnalysis(efficiency=best).predict))
    there_are = score(runs.all)
    return [
        row(f"{who}: {figure.name}", figure, ours, peers, of=figure.runs(there_are))
        for (who, figures), peers in zip(_FIGURES.items(), theirs, strict=True)
        for figure in figures
        if f"{who}: {figure.name}" in wanted
    ]


def same_runs(file: CaseFile, peer: Peer) -> SameRuns:
    """Of the dense bf16 and fp16 runs of a file, no duplicate among them, those that the peer can express."""
    every = tuple(case for case in file.cases if not case.apart and "duplicate" not in case.tags)
    reasons = {case.id: peer.cannot(case) for case in every}
    return SameRuns(
        both=CaseFile(cases=tuple(case for case in every if not reasons[case.id]), skipped=()),
        all=CaseFile(cases=every, skipped=()),
        left_out=Counter(why for why in reasons.values() if why),
    )


def row(case: str, figure: Figure, ours: Score, peer: Score, *, of: int) -> Row:
    """`of`: so many runs there are, those included that the peer cannot express."""
    our_error, peer_error = figure.value(ours), figure.value(peer)
    if our_error is None or peer_error is None:
        raise ConfigError(f"bench planner: {case}: no run of {of} can be expressed by both; nothing to compare")
    return Row(
        case=f"{case} ({figure.runs(ours)} of {of} runs)",
        ours=our_error,
        peer=peer_error,
        unit=figure.unit,
        ratio=our_error / peer_error,
        bar=BAR,
    )


def throughput_ratios(predicted: Score) -> list[float]:
    """Predicted over measured throughput, of each run that was timed."""
    return [1 + case.errors_pct["throughput"] / 100 for case in predicted.cases if "throughput" in case.errors_pct]


def fitted_efficiency(ratios: Sequence[float], at: float) -> float:
    """The efficiency with the smallest median error, to a thousandth, for a planner whose throughput is in proportion
    to it. `ratios`: its predicted over measured throughput at the efficiency `at`."""
    return min(_EFFICIENCIES, key=lambda efficiency: median(abs(ratio * efficiency / at - 1) for ratio in ratios))
