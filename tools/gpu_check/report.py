"""The report of a run of the checks as Markdown, and its place in a page. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from parallel3d.tools.gpu_check.findings import Outcome

HEADING = "## The last report"
_MACHINE = ("gpu", "torch", "CUDA", "NCCL", "cuDNN")  # figures of A0


def summary(outcomes: Sequence[Outcome]) -> str:
    """Returns how many checks ended in which way, and how long all of them took."""
    counts = Counter(outcome.result for outcome in outcomes)
    ways = ", ".join(f"{count} {result}" for result, count in counts.items())
    return f"{len(outcomes)} checks: {ways}; {sum(outcome.seconds for outcome in outcomes):.0f} s"


def page_with(before: str, outcomes: Sequence[Outcome], *, date: str) -> str:
    """Returns a page with this report in the place of its last one, the section `HEADING` to the end, and its first
    line saying when that was. `before` may be empty."""
    figures = {name: value for outcome in outcomes for name, value in outcome.figures.items() if name in _MACHINE}
    machine = ", ".join(f"{name} {figures[name]}" for name in _MACHINE if name in figures) or "machine not asked (A0)"
    first = f"Last run on {date}: {summary(outcomes)} ({machine})."
    _, _, kept = before.partition("\n")
    kept = kept.partition(HEADING)[0].strip("\n")
    rows = [
        f"| {outcome.id} | {outcome.title} | {outcome.result} | {outcome.seconds:.0f} | {_cell(outcome)} |"
        for outcome in outcomes
    ]
    head = ["| id | check | result | s | figures |", "|---|---|---|---|---|"]
    return "\n".join([first, "", *([kept, ""] if kept else []), HEADING, "", *head, *rows, ""])


def _cell(outcome: Outcome) -> str:
    figures = "; ".join(f"{name} {value}" for name, value in outcome.figures.items())
    text = "; ".join(part for part in (f"**{outcome.reason}**" if outcome.reason else "", figures) if part)
    return text.replace("|", "/").replace("\n", " ")
