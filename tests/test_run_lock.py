"""One run, one folder: who holds it is named, the lock of a process that has gone is taken over, a
live one is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from parallel3d.config.load import to_yaml
from parallel3d.errors import RunLockedError
from parallel3d.launch import run_lock
from parallel3d.launch.run_lock import LOCK_FILE, locked
from parallel3d.recipes import named_recipe, pretrain

HOLD = """
import sys, time
from parallel3d.launch.run_lock import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(1000)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Starts a process that holds the folder, and returns when it does."""
    program = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def refusal(folder: Path, *, is_restart: bool = False) -> str:
    with pytest.raises(RunLockedError) as refused, locked(folder, is_restart=is_restart):
        pass
    assert refused.value.exit_status == 73
    return str(refused.value)


def test_a_second_run_is_refused_with_the_name_of_the_first_until_that_is_killed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    first = hold(folder)
    try:
        who = rf"a run \(host {os.uname().nodename}, pid {first.pid}, since .*\)"
        assert re.match(f"{folder}: in use by {who}", refusal(folder))
    finally:
        end(first)
    with locked(folder) as notice:  # at once: the kernel has freed it
        assert re.match(f"{folder}: {who} ended without releasing it; this run takes over", notice)
    assert not [*folder.iterdir()]
    with locked(folder) as notice:
        assert notice == ""


def test_only_a_restart_of_a_job_waits_for_its_earlier_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "RESTART_S", 0.2)
    monkeypatch.setattr(run_lock, "_POLL_S", 0.05)
    first = hold(tmp_path)
    try:
        refusal(tmp_path, is_restart=True)
    finally:
        threading.Timer(0.3, end, [first]).start()
    monkeypatch.setattr(run_lock, "RESTART_S", 60.0)
    with locked(tmp_path, is_restart=True) as notice:
        assert "takes over" in notice


Said = pytest.CaptureFixture[str]


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an earlier run, which a run of the quickstart would set aside. No worker may
    start."""
    forbidden = lambda *_, **__: pytest.fail("workers were started")  # noqa: E731
    monkeypatch.setattr(pretrain, "launch_local", forbidden)
    monkeypatch.chdir(tmp_path)
    run_dir = Path("runs/quickstart")
    run_dir.mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml"):
        (run_dir / name).touch()
    return run_dir


def test_a_second_start_moves_nothing_of_the_run_that_trains(
    earlier: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    recipe = named_recipe("quickstart")
    (earlier / "config.yaml").write_text(to_yaml(recipe))
    with locked(earlier):
        for resume in ("none", "auto"):
            assert pretrain.main(["quickstart", f"checkpoint.resume={resume}"]) == 73
            assert capsys.readouterr().err.startswith(f"error: {earlier}: in use by a run ")
        for setting in ("RANK=0", "WORLD_SIZE=8", "MASTER_ADDR=localhost", "MASTER_PORT=1"):
            monkeypatch.setenv(*setting.split("="))
        assert pretrain.main(["quickstart"]) == 73
        assert pretrain.main(["replay", str(earlier), "tensorboard"]) == 73
        left = {each.name for each in earlier.iterdir()}
        assert left == {"config.yaml", "metrics.jsonl", LOCK_FILE}
    assert [path.name for path in earlier.parent.iterdir()] == ["quickstart"]
