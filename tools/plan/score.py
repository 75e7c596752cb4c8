"""`parallel3d-plan score`: predictions of published runs and how far off they are, and the last such figures recorded,
which every plan quotes."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.published.cases import CaseFile, read_cases
from parallel3d.planner.published.score import Score, score
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.reply import Reply, write_output

RECORDED = Path(__file__).with_name("accuracy.json")


def answer(options: argparse.Namespace) -> Reply:
    """Scores the cases of a file, and records the result where that is asked."""
    if options.hardware is not None and not options.hardware.is_dir():
        raise ConfigError(f"--hardware {options.hardware}: must be a folder of hardware files")
    file = read_cases(options.cases, [HARDWARE, *([options.hardware] if options.hardware else [])])
    result = score(file)
    if options.record is not None:
        write_output("--record", options.record, json.dumps(accuracy_of(result, file), indent=2) + "\n")
    return Reply(page=lambda: page(result), tree=result.to_json)


def score_file(cases: Path) -> Score:
    """Returns the score of a file of cases on the shipped hardware."""
    return score(read_cases(cases, [HARDWARE]))


def recorded_accuracy() -> dict[str, Any]:
    """Returns the planner's accuracy as it was last recorded in accuracy.json."""
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def accuracy_of(result: Score, file: CaseFile) -> dict[str, Any]:
    """Returns the figures that a plan quotes, dated today."""
    counted = {case.id for case in result.cases if not case.apart and case.errors_pct}
    by_hardware = Counter(case.run.cluster.name for case in file.cases if case.id in counted)
    return dict(
        date=datetime.now(UTC).date().isoformat(),
        throughput_runs=result.throughput.cases,
        throughput_median=round(result.throughput.median or 0.0, 2),
        throughput_p90=round(result.throughput.p90 or 0.0, 2),
        memory_runs=result.memory.cases,
        memory_median=round(result.memory.median or 0.0, 2),
        memory_p90=round(result.memory.p90 or 0.0, 2),
        fit_accuracy=round(result.fit.accuracy or 0.0, 2),
        runs_by_hardware=dict(sorted(by_hardware.items())),
    )


def page(result: Score) -> Iterator[str]:
    """Yields the totals, then a line for each source."""
    for name, errors in (("throughput", result.throughput), ("memory", result.memory)):
        yield (
            f"{name:<12}median error {_percent(errors.median)}, 90th percentile {_percent(errors.p90)}, worst "
            f"{_percent(errors.worst)}  ({errors.cases} runs)"
        )
    right, balanced = _percent(result.fit.accuracy), _percent(result.fit.balanced_accuracy)
    yield f"fits or out of memory  {right} right, balanced {balanced}  ({result.fit.cases} runs)"
    for title, groups in (("source", result.by_source), ("reported apart", result.apart)):
        yield ""
        yield f"{title:24}  throughput: runs  median     p90   memory: runs  median     p90"
        for name, found in groups.items():
            cells = (
                f"{each.cases or '-':>{width}}{_percent(each.median):>8}{_percent(each.p90):>8}"
                for each, width in ((found["throughput"], 18), (found["memory"], 15))
            )
            yield f"{name:24}{''.join(cells)}"
    if result.skipped:
        yield from ("", *(f"skipped {name}: {why}" for name, why in result.skipped))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"
