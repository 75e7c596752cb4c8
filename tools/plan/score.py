"""`parallel3d-plan score`: computes prediction errors for published runs, and records those that
plans quote.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.model.uncertainty import error_model_of
from parallel3d.planner.published.cases import CaseFile, read_cases
from parallel3d.planner.published.score import Errors, Score, score, without_own_sources
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.cli_output import Reply, write_output
from parallel3d.tools.plan.accuracy import RECORDED, recorded_accuracy

_PLAIN = "all runs"
_LEFT_OUT = "source left out"


def answer(options: argparse.Namespace) -> Reply:
    """Scores case files, and records the result if requested."""
    if options.hardware is not None and not options.hardware.is_dir():
        raise ConfigError(f"--hardware {options.hardware}: must be a folder of hardware files")
    folders = [HARDWARE]
    if options.hardware is not None:
        folders.append(options.hardware)
    file = read_all(options.cases, folders)
    if not file.cases:
        name, why = file.skipped[0]
        raise ConfigError(
            f"{options.cases[0]}: no case can be predicted; the first is {name}: {why}"
        )
    scores = {_PLAIN: with_ranges(file)}
    if options.leave_out is not None or options.record is not None:
        scores[_LEFT_OUT] = with_ranges(without_own_sources(file, scores[_PLAIN]))
    if options.record is not None:
        figures = accuracy_of(file, scores[_LEFT_OUT])
        if options.record.resolve() == RECORDED.resolve():
            RECORDED.unlink()  # write_output() never overwrites a file.
        write_output("--record", options.record, json.dumps(figures, indent=2) + "\n")
    return Reply(page=page(scores), tree=lambda: _tree(scores))


def read_all(paths: Sequence[Path], folders: list[Path]) -> CaseFile:
    """Reads all case files. The hardware files that they name are looked up in `folders`."""
    files = [read_cases(path, folders) for path in paths]
    cases = [case for file in files for case in file.cases]
    skipped = [each for file in files for each in file.skipped]
    return CaseFile(cases=tuple(cases), skipped=tuple(skipped))


def _tree(scores: Mapping[str, Score]) -> Any:
    """Returns the score of all runs as JSON. Other scores are added under their names."""
    trees = {name.replace(" ", "_"): each.to_json() for name, each in scores.items()}
    return trees.pop(_PLAIN.replace(" ", "_")) | trees


def with_ranges(file: CaseFile) -> Score:
    """Scores cases, including whether each measurement is in the range of its prediction."""
    recorded = recorded_accuracy()
    return score(file, spread_of_case=lambda case: error_model_of(case.run, recorded))


def accuracy_of(file: CaseFile, blind: Score) -> dict[str, Any]:
    """Returns the content of accuracy.json, dated today. `blind` is the score with sources held
    out.
    """
    counted = {case.id for case in blind.cases if not case.apart and case.errors_pct}
    by_hardware = Counter(case.run.cluster.name for case in file.cases if case.id in counted)
    figures = {"fit_accuracy": round(blind.fit.accuracy or 0.0, 2)}
    for kind, errors in (("throughput", blind.throughput), ("memory", blind.memory)):
        for name in ("median", "p90", "bias", "covered"):
            figures[f"{kind}_{name}"] = round(getattr(errors, name) or 0.0, 2)
    return dict(
        date=datetime.now(UTC).date().isoformat(),
        throughput_runs=blind.throughput.cases,
        memory_runs=blind.memory.cases,
        fit_runs=blind.fit.cases,
        blind=figures,
        runs_by_hardware=dict(sorted(by_hardware.items())),
    )


def page(scores: Mapping[str, Score]) -> Iterator[str]:
    """Yields a table per score, with totals and a line per source, then the skipped cases."""
    for title, found in scores.items():
        fits = f"{found.fit.cases:>6}{_percent(found.fit.accuracy):>8}"
        yield f"{title:<32}{'runs':>6}{'median':>8}{'p90':>8}{'bias':>8}{'in range':>10}"
        yield _row("throughput", found.throughput)
        yield _row("memory", found.memory)
        yield f"{'fits or out of memory':<32}{fits}"
        for group in (found.by_source, found.apart):
            yield ""
            for name, errors in group.items():
                for kind, each in errors.items():
                    if each.cases:
                        yield _row(f"{name}, {kind}", each)
        yield ""
    first, *_ = scores.values()
    yield from (f"skipped {name}: {why}" for name, why in first.skipped)


def _row(name: str, of: Errors) -> str:
    cells = f"{_percent(of.median):>8}{_percent(of.p90):>8}{_signed(of.bias):>8}"
    return f"{name:<32}{of.cases:>6}{cells}{_percent(of.covered):>10}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}%"
