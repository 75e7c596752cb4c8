"""`parallel3d-plan score`: the planner's predictions of published runs, and how far off they are, as a page or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from parallel3d.errors import ConfigError
from parallel3d.planner.published.cases import read_cases
from parallel3d.planner.published.score import Errors, Score, score
from parallel3d.tools.arguments import Parser
from parallel3d.tools.plan.accuracy import accuracy_of, record

HARDWARE = Path(__file__).parents[1] / "hardware"
_HELP = "Predicts measured runs (the format of tools/cases/README.md) and prints how far off that is."
_EPILOG = """\
examples:
  parallel3d-plan score tools/cases/published.json
  parallel3d-plan score mine.json --hardware my-clusters/ --json

exit status: 0 done, 2 a file that is none
docs/planner.md says how each figure is predicted, docs/plan.md lists the keys of --json
"""


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(
        prog="parallel3d-plan score",
        description=_HELP,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("cases", metavar="CASES.json", type=Path, help="a file of measured runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, every case in it")
    parser.add_argument("--hardware", metavar="FOLDER", type=Path, help="of hardware files beside the shipped ones")
    parser.add_argument(
        "--record", metavar="F", type=Path, help="write the figures that plans quote (tools/plan/accuracy.json)"
    )
    asked = parser.parse_args(arguments)
    if asked.hardware is not None and not asked.hardware.is_dir():
        raise ConfigError(f"--hardware {asked.hardware}: must be a folder of hardware files")
    file = read_cases(asked.cases, _folders(asked.hardware))
    result = score(file)
    if asked.record is not None:
        record(accuracy_of(result, file), asked.record)
    print(json.dumps(result.to_json()) if asked.json else page(result))
    return 0


def _folders(hardware: Path | None) -> list[Path]:
    return [HARDWARE, *([hardware] if hardware else [])]


def score_file(cases: Path, hardware: Path | None = None) -> Score:
    """The score of a file of cases."""
    return score(read_cases(cases, _folders(hardware)))


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
