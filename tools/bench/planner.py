"""`bench planner`: compares errors of the planner and a peer on the same published runs.

Runs that the peer cannot express are excluded for both planners. Both get the runs as read by
`planner.published`, including defaults for missing fields, and are compared with the same measured
values. llm-analysis needs an assumed efficiency. It is scored with the value from its README, and
with the value that minimizes its median throughput error on these runs, which users cannot know.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from parallel3d.errors import ConfigError
from parallel3d.planner.published.cases import CaseFile
from parallel3d.planner.published.score import Score, score
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.bench.report import Options, ResultRow, chosen, row_of
from parallel3d.tools.plan.score import read_all

if TYPE_CHECKING:
    from parallel3d.tools.bench.peers.calculon import Calculon
    from parallel3d.tools.bench.peers.llm_analysis import LlmAnalysis

    Peer = Calculon | LlmAnalysis

CASES = Path(__file__).parents[1] / "cases" / "published.json"
FILES = (CASES, CASES.with_name("elsewhere25.json"))
ADVISED = 0.5  # efficiency, from llm-analysis's README: "How to Set FLOPS and Memory Efficiency"
BAR = 1.0  # largest ratio of errors, ours / peer


@dataclass(frozen=True)
class Figure:
    """Kind of error. `of` returns its value (None without runs) and the number of runs."""

    name: str
    unit: str
    of: Callable[[Score], tuple[float | None, int]]


def _wrong_fits(of: Score) -> tuple[float | None, int]:
    told_right = of.fit.balanced_accuracy
    return None if told_right is None else 100 - told_right, of.fit.cases


THROUGHPUT = (
    Figure(
        "throughput median",
        "abs_error_percent",
        lambda of: (of.throughput.median, of.throughput.cases),
    ),
    Figure(
        "throughput 90th percentile",
        "abs_error_percent",
        lambda of: (of.throughput.p90, of.throughput.cases),
    ),
)
MEMORY = (
    Figure(
        "peak memory median", "abs_error_percent", lambda of: (of.memory.median, of.memory.cases)
    ),
    Figure("fit or out of memory", "balanced_error_percent", _wrong_fits),
)
# Figures by peer and variant. Memory does not depend on llm-analysis's efficiency.
_FIGURES = {
    f"llm-analysis at {ADVISED:g}": (*THROUGHPUT, *MEMORY),
    "llm-analysis fitted": THROUGHPUT,
    "Calculon as is": (*THROUGHPUT, *MEMORY),
    "Calculon approximated": (*THROUGHPUT, *MEMORY),
}


def bench_planner(options: Options) -> list[ResultRow]:
    """Returns the rows of the selected cases. Raises ConfigError if a peer is not installed."""
    if options.rounds is not None or options.steps is not None:
        raise ConfigError("bench planner: has no timing; omit --rounds and --steps")
    names = {
        f"{who}: {figure.name}": (who, figure)
        for who, figures in _FIGURES.items()
        for figure in figures
    }
    wanted = {name: names[name] for name in chosen(names, options)}
    peers = {who: _peer(who) for who, _ in wanted.values()}
    file = read_all(FILES, [HARDWARE])
    every = score(counted(file))
    scores = {who: both_scores(who, peer, file) for who, peer in peers.items()}
    return [
        row(name, figure, *scores[who], of=figure.of(every)[1])
        for name, (who, figure) in wanted.items()
    ]


def _peer(who: str, efficiency: float = ADVISED) -> Peer:
    from parallel3d.tools.bench.peers.calculon import Calculon
    from parallel3d.tools.bench.peers.llm_analysis import LlmAnalysis

    if who.startswith("llm-analysis"):
        return LlmAnalysis(efficiency=efficiency)
    return Calculon(approximate=who == "Calculon approximated")


def both_scores(who: str, peer: Peer, file: CaseFile) -> tuple[Score, Score]:
    """Scores this planner and the peer on the runs that the peer can express."""
    both, left_out = same_runs(file, peer)
    for why, number in left_out.items():
        print(f"{who} cannot express {number} runs: {why}", file=sys.stderr)
    ours = score(both)
    theirs = score(both, peer.predict)
    # Both must be scored on the same runs.
    for name, why in (*ours.skipped, *theirs.skipped):
        raise ConfigError(
            f"bench planner: {who}: {name}: {why}; fix it, or exclude the run in the peer's "
            "`cannot`"
        )
    if who == "llm-analysis fitted":
        best = fitted_efficiency(theirs, ADVISED)
        print(f"{who}: efficiency {best:g}", file=sys.stderr)
        theirs = score(both, _peer(who, best).predict)
    return ours, theirs


def counted(file: CaseFile) -> CaseFile:
    """Returns the runs that count in totals, without duplicates."""
    cases = tuple(case for case in file.cases if not case.apart and "duplicate" not in case.tags)
    return CaseFile(cases=cases, skipped=())


def same_runs(file: CaseFile, peer: Peer) -> tuple[CaseFile, Counter[str]]:
    """Returns the runs that the peer can express, and the number of others by reason."""
    every = counted(file).cases
    reasons = {case.id: peer.cannot(case) for case in every}
    both = CaseFile(cases=tuple(case for case in every if not reasons[case.id]), skipped=())
    return both, Counter(why for why in reasons.values() if why)


def row(case: str, figure: Figure, ours: Score, peer: Score, *, of: int) -> ResultRow:
    """Returns the row of one figure. `of` includes runs that the peer cannot express."""
    (our_error, runs), (peer_error, _) = figure.of(ours), figure.of(peer)
    if our_error is None or peer_error is None:
        raise ConfigError(f"bench planner: {case}: the peer cannot express any of {of} runs")
    return row_of(f"{case} ({runs} of {of} runs)", figure.unit, [(our_error, peer_error)], BAR)


def fitted_efficiency(predicted: Score, at: float) -> float:
    """Returns the efficiency, to a thousandth, with the smallest median throughput error.

    `predicted` is the peer's score at the efficiency `at`. The predicted throughput must be
    proportional to the efficiency.
    """
    # Predicted / measured throughput of each timed run.
    ratios = [
        1 + case.errors_pct["throughput"] / 100
        for case in predicted.cases
        if "throughput" in case.errors_pct
    ]
    efficiencies = (step / 1000 for step in range(1, 1001))
    return min(
        efficiencies,
        key=lambda efficiency: median(abs(ratio * efficiency / at - 1) for ratio in ratios),
    )
