"""The acceptance on a GPU, as far as a CPU can prove it: its harness finds what is planted, and its checks run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch

from parallel3d.tools.gpu_check import command
from parallel3d.tools.gpu_check.findings import Check, Outcome
from parallel3d.tools.gpu_check.report import page_with
from parallel3d.tools.gpu_check.runner import CPU_SLOWER, run_checks, run_child
from parallel3d.tools.gpu_check.table import CHECKS
from parallel3d.tools.gpu_check.traces import Kernel, kernels_among, overlapped
from parallel3d.tools.gpu_check.training import host_waits

ROOT = Path(__file__).parents[1]
RUN_HERE = ("A1", "A9", "A12a", "A14")  # seconds each; `--device cpu` runs the others by hand


def planted(name: str, *, id: str = "X", needs: str = "") -> Check:
    return Check(id=id, title=name, bound="", limit_s=20.0, target=f"gpu_check_targets:{name}", needs=needs)


@pytest.fixture(autouse=True)
def children_import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "tests"))))


def test_every_check_is_there_once_and_all_take_less_than_eight_minutes() -> None:
    names = [check.id for check in CHECKS]
    assert names == [*(f"A{n}" for n in range(12)), *(f"A12{part}" for part in "abcd"), "A13", "A14", "A15"]
    assert sum(check.limit_s for check in CHECKS) < 480
    assert {check.needs for check in CHECKS} <= {"", *names}
    for check in CHECKS:
        module, _, name = check.target.partition(":")
        assert callable(getattr(import_module(module), name))


def test_figures_within_their_bounds_pass() -> None:
    outcome = run_child(planted("keeps_its_bounds"), "cpu", 20.0)
    assert (outcome.result, outcome.reason) == ("pass", "")
    assert outcome.figures == {"error": 0.5, "rate": 123.5, "time that only a GPU could keep": 9.0}
    assert "log" not in outcome.line()


def test_a_bound_of_a_gpu_holds_on_a_gpu() -> None:
    outcome = run_child(planted("keeps_its_bounds"), "cuda", 20.0)
    assert outcome.reason == "time that only a GPU could keep = 9: at most 1"


def test_a_figure_over_its_bound_fails_and_all_broken_bounds_are_told() -> None:
    outcome = run_child(planted("is_over_its_bound"), "cpu", 20.0)
    assert outcome.result == "fail"
    assert outcome.reason == "error = 2: at most 1; another = nan: at most 1; equal to the bit: no"


def test_an_exception_fails_with_its_line_figures_and_traceback() -> None:
    outcome = run_child(planted("raises"), "cpu", 20.0)
    assert (outcome.result, outcome.reason, outcome.figures) == ("fail", "ValueError: a fault", {"before": 1.0})
    assert "in raises" in outcome.log and "of two lines" in outcome.line()["log"]


def test_a_check_that_hangs_is_stopped_and_its_stacks_are_shown() -> None:
    outcome = run_child(planted("hangs"), "cpu", 4.0)
    assert outcome.result == "timeout" and 4.0 <= outcome.seconds < 15.0
    assert outcome.reason == "was not done after 4 s; the log has its stacks"
    assert "in waits_for_a_peer" in outcome.log and "gpu_check_targets.py" in outcome.log


def test_a_process_that_dies_fails_with_its_status() -> None:
    outcome = run_child(planted("dies"), "cpu", 20.0)
    assert (outcome.result, outcome.reason) == ("fail", "its process ended with status 9 and without an answer")


def test_no_process_outlives_its_check() -> None:
    outcome = run_child(planted("leaves_a_process"), "cpu", 20.0)
    assert outcome.result == "pass"
    status = Path(f"/proc/{outcome.figures['process']}/stat")

    def is_gone() -> bool:
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"

    for _ in range(200):  # a process that is killed takes a moment to end
        if not is_gone():
            time.sleep(0.05)
    assert is_gone()


def test_a_check_is_skipped_where_what_it_needs_did_not_pass() -> None:
    first, second = planted("can_show_nothing", id="P"), planted("keeps_its_bounds", id="Q", needs="P")
    outcomes = list(run_checks([first, second], "cpu"))
    assert [outcome.result for outcome in outcomes] == ["skipped", "skipped"]
    assert outcomes[1].reason == "P did not pass: this machine has no such thing"


def test_the_checks_of_one_name_bring_what_they_need() -> None:
    assert [check.id for check in command.chosen_checks("A14,A2")] == ["A2", "A12a", "A14"]
    assert [check.id for check in command.chosen_checks("A12")] == ["A12a", "A12b", "A12c", "A12d"]
    assert command.chosen_checks(None) == list(CHECKS)


def test_an_unknown_check_is_a_mistake_that_names_the_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "A2,B7"]) == 2
    assert capsys.readouterr().err.startswith("error: --only B7: no such check; they are A0, A1, ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_everything_is_skipped_and_the_status_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", "-"]) == command.NO_DEVICE == 3
    said = capsys.readouterr()
    lines = [json.loads(line) for line in said.out.splitlines()]
    assert [line["id"] for line in lines] == [check.id for check in CHECKS]
    assert {(line["result"], line["reason"]) for line in lines} == {("skipped", "no CUDA device")}
    assert set(lines[0]) == {"id", "title", "result", "seconds", "figures", "reason"}
    assert "--device cpu" in said.err


def test_the_list_has_every_check_and_imports_no_torch() -> None:
    module = "parallel3d.tools.gpu_check.command"
    program = f"import sys; from {module} import main; main(['--list']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == [check.id for check in CHECKS]


def test_a_page_has_one_report_and_keeps_its_text() -> None:
    passed = Outcome(
        id="A0", title="versions", result="pass", seconds=3.2, figures={"gpu": "1 x Some GPU", "torch": "2"}
    )
    failed = Outcome(id="A2", title="losses", result="fail", seconds=9.0, figures={"loss": 0.5}, reason="a | b")
    page = "Not run yet: nothing.\n\n# On a GPU\n\ntext\n"
    for _ in range(2):
        page = page_with(page, [passed, failed], date="2026-12-01")
    first, *rest = page.splitlines()
    assert first == "Last run on 2026-12-01: 2 checks: 1 pass, 1 fail; 12 s (gpu 1 x Some GPU, torch 2)."
    assert rest[:4] == ["", "# On a GPU", "", "text"]
    assert page.count("## The last report") == 1
    assert "| A2 | losses | fail | 9 | **a / b**; loss 0.5 |" in rest


def test_a_report_of_a_cpu_is_not_put_into_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cpu", "--page", "gpu.md"]) == 2
    assert "--page gpu.md: a report is of a GPU" in capsys.readouterr().err


def test_the_documented_checks_are_those_of_the_table() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert [line.split()[1] for line in text.splitlines() if line.startswith("| A")][: len(CHECKS)] == [
        check.id for check in CHECKS
    ]


def test_collectives_beside_products_are_counted_by_stream_and_time() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10.0, "dur": 10.0, "args": {"stream": 7}},
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_ReduceScatter",
            "ts": 15.0,
            "dur": 10.0,
            "args": {"stream": 9},
        },
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 0.0, "dur": 10.0, "args": {"stream": 9}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 99.0},
        {"ph": "f", "cat": "kernel", "name": "flow", "ts": 0.0},
    ]
    kernels = kernels_among(events, "kernel")
    assert kernels[1] == Kernel("gemm", 7, 10.0, 20.0)
    assert overlapped(kernels) == (2, 1, 5.0 / 20.0)
    assert overlapped([Kernel("nccl", 7, 0.0, 5.0), Kernel("gemm", 7, 0.0, 5.0)]) == (1, 0, 0.0)


def test_waits_of_the_host_are_found_by_their_place() -> None:
    with host_waits("cpu") as places:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert len(places) == 1 and places[0].startswith("test_gpu_check.py:")


def test_a_check_runs_on_a_cpu() -> None:
    (outcome,) = run_checks([check for check in CHECKS if check.id == "A1"], "cpu")
    assert (outcome.result, outcome.reason, outcome.figures["backend"]) == ("pass", "", "gloo")


@pytest.mark.long
def test_checks_run_on_a_cpu() -> None:
    checks = [check for check in CHECKS if check.id in RUN_HERE]
    found = {outcome.id: outcome for outcome in run_checks(checks, "cpu")}
    assert {id: (each.result, each.reason) for id, each in found.items()} == dict.fromkeys(RUN_HERE, ("pass", ""))
    assert 0 < float(found["A9"].figures["embedding: error"]) <= 2**-8
    assert all(each.seconds < CPU_SLOWER * 15 for each in found.values())
