"""`parallel3d-plan score`: the planner's predictions of published runs, and how far off they are, as a page or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from parallel3d.errors import Parallel3dError
from parallel3d.planner.cases import read_cases
from parallel3d.planner.score import Errors, Score, score

HARDWARE = Path(__file__).parent / "hardware"
_HELP = "Predicts measured cases (the format of tools/cases/README.md) and prints the errors."


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="parallel3d-plan score", description=_HELP)
    parser.add_argument("cases", type=Path, help="a file of cases, such as tools/cases/published.json")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, every case in it")
    parser.add_argument("--hardware", type=Path, help="a folder of hardware files beside the shipped ones")
    asked = parser.parse_args(arguments)
    try:
        result = score_file(asked.cases, asked.hardware)
    except Parallel3dError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(json.dumps(result.to_json()) if asked.json else page(result))
    return 0


def score_file(cases: Path, hardware: Path | None = None) -> Score:
    """The score of a file of cases."""
    return score(read_cases(cases, [HARDWARE, *([hardware] if hardware else [])]))


def page(result: Score) -> str:
    """The totals, then a line for each source."""
    lines = [
        f"throughput  {_line(result.throughput)}",
        f"memory      {_line(result.memory)}",
        f"fits or out of memory  {_percent(result.fit.accuracy)} right, balanced "
        f"{_percent(result.fit.balanced_accuracy)}  ({result.fit.cases} runs)",
        "",
        *_table("source", result.by_source),
        "",
        *_table("reported apart", result.apart),
    ]
    if result.skipped:
        lines += ["", *(f"skipped {name}: {why}" for name, why in result.skipped)]
    return "\n".join(lines)


def _table(title: str, groups: Mapping[str, Mapping[str, Errors]]) -> list[str]:
    header = f"{title:24}  throughput: runs  median     p90   memory: runs  median     p90"
    return [header, *(f"{name:24}{_cells(e['throughput'], 18)}{_cells(e['memory'], 15)}" for name, e in groups.items())]


def _cells(errors: Errors, width: int) -> str:
    return f"{errors.cases or '-':>{width}}{_percent(errors.median):>8}{_percent(errors.p90):>8}"


def _line(errors: Errors) -> str:
    return (
        f"median error {_percent(errors.median)}, 90th percentile {_percent(errors.p90)}, worst "
        f"{_percent(errors.worst)}  ({errors.cases} runs)"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}%"


if __name__ == "__main__":
    raise SystemExit(main())
