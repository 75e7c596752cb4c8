"""`parallel3d-plan timeline`: a pipeline schedule in time, as a picture, as figures, and as files."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from parallel3d.errors import ConfigError, ScheduleError
from parallel3d.schedules.builders import build_schedule, forward_only
from parallel3d.schedules.csv_file import load_schedule, to_csv
from parallel3d.schedules.registry import SCHEDULES, schedule_traits
from parallel3d.schedules.schedule import Schedule
from parallel3d.timeline.simulate import ActionTimes, StageTimes, simulate
from parallel3d.timeline.spans import Timeline
from parallel3d.timeline.svg import draw_svg
from parallel3d.timeline.text import draw_text
from parallel3d.timeline.trace import draw_trace
from parallel3d.tools.arguments import Parser, amount, whole

_MOST_ACTIONS = 5_000_000  # some ten seconds and gigabytes
_WIDTH_WHERE_PIPED = 200
_FORWARD_ONLY = "forward_only"
_EPILOG = """\
examples:
  parallel3d-plan timeline --schedule 1f1b --pp 4 --microbatches 8
  parallel3d-plan timeline --schedule interleaved_1f1b --pp 4 --virtual-stages 2 --microbatches 8 --svg timeline.svg
  parallel3d-plan timeline --schedule zb_v --pp 8 --microbatches 32 --forward 1 --split 1.1 0.8 --json
  parallel3d-plan timeline --schedule-file mine.csv
"""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        schedule = _load(options) if options.schedule_file else _build(options)
    except ScheduleError as error:  # the user's numbers or file, not a run that failed
        raise ConfigError(str(error)) from error
    timeline = simulate(schedule, ActionTimes.uniform(schedule.stages, _times(options), transfer=options.transfer))
    drawn: list[tuple[Path | None, str, Callable[[], str]]] = [
        (options.csv, "--csv", lambda: to_csv(schedule)),
        (options.svg, "--svg", lambda: draw_svg(timeline)),
        (options.trace, "--trace", lambda: draw_trace(timeline)),
    ]
    for path, option, draw in drawn:
        if path is not None:
            _write(path, draw(), option)
    if options.json:
        print(json.dumps(_figures(schedule, timeline)))
    else:
        print(_page(schedule, timeline), end="")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="parallel3d-plan timeline",
        description="Simulates a pipeline schedule and draws it. Times are a stage's for a microbatch, in any unit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_argument_group("the schedule")
    which.add_argument("--schedule", metavar="S", help=f"one of {', '.join([*SCHEDULES, _FORWARD_ONLY])}")
    which.add_argument("--pp", metavar="P", type=whole, help="pipeline ranks")
    which.add_argument("--microbatches", metavar="M", type=whole, help="microbatches of a step")
    which.add_argument(
        "--virtual-stages",
        metavar="V",
        type=whole,
        help="stages on each rank (default: 2 where it interleaves, else 1)",
    )
    which.add_argument(
        "--schedule-file", metavar="F", type=Path, help="a CSV, in place of the above: a line a rank, cells such as 2F0"
    )
    times = parser.add_argument_group("what it takes")
    time = amount("a time")
    times.add_argument("--forward", metavar="T", type=time, default=1.0, help="a forward (default 1)")
    times.add_argument("--backward", metavar="T", type=time, help="a whole backward (default: both halves)")
    times.add_argument(
        "--split", metavar=("I", "W"), nargs=2, type=time, help="the halves of a backward: input's gradient, weights' "
        "gradient (default: 1 and 1, or half of --backward each)",
    )  # fmt: skip
    times.add_argument("--transfer", metavar="T", type=time, default=0.0, help="from rank to rank (default 0)")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object on stdout in place of the picture")
    output.add_argument(
        "--csv", metavar="F", type=Path, help="write the schedule, as torch.distributed.pipelining's CSV"
    )
    output.add_argument("--svg", metavar="F", type=Path, help="write the picture")
    output.add_argument("--trace", metavar="F", type=Path, help="write a trace for ui.perfetto.dev or chrome://tracing")
    return parser


def _load(options: argparse.Namespace) -> Schedule:
    """The schedule of a file. Raises ConfigError or ScheduleError."""
    for option in ("schedule", "pp", "microbatches", "virtual_stages"):
        if getattr(options, option) is not None:
            name = "--" + option.replace("_", "-")
            raise ConfigError(f"--schedule-file {options.schedule_file}: says the whole schedule; leave out {name}")
    return load_schedule(options.schedule_file)


def _build(options: argparse.Namespace) -> Schedule:
    """The schedule of the options. Raises ConfigError or ScheduleError where they do not make one."""
    known = [*SCHEDULES, _FORWARD_ONLY]
    if options.schedule is None:
        raise ConfigError(f"--schedule: required, or --schedule-file; try --schedule {known[1]}")
    if options.schedule not in known:
        near = get_close_matches(options.schedule, known, 1)
        advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(f"--schedule {options.schedule}: no such schedule; {advice}")
    for option, value, example in (("--pp", options.pp, 4), ("--microbatches", options.microbatches, 8)):
        if value is None:
            raise ConfigError(f"{option}: required with --schedule; try {option} {example}")
    usual = 1 if options.schedule == _FORWARD_ONLY else schedule_traits(options.schedule).usual_stages
    virtual_stages = usual if options.virtual_stages is None else options.virtual_stages
    actions = 3 * options.pp * virtual_stages * options.microbatches
    if actions > _MOST_ACTIONS:
        raise ConfigError(
            f"--microbatches {options.microbatches}: up to {actions:,} actions on {options.pp} ranks, and at most "
            f"{_MOST_ACTIONS:,} are simulated; try --microbatches {options.pp * 4}"
        )
    numbers = {"pp": options.pp, "microbatches": options.microbatches, "virtual_stages": virtual_stages}
    if options.schedule == _FORWARD_ONLY:
        return forward_only(**numbers)
    return build_schedule(options.schedule, **numbers, check=False)


def _times(options: argparse.Namespace) -> StageTimes:
    half = 1.0 if options.backward is None else options.backward / 2
    input_s, weight_s = options.split or (half, half)
    return StageTimes(forward=options.forward, input=input_s, weight=weight_s, full_backward=options.backward)


def _figures(schedule: Schedule, timeline: Timeline) -> dict[str, object]:
    return {
        "schedule": schedule.name,
        "pp": len(schedule.ranks),
        "microbatches": schedule.microbatches,
        "stages": schedule.stages,
        "bubble_fraction": timeline.bubble_fraction,
        "makespan": timeline.makespan_s,
        "peak_live_microbatches": list(schedule.peak_live_microbatches),
        "actions": len(timeline.spans),
    }


def _page(schedule: Schedule, timeline: Timeline) -> str:
    terminal = sys.stdout.isatty()
    color = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if terminal else _WIDTH_WHERE_PIPED
    live = " ".join(map(str, schedule.peak_live_microbatches))
    figures = f"peak live microbatches, rank by rank: {live}\nactions: {len(timeline.spans):,}\n"
    return draw_text(timeline, width=width, color=color) + figures


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}); try another path") from error
