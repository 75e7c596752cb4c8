"""`python -m parallel3d.tools.gpu_check`: the acceptance of the CUDA path on one GPU, as one command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from parallel3d.errors import ConfigError
from parallel3d.launch.failure import print_error
from parallel3d.tools.arguments import Parser
from parallel3d.tools.gpu_check.findings import Check, Outcome
from parallel3d.tools.gpu_check.report import page_with, summary
from parallel3d.tools.gpu_check.runner import answer_as_child, run_checks
from parallel3d.tools.gpu_check.table import CHECKS
from parallel3d.tools.reply import exit_status, write_output

NO_DEVICE = 3
_NO_CUDA = "no CUDA device: run this where torch.cuda.is_available(), or prove the checks' own code by --device cpu"
_EPILOG = """\
examples:
  python -m parallel3d.tools.gpu_check
  python -m parallel3d.tools.gpu_check --only A2,A12 --json -
  python -m parallel3d.tools.gpu_check --page docs/gpu.md
  python -m parallel3d.tools.gpu_check --device cpu --only A12c

exit status:
    0  every check that ran has passed; those that were skipped say why
    1  a check failed or was not done in time
    2  usage
    3  there is no CUDA device: nothing ran
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit status."""
    return exit_status(arguments, _run)


def _run(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m parallel3d.tools.gpu_check",
        description="Runs the acceptance of the CUDA path on one GPU, each check in a process of its own with a limit. "
        "docs/gpu.md says what it proves and what it cannot.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="print the checks and exit")
    parser.add_argument(
        "--only", metavar="IDS", help="only these checks and what they need, such as A0,A6 (A12: A12a-d)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo, tiny sizes, no bounds of time"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write a JSON line for each check; - is stdout, and nothing else"
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the report into a page, such as docs/gpu.md")
    for name, kind in (("--child", str), ("--limit", float), ("--answer", Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)  # what `runner` tells a child
    options = parser.parse_args(arguments)
    if options.child:
        return answer_as_child(options.child, options.device, options.limit, options.answer)
    if options.page is not None and options.device == "cpu":
        raise ConfigError(f"--page {options.page}: a report is of a GPU; leave out --device cpu, or --page")
    checks = chosen_checks(options.only)
    if not options.list:
        return _check(checks, options)
    for check in checks:
        print(f"{check.id:<6}{check.limit_s:>4.0f} s  {check.title}: {check.bound}")
    return 0


def chosen_checks(only: str | None) -> list[Check]:
    """Returns the checks of these ids and those that they need, in the order of the table. Raises ConfigError for an id
    that no check has."""
    if only is None:
        return list(CHECKS)
    names = {name.strip() for name in only.split(",")}
    families = {check.id: {check.id, check.id.rstrip("abcd")} for check in CHECKS}
    unknown = sorted(names - {name for family in families.values() for name in family})
    if unknown:
        raise ConfigError(f"--only {','.join(unknown)}: no such check; they are {', '.join(families)}")
    chosen = {check.id for check in CHECKS if families[check.id] & names}
    chosen |= {check.needs for check in CHECKS if check.id in chosen}
    return [check for check in CHECKS if check.id in chosen]


def _check(checks: Sequence[Check], options: argparse.Namespace) -> int:
    """Runs checks, and prints and writes what they found; returns the exit status."""
    # The table is for people: it makes place on stdout for the JSON lines where they are asked for there.
    people = sys.stderr if options.json == "-" else sys.stdout
    device_is_there = options.device == "cpu" or _has_cuda()
    outcomes: list[Outcome] = []
    if device_is_there:
        for outcome in run_checks(checks, options.device):
            outcomes.append(outcome)
            _say(outcome, people)
    else:
        outcomes = [Outcome(id=c.id, title=c.title, result="skipped", reason="no CUDA device") for c in checks]
    lines = "".join(f"{json.dumps(outcome.line())}\n" for outcome in outcomes)
    if options.json == "-":
        sys.stdout.write(lines)
    elif options.json is not None:
        write_output("--json", Path(options.json), lines)
    if not device_is_there:
        print_error(_NO_CUDA)
        return NO_DEVICE
    if options.page is not None:
        before = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
        write_output("--page", options.page, page_with(before, outcomes, date=datetime.now(UTC).date().isoformat()))
    print(summary(outcomes), file=people)
    return int(any(outcome.result in ("fail", "timeout") for outcome in outcomes))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _say(outcome: Outcome, people: TextIO) -> None:
    figures = ", ".join(f"{name} {value}" for name, value in outcome.figures.items())
    said = "; ".join(part for part in (outcome.reason, figures) if part)
    print(f"{outcome.id:<6}{outcome.result:<9}{outcome.seconds:>5.1f} s  {outcome.title}: {said}", file=people)
    if outcome.log:
        print("".join(f"      | {line}\n" for line in outcome.log.splitlines()), end="", file=people)
    people.flush()
