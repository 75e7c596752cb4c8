"""Provenance and logs in the folder of a run: run.json, log.txt and logs/."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_run_dir import Said, Train, train

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.launch import provenance
from parallel3d.launch.provenance import environment, own_versions
from parallel3d.launch.run_log import stderr_to_log, write_log
from tests.live_run import (
    LONGEST_S,
    Act,
    Launch,
    LiveRun,
    local,
    plant,
    small_recipe,
    to_launcher,
    torchrun,
)

__all__ = ["train"]  # a fixture
ROOT = Path(__file__).parents[1]
DATA = ParallelConfig(dp_shard=2)
TENSOR = ParallelConfig(tp=2)


def starts(run_dir: Path) -> list[dict[str, Any]]:
    tree = json.loads((run_dir / "run.json").read_text())
    assert tree["schema"] == "parallel3d.run/1"
    found: list[dict[str, Any]] = tree["starts"]
    return found


def live(
    folder: Path,
    recipe: Recipe,
    launch: Launch = local,
    act: Act | None = None,
) -> str:
    """Starts a run, does `act` after a few more steps, and waits for the end of the run. Returns
    its standard error."""
    run = LiveRun(folder, recipe, launch)
    try:
        if act is not None:
            run.wait_for_step(14)
            act(run)
        run.command.wait(LONGEST_S)
    finally:
        left = run.end()
    assert not left, f"left behind: {left}"
    return run.stderr()


def error_of(said: str) -> str:
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    return error


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_each_start_of_a_run_and_its_end_is_recorded(tmp_path: Path) -> None:
    """The first start ends when a library aborts rank 1, the second, under torchrun in another
    layout, when rank 1 raises an error, and the third when the launcher is killed."""
    recipe = small_recipe(tmp_path, DATA, steps=200)
    aborted = live(tmp_path, recipe, act=plant(1, "speak_and_abort"))
    more = replace(
        recipe,
        parallel=TENSOR,
        checkpoint=replace(recipe.checkpoint, every=200),
    )
    raised = live(tmp_path, more, torchrun, plant(1, "raise_error"))
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["rank"] == 1
    live(tmp_path, more, act=to_launcher(signal.SIGKILL))

    run_dir = tmp_path / "run"
    first, second, last = starts(run_dir)
    config = tmp_path / "recipe.yaml"
    assert first["command"] == last["command"] == ["parallel3d-train", str(config)]
    assert second["command"] == [*torchrun(2), str(config)]
    assert last["recipe"] == yaml.safe_load((run_dir / "config.yaml").read_text())
    assert first["recipe"]["parallel"]["tp"] == 1
    for failed, step, saved in ((first, 0, [10]), (second, 10, [])):
        assert (failed["status"], failed["exit_status"], failed["step"]) == ("failed", 70, step)
        assert failed["saved"] == saved
    assert second["recipe"]["parallel"]["tp"] == 2
    assert last["status"] is None
    assert last["end"] is None
    times = []
    for each in (first, second):
        times += [each["start"], each["end"]]
    assert times == sorted(times)
    assert datetime.fromisoformat(times[0]).utcoffset() is not None
    for each in starts(run_dir):
        assert [*each["hosts"].values()] == [[0, 1]]
        assert each["devices"] == {"CPU": [0, 1]}
        assert each["environment"]["OMP_NUM_THREADS"] == "1"
        assert each["versions"]["parallel3d"] == "0.1.0"

    log = run_dir / "logs" / "rank_00001.log"
    words = log.read_text()
    assert len(re.findall(r"(?m)^=== \S+ rank 1 \(", words)) == 3
    assert "library.c:7: assertion failed\nFatal Python error: Aborted\n" in words
    assert "speak_and_abort" in words  # the Python stack
    assert "assertion" not in aborted
    assert re.search(r"rank 1 .* was killed by SIGABRT.*; see \S+$", error_of(aborted))
    assert error_of(aborted).endswith(f"; see {log}")
    assert error_of(aborted) == f"error: {first['reason']}"
    assert error_of(raised).endswith("ValueError: a planted fault")
    assert "Traceback" in raised
    said = (run_dir / "log.txt").read_text()
    commands = re.findall(r"(?m)^\S+ started: (\S+)", said)
    assert commands == ["parallel3d-train", sys.executable, "parallel3d-train"]
    errors = re.findall(r"(?m)^\S+ (error: .*)$", said)
    assert errors == [error_of(aborted), error_of(raised)]
    assert "ValueError: a planted fault\n       Traceback" in said
    steps = re.findall(r"(?m)^\S+ step (\d+)/", said)
    assert steps[:14] == [str(step) for step in range(1, 15)]


def test_a_refused_start_does_not_end_the_record_of_a_killed_one(
    train: Train, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    words = (f"run_dir={run_dir}", "checkpoint.every=1")
    assert train(*words) == 0
    (start,) = starts(run_dir)
    assert start["command"] == ["parallel3d-train", str(tmp_path / "tiny.yaml"), *words]
    assert start["saved"] == [1, 2]
    assert not (run_dir / "logs").exists()  # rank 0 has none
    tree = json.loads((run_dir / "run.json").read_text())
    tree["starts"][0] |= {"start": "2020-01-01T00:00:00.000+00:00", "end": None}
    (run_dir / "run.json").write_text(json.dumps(tree))
    assert train(*words, "checkpoint.resume=auto", "model.layers=3") == 65
    assert starts(run_dir)[0]["end"] is None
    assert "error: " not in (run_dir / "log.txt").read_text()


def test_a_record_that_cannot_be_read_is_kept(train: Train, tmp_path: Path, capsys: Said) -> None:
    run_dir = tmp_path / "run"
    assert train(f"run_dir={run_dir}") == 0
    cut_off = (run_dir / "run.json").read_text()[:500]
    for number in (1, 2):
        (run_dir / "run.json").write_text(cut_off)
        assert train(f"run_dir={run_dir}", "checkpoint.resume=auto", "train.steps=4") == 0
        kept = run_dir / f"run.json.{number}"
        assert f"warning: {run_dir}/run.json: is not a record" in capsys.readouterr().err
        assert kept.read_text() == cut_off
        assert len(starts(run_dir)) == 1


def test_logs_that_cannot_be_written_do_not_stop_a_run(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "log.txt").mkdir(parents=True)
    assert train(f"run_dir={run_dir}") == 0
    assert "step 2/2" in capfd.readouterr().err
    (run_dir / "logs").touch()
    with stderr_to_log(run_dir, 3):
        os.write(2, b"on the terminal\n")
    assert capfd.readouterr().err == "on the terminal\n"


def test_a_large_log_is_renamed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "log.txt"
    rank = tmp_path / "logs" / "rank_00003.log"
    rank.parent.mkdir()
    large = b"." * ((8 << 20) + 1)
    for log in (job, rank):
        log.write_bytes(large)
    write_log(tmp_path, "a line\x1b[2J")
    with stderr_to_log(tmp_path, 3):
        os.write(2, b"a line\n")
    assert capfd.readouterr().err == ""
    for log in (job, rank):
        assert log.with_name(f"{log.name}.1").read_bytes() == large
    assert job.read_text().endswith("+00:00 a line\\x1b[2J\n")
    assert rank.read_text().endswith(f"pid {os.getpid()})\na line\n")


def test_a_log_that_gets_standard_error_already_has_each_line_once(tmp_path: Path) -> None:
    code = "from parallel3d.launch.run_log import write_log; write_log('.', 'twice')"
    with (tmp_path / "log.txt").open("a") as log:
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            stderr=log,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=True,
        )
    assert (tmp_path / "log.txt").read_text() == ""


def test_only_variables_that_matter_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NVIDIA_API_KEY", "LOGNAME"):
        monkeypatch.setenv(name, "x")
    found = environment()
    assert found["NCCL_DEBUG"] == "x"
    assert "NVIDIA_API_KEY" not in found
    assert "LOGNAME" not in found


def test_the_commit_is_that_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "checkout" / "parallel3d" / "launch" / "provenance.py"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr(provenance, "__file__", str(module))
    assert own_versions()["commit"] is None
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git = ["git", "-C", str(tmp_path / "checkout"), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in ("init -q", "add .", "commit -q -m first"):
        subprocess.run([*git, *words.split()], check=True)
    clean = own_versions()
    assert re.fullmatch("[0-9a-f]{40}", clean["commit"])
    assert clean["dirty"] is False
    module.write_text("changed")
    assert own_versions() == {**clean, "dirty": True}
    monkeypatch.setenv("PATH", "/nowhere")
    assert own_versions() == {**clean, "commit": None, "dirty": None}
