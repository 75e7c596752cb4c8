"""`parallel3d-plan timeline`: what it prints, writes and refuses; and the front that all plan commands share."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from parallel3d.errors import ConfigError
from parallel3d.schedules.csv_file import load_schedule
from parallel3d.schedules.registry import SCHEDULES
from parallel3d.timeline import simulate
from parallel3d.timeline.spans import Span
from parallel3d.tools.plan import command as plan
from parallel3d.tools.reply import Reply

Said = pytest.CaptureFixture[str]
SMALL = "timeline --schedule 1f1b --pp 4 --microbatches 8"


def run(arguments: str) -> int:
    return plan.main(arguments.split())


def figures(arguments: str, capsys: Said) -> dict[str, object]:
    assert run(f"timeline {arguments} --json") == 0
    said = capsys.readouterr()
    assert said.err == ""
    (line,) = said.out.splitlines()
    found: dict[str, object] = json.loads(line)
    return found


def test_it_prints_the_picture_and_the_figures(capsys: Said) -> None:
    assert run(SMALL) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.isascii()
    assert said.out.splitlines()[0] == "1f1b: makespan 33, bubble 27.3%"
    assert said.out.splitlines()[1].startswith("rank 0 |F0 F1 F2 F3 ....")
    assert said.out.splitlines()[-2:] == ["peak live microbatches, rank by rank: 4 3 2 1", "actions: 64"]


def test_json_is_one_object_and_nothing_else(capsys: Said) -> None:
    assert figures("--schedule 1f1b --pp 4 --microbatches 8", capsys) == {
        "schedule": "1f1b",
        "pp": 4,
        "microbatches": 8,
        "stages": 4,
        "bubble_fraction": pytest.approx(3 / 11),
        "makespan": 33.0,
        "peak_live_microbatches": [4, 3, 2, 1],
        "actions": 64,
    }


@pytest.mark.parametrize("name", [*SCHEDULES, "forward_only"])
@pytest.mark.parametrize("microbatches", [1, 9])
def test_every_schedule_has_a_usual_number_of_stages(name: str, microbatches: int, capsys: Said) -> None:
    found = figures(f"--schedule {name} --pp 4 --microbatches {microbatches}", capsys)
    assert found["stages"] in (4, 8)


@pytest.mark.parametrize(
    ("options", "makespan"),
    [
        ("", 6.0),  # two forwards of 1, two backwards of 2
        ("--forward 2", 8.0),
        ("--backward 3", 8.0),
        ("--split 3 2", 12.0),
        ("--split 3 2 --backward 4", 10.0),
        ("--transfer 0.5", 7.0),
    ],
)
def test_what_actions_take_is_an_option(options: str, makespan: float, capsys: Said) -> None:
    assert figures(f"--schedule gpipe --pp 2 --microbatches 1 {options}", capsys)["makespan"] == makespan


def test_a_backward_is_split_in_halves(capsys: Said) -> None:
    found = figures("--schedule zb_h1 --pp 1 --microbatches 1 --backward 3 --forward 0", capsys)
    assert found["makespan"] == 3.0


def test_it_writes_what_it_is_asked_for(tmp_path: Path, capsys: Said) -> None:
    csv, svg, trace = tmp_path / "s.csv", tmp_path / "s.svg", tmp_path / "s.json"
    before = figures(f"--schedule dualpipe_v --pp 2 --microbatches 5 --csv {csv} --svg {svg} --trace {trace}", capsys)
    assert svg.read_text().startswith("<svg ")
    assert json.loads(trace.read_text())["traceEvents"]
    assert load_schedule(csv).placement == (0, 1, 1, 0)
    after = figures(f"--schedule-file {csv}", capsys)
    assert {**before, "schedule": str(csv)} == after


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no command is given; known are recommend, memory, verify, timeline"),
        ("timelime", "timelime: no such command; did you mean timeline?"),
        ("--frobnicate", "unrecognized arguments: --frobnicate; see parallel3d-plan recommend --help"),
        ("timeline", "--schedule: required, or --schedule-file; try --schedule 1f1b"),
        ("timeline --schedule 1f1c", "--schedule 1f1c: no such schedule; did you mean 1f1b?"),
        ("timeline --schedule x", "known are gpipe, 1f1b"),
        ("timeline --schedule 1f1b", "--pp: required with --schedule; try --pp 4"),
        ("timeline --schedule 1f1b --pp 2", "--microbatches: required with --schedule; try --microbatches 8"),
        ("timeline --schedule 1f1b --pp 0", "--pp: '0' must be a whole number from 1 on; see parallel3d-plan timeline"),
        ("timeline --schedule 1f1b --pp two", "--pp: 'two' must be a whole number"),
        (SMALL + " --virtual-stages 2", "schedule 1f1b: 2 stages on each rank; it has 1"),
        (SMALL + " --forward -1", "--forward: '-1' must be a time, at least 0 and finite"),
        (SMALL + " --split 1 nan", "--split: 'nan' must be a time"),
        (SMALL + " --svg /no/such/folder/x.svg", "--svg /no/such/folder/x.svg: cannot be written (No such file"),
        (SMALL + " --frobnicate", "unrecognized arguments: --frobnicate; see parallel3d-plan timeline --help"),
        (SMALL + "88888888", "actions on 4 ranks, and at most 5,000,000 are simulated; try --pp 8 --microbatches 32"),
        ("timeline --schedule-file /no/such/file", "/no/such/file: cannot be read: No such file"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: str, message: str, capsys: Said) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert message in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("name", [*SCHEDULES, "forward_only"])
def test_what_is_suggested_for_too_many_actions_can_be_simulated(name: str, capsys: Said) -> None:
    assert run(f"timeline --schedule {name} --pp 100000 --microbatches 100000") == 2
    suggested = capsys.readouterr().err.partition("; try ")[2]
    assert run(f"timeline --schedule {name} {suggested} --json") == 0


def test_a_picture_of_many_actions_reads_each_action_a_few_times(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    """The start of a timeline of 1,200 actions was found anew for each of them."""
    reads = 0

    class CountedSpan(Span):
        def __getattribute__(self, name: str) -> Any:
            nonlocal reads
            reads += name == "start_s"
            return super().__getattribute__(name)

    monkeypatch.setattr(simulate, "Span", CountedSpan)
    assert run("timeline --schedule 1f1b --pp 6 --microbatches 100") == 0
    assert "actions: 1,200" in capsys.readouterr().out
    assert reads < 20 * 1200


def test_a_schedule_file_that_stops_names_rank_action_and_reason(tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1B0,1F0\n")
    assert run(f"timeline --schedule-file {tmp_path / 'mine.csv'}") == 2
    assert "rank 0 at 0B0 waits for 1B0; rank 1 at 1B0 waits for 1F0" in capsys.readouterr().err


def test_a_schedule_and_a_file_do_not_go_together(capsys: Said) -> None:
    assert run("timeline --schedule-file x.csv --pp 4") == 2
    assert "--schedule-file x.csv: says the whole schedule; leave out --pp" in capsys.readouterr().err


def test_verbose_shows_where_a_mistake_was_found(capsys: Said) -> None:
    assert run("-v timeline") == 2
    assert "Traceback" in capsys.readouterr().err


def test_nothing_that_fits_ends_with_the_status_of_its_error(monkeypatch: pytest.MonkeyPatch, capsys: Said) -> None:
    class NothingFits(ConfigError):
        exit_status = 3

    def answer(options: argparse.Namespace) -> Reply:
        raise NothingFits(f"--gpus {options.gpus}")

    module = ModuleType("parallel3d.tools.plan.other")
    module.answer = answer  # type: ignore[attr-defined]
    other = plan.Command(
        answer=f"{module.__name__}:answer",
        summary="does something else",
        does="",
        epilog="",
        groups={"options": {"--gpus": {}}},
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(plan.COMMANDS, "other", other)
    assert run("other --gpus 1") == 3
    assert capsys.readouterr().err == "error: --gpus 1\n"


@pytest.mark.parametrize("name", plan.COMMANDS)
def test_every_command_is_there_and_has_its_own_help(name: str, capsys: Said) -> None:
    module, _, function = plan.COMMANDS[name].answer.partition(":")
    assert callable(getattr(import_module(module), function))
    with pytest.raises(SystemExit) as ended:
        run(f"{name} --help")
    assert ended.value.code == 0
    assert f"usage: parallel3d-plan {name}" in capsys.readouterr().out


def test_help_lists_the_commands(capsys: Said) -> None:
    assert run("--help") == 0
    assert "timeline   simulate and draw a pipeline schedule" in capsys.readouterr().out
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("parallel3d ")


def test_it_answers_without_torch_or_omegaconf() -> None:
    program = (
        "import sys\n"
        "from parallel3d.tools.plan.command import main\n"
        f"status = main('{SMALL}'.split())\n"
        "sys.exit(status or bool({'torch', 'omegaconf', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 0


def test_the_pages_examples_are_what_is_printed(capsys: Said) -> None:
    page = (Path(__file__).parents[1] / "docs" / "pipeline.md").read_text()
    examples = re.findall(r"```\n\$ parallel3d-plan (.*)\n((?:.*\n)*?)```", page)
    assert len(examples) == 3
    for arguments, printed in examples:
        assert run(arguments) == 0
        assert capsys.readouterr().out == printed
