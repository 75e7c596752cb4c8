"""The planner's accuracy as `parallel3d-plan score` last recorded it in accuracy.json, which every plan quotes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from parallel3d.errors import ConfigError
from parallel3d.planner.published.cases import CaseFile
from parallel3d.planner.published.score import Score
from parallel3d.planner.report.page import Accuracy

RECORDED = Path(__file__).with_name("accuracy.json")


def recorded_accuracy() -> Accuracy:
    return Accuracy(**json.loads(RECORDED.read_text()))


def accuracy_of(result: Score, file: CaseFile) -> Accuracy:
    """The figures that a plan quotes, of today's score."""
    counted = {case.id for case in result.cases if not case.apart and case.errors_pct}
    by_hardware = Counter(case.run.cluster.name for case in file.cases if case.id in counted)
    return Accuracy(
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


def record(accuracy: Accuracy, path: Path) -> None:
    try:
        path.write_text(json.dumps(asdict(accuracy), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"--record {path}: cannot be written ({error.strerror}); try another path") from error
