"""`parallel3d-plan timeline`: simulates a pipeline schedule, draws it, and writes files."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator

from parallel3d.errors import ConfigError, ScheduleError
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.csv_file import load_schedule, to_csv
from parallel3d.schedules.registry import schedule_traits
from parallel3d.schedules.schedule import Schedule
from parallel3d.timeline.draw import draw_svg, draw_text, draw_trace
from parallel3d.timeline.simulate import ActionTimes, StageTimes, simulate
from parallel3d.timeline.spans import Timeline
from parallel3d.tools.cli_output import Reply, check_free, write_output

# Maximum number of actions. Simulating them takes about a minute and a few GB.
_MOST_ACTIONS = 5_000_000
_WIDTH_WHERE_PIPED = 200


def answer(options: argparse.Namespace) -> Reply:
    for option in ("csv", "svg", "trace"):
        check_free(f"--{option}", vars(options)[option])
    try:
        schedule = _load(options) if options.schedule_file else _build(options)
    except ScheduleError as error:  # The options or the schedule file are invalid.
        raise ConfigError(str(error)) from error
    half = 1.0 if options.backward is None else options.backward / 2
    input_s, weight_s = options.split or (half, half)
    times = StageTimes(
        forward=options.forward, input=input_s, weight=weight_s, full_backward=options.backward
    )
    timeline = simulate(
        schedule, ActionTimes.uniform(schedule.stages, times, transfer=options.transfer)
    )
    if options.csv is not None:
        write_output("--csv", options.csv, to_csv(schedule))
    if options.svg is not None:
        write_output("--svg", options.svg, draw_svg(timeline))
    if options.trace is not None:
        write_output("--trace", options.trace, draw_trace(timeline))
    return Reply(page=_page(schedule, timeline), tree=lambda: _figures(schedule, timeline))


def _load(options: argparse.Namespace) -> Schedule:
    for option in ("schedule", "pp", "microbatches", "virtual_stages"):
        if getattr(options, option) is not None:
            name = "--" + option.replace("_", "-")
            file = f"--schedule-file {options.schedule_file}"
            raise ConfigError(f"{file}: defines the complete schedule; remove {name}")
    return load_schedule(options.schedule_file)


def _build(options: argparse.Namespace) -> Schedule:
    if options.schedule is None:
        raise ConfigError(
            "--schedule: required unless --schedule-file is given; try --schedule 1f1b"
        )
    for option, value in (("--pp", options.pp), ("--microbatches", options.microbatches)):
        if value is None:
            raise ConfigError(f"{option}: required with --schedule; try {option} 8")
    virtual_stages = options.virtual_stages or schedule_traits(options.schedule).stages.usual
    actions = 3 * options.pp * virtual_stages * options.microbatches
    if actions > _MOST_ACTIONS:
        rule = f"has up to {actions:,} actions, but at most {_MOST_ACTIONS:,} can be simulated"
        raise ConfigError(f"--microbatches {options.microbatches}: {rule}; try --microbatches 32")
    return build_schedule(
        options.schedule,
        pp=options.pp,
        microbatches=options.microbatches,
        virtual_stages=virtual_stages,
    )


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


def _page(schedule: Schedule, timeline: Timeline) -> Iterator[str]:
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else _WIDTH_WHERE_PIPED
    yield from draw_text(timeline, width=width).splitlines()
    live = " ".join(map(str, schedule.peak_live_microbatches))
    yield f"peak live microbatches, rank by rank: {live}"
    yield f"actions: {len(timeline.spans):,}"
