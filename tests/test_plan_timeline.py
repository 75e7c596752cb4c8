"""`parallel3d-plan timeline`: what it prints, writes and refuses; and the front that all plan
commands share."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from parallel3d.schedules.csv_file import load_schedule
from parallel3d.tools.plan import command as plan
from tests.plan_json import Said, error_line, plan_json

SMALL = "timeline --schedule 1f1b --pp 4 --microbatches 8"


def run(arguments: str) -> int:
    return plan.main(arguments.split())


def test_it_prints_the_picture_and_the_figures(capsys: Said) -> None:
    assert run(SMALL) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.isascii()
    assert said.out.splitlines()[0] == "1f1b: makespan 33, bubble 27.3%"
    assert said.out.splitlines()[1].startswith("rank 0 |F0 F1 F2 F3 ....")
    assert said.out.splitlines()[-2:] == [
        "peak live microbatches, rank by rank: 4 3 2 1",
        "actions: 64",
    ]


def test_json_is_one_object_and_nothing_else(capsys: Said) -> None:
    assert plan_json("timeline --schedule 1f1b --pp 4 --microbatches 8", capsys) == {
        "schedule": "1f1b",
        "pp": 4,
        "microbatches": 8,
        "stages": 4,
        "bubble_fraction": pytest.approx(3 / 11),
        "makespan": 33.0,
        "peak_live_microbatches": [4, 3, 2, 1],
        "actions": 64,
    }


def test_it_writes_what_it_is_asked_for(tmp_path: Path, capsys: Said) -> None:
    csv = tmp_path / "s.csv"
    svg = tmp_path / "s.svg"
    trace = tmp_path / "s.json"
    asked = "timeline --schedule dualpipe_v --pp 2 --microbatches 5"
    before = plan_json(f"{asked} --csv {csv} --svg {svg} --trace {trace}", capsys)
    assert svg.read_text().startswith("<svg ")
    assert json.loads(trace.read_text())["traceEvents"]
    assert load_schedule(csv).placement == (0, 1, 1, 0)
    after = plan_json(f"timeline --schedule-file {csv}", capsys)
    assert {**before, "schedule": str(csv)} == after


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "no command given; known are recommend, memory, verify, timeline"),
        ("timelime", "timelime: no such command; did you mean timeline?"),
        ("timeline", "--schedule: required unless --schedule-file is given; try --schedule 1f1b"),
        ("timeline --schedule 1f1c", "--schedule: invalid choice: '1f1c'"),
        ("timeline --schedule 1f1b", "--pp: required with --schedule; try --pp 8"),
        (
            "timeline --schedule 1f1b --pp 0",
            "--pp: '0' must be an integer of at least 1; see parallel3d-plan timeline",
        ),
        (SMALL + " --virtual-stages 2", "schedule 1f1b: pp = 4, 8 microbatches, 2 stages"),
        (SMALL + " --split 1 nan", "--split: 'nan' must be a time"),
        (
            SMALL + " --svg /no/such/folder/x.svg",
            "--svg /no/such/folder/x.svg: cannot be written (No such file",
        ),
        (
            SMALL + "88888888",
            "actions, but at most 5,000,000 can be simulated; try --microbatches 32",
        ),
        ("timeline --schedule-file /no/such/file", "/no/such/file: cannot be read: No such file"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: str, message: str, capsys: Said) -> None:
    assert run(arguments) == 2
    assert message in error_line(capsys)


def test_a_schedule_file_that_stops_names_rank_action_and_reason(
    tmp_path: Path, capsys: Said
) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert run(f"timeline --schedule-file {tmp_path / 'mine.csv'}") == 2
    assert "rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1" in capsys.readouterr().err


@pytest.mark.parametrize("name", plan.COMMAND_LINE.commands)
def test_every_command_is_there_and_has_its_own_help(name: str, capsys: Said) -> None:
    module, _, function = plan.COMMAND_LINE.commands[name].answer.partition(":")
    assert callable(getattr(import_module(module), function))
    with pytest.raises(SystemExit) as ended:
        run(f"{name} --help")
    assert ended.value.code == 0
    assert f"usage: parallel3d-plan {name}" in capsys.readouterr().out
