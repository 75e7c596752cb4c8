"""One run, one folder: who holds it is named, the lock of a process that has gone is taken over, a live one is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from parallel3d.config.load import load_recipe, to_yaml
from parallel3d.config.recipe import Recipe
from parallel3d.errors import RunLockedError
from parallel3d.launch import devices, run_lock
from parallel3d.launch.run_lock import LOCK_FILE, LockHolder, RunLock
from parallel3d.models import shape_cards
from parallel3d.recipes import find_recipe, pretrain

HOLD = """
import os, sys, time
from pathlib import Path
from parallel3d.launch import run_lock
run_lock._BEAT_S = 0.01
with run_lock.RunLock(Path(sys.argv[1])):
    if sys.argv[2:] == ["fork"] and os.fork() == 0:
        os.close(1), os.close(2)
        time.sleep(1000)
    print("held", flush=True)
    time.sleep(1000)
"""


def hold(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Starts a process that holds the folder, and returns when it does."""
    program = [sys.executable, "-c", HOLD, str(folder), *more]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def leave(folder: Path, holder: LockHolder, *, silent_s: float) -> None:
    """Writes the lock file of a run whose last heartbeat was so long ago."""
    folder.mkdir(exist_ok=True)
    (folder / LOCK_FILE).write_bytes(holder.text())
    os.utime(folder / LOCK_FILE, (time.time() - silent_s,) * 2)


ELSEWHERE = LockHolder(host="node7", pid=77, run_id="0badcafe", since="2026-01-02 03:04:05 +0000", machine="its kernel")


def test_a_second_run_is_refused_with_the_name_of_the_first_until_that_is_killed(tmp_path: Path) -> None:
    first = hold(tmp_path / "run")
    try:
        holder = LockHolder(**json.loads((tmp_path / "run" / LOCK_FILE).read_text()))
        with pytest.raises(RunLockedError) as refused:
            RunLock(tmp_path / "run")
        said = str(refused.value)
        assert refused.value.exit_status == 73
        who = f"run {holder.run_id} (host {os.uname().nodename}, pid {first.pid}, since {holder.since})"
        assert said.startswith(f"{tmp_path / 'run'}: {who} writes there")
        assert f"stop it (kill {first.pid};" in said
    finally:
        end(first)
    with RunLock(tmp_path / "run") as lock:  # at once: the kernel has freed it
        assert lock.notice == f"{tmp_path / 'run'}: {holder} did not close it, and its process has gone: taken over"


def test_a_run_that_ends_leaves_no_lock_and_no_empty_folder(tmp_path: Path) -> None:
    with RunLock(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK_FILE).exists()
    assert not (tmp_path / "run").exists()
    for _ in range(2):
        with RunLock(tmp_path / "run") as lock:
            (tmp_path / "run" / "metrics.jsonl").touch()
            assert lock.notice == ""
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_forked_process_that_outlives_the_run_does_not_hold_its_folder(tmp_path: Path) -> None:
    first = hold(tmp_path / "run", "fork")
    (child,) = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    end(first)
    try:
        os.kill(int(child), 0)
        RunLock(tmp_path / "run").__exit__(None, None, None)
    finally:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("silent_s", [0, 50])
def test_a_run_of_another_host_is_left_alone_while_its_heart_beats(tmp_path: Path, silent_s: float) -> None:
    leave(tmp_path, ELSEWHERE, silent_s=silent_s)
    with pytest.raises(RunLockedError, match=r"run 0badcafe \(host node7, pid 77, .* stop it \(kill 77 on node7;"):
        RunLock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
    assert (tmp_path / LOCK_FILE).read_bytes() == ELSEWHERE.text()


def test_a_run_of_another_host_without_a_heartbeat_is_taken_over(tmp_path: Path) -> None:
    leave(tmp_path, ELSEWHERE, silent_s=70)
    with RunLock(tmp_path) as lock:
        assert lock.notice == f"{tmp_path}: {ELSEWHERE} did not close it, and its heartbeat is 70 s old: taken over"
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_a_job_that_its_launcher_starts_again_elsewhere_takes_over_its_own_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job5")
    leave(tmp_path, replace(ELSEWHERE, job="torchrun job6"), silent_s=0)
    with pytest.raises(RunLockedError):
        RunLock(tmp_path, is_restart=True)
    leave(tmp_path, replace(ELSEWHERE, job="torchrun job5"), silent_s=0)
    with pytest.raises(RunLockedError):  # another job of the same name, which is no restart
        RunLock(tmp_path)
    with RunLock(tmp_path, is_restart=True) as lock:
        assert "taken over" in lock.notice


@pytest.mark.parametrize("name", ["none", ""])
def test_a_launcher_that_gives_its_job_no_name_shares_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    leave(tmp_path, replace(ELSEWHERE, job=LockHolder().job), silent_s=0)
    with pytest.raises(RunLockedError):
        RunLock(tmp_path, is_restart=True)


def test_the_lock_file_may_be_removed_by_anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_BEAT_S", 0.01)
    with RunLock(tmp_path):
        for spoil in (Path.unlink, lambda path: path.write_text("[" * 5000)):
            spoil(tmp_path / LOCK_FILE)
            with pytest.raises(RunLockedError):  # the folder itself is locked
                RunLock(tmp_path)
            deadline = time.monotonic() + 30
            while _pid_in(tmp_path) != os.getpid():  # the next heartbeat writes it again
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def _pid_in(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / LOCK_FILE).read_text())["pid"])
    except (OSError, ValueError, RecursionError):
        return None


def test_a_run_whose_folder_was_taken_over_while_it_slept_ends(tmp_path: Path) -> None:
    first = hold(tmp_path)
    taken = tmp_path / "taken"
    taken.write_bytes(ELSEWHERE.text())
    taken.rename(tmp_path / LOCK_FILE)
    assert first.wait(timeout=60) == 73
    _, said = first.communicate()
    assert said == f"error: {tmp_path}: {ELSEWHERE} has taken it over, so this run ends\n"
    assert (tmp_path / LOCK_FILE).read_bytes() == ELSEWHERE.text()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xff" * 20, b"[" * 50_000, b'{"pid": 1}', json.dumps({**asdict(ELSEWHERE), "pid": "\x1b[31m"}).encode()],
)
def test_a_lock_file_that_says_nothing_is_believed_by_its_heartbeat_alone(tmp_path: Path, garbage: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(garbage)
    with pytest.raises(RunLockedError, match=r": another run writes there; try another run_dir"):
        RunLock(tmp_path)
    os.utime(tmp_path / LOCK_FILE, (0, 0))
    with RunLock(tmp_path) as lock:
        assert lock.notice == ""


Said = pytest.CaptureFixture[str]


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an earlier run, which a run of the quickstart would set aside."""
    monkeypatch.chdir(tmp_path)
    run_dir = Path("runs/quickstart")
    run_dir.mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml"):
        (run_dir / name).touch()
    return run_dir


def test_a_second_start_moves_nothing_of_the_run_that_trains(
    earlier: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setattr(pretrain, "launch_local", lambda *_, **__: pytest.fail("workers were started"))
    recipe = load_recipe(find_recipe("quickstart"), cards=shape_cards())
    (earlier / "config.yaml").write_text(to_yaml(recipe))
    with RunLock(earlier):
        for resume in ("none", "auto"):
            assert pretrain.main(["quickstart", f"checkpoint.resume={resume}"]) == 73
            assert capsys.readouterr().err.startswith(f"error: {earlier}: run ")
        for name, value in {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        assert pretrain.main(["quickstart"]) == 73
        assert pretrain.main(["replay", str(earlier), "tensorboard"]) == 73
        assert sorted(each.name for each in earlier.iterdir()) == ["config.yaml", "metrics.jsonl", LOCK_FILE]
    assert [path.name for path in earlier.parent.iterdir()] == ["quickstart"]


def test_a_device_that_is_refused_moves_nothing(earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of this host asks torch for all ranks before the folder of the earlier run is touched."""
    asked: list[str] = []

    def launch(target: str, recipe: Recipe, world_size: int, **options: object) -> int:
        asked.append(target)
        assert (recipe.run_dir, world_size) == (None, 1)
        return 2

    monkeypatch.setattr(pretrain, "launch_local", launch)
    monkeypatch.setattr(devices, "has_gpu_files", lambda: True)
    assert pretrain.main(["quickstart", "train.device=cuda"]) == 2
    assert asked == ["parallel3d.launch.devices:check_devices"]
    assert [path.name for path in earlier.parent.iterdir()] == ["quickstart"]
    assert sorted(each.name for each in earlier.iterdir()) == ["config.yaml", "metrics.jsonl"]
    assert (earlier / "config.yaml").read_text() == ""


def test_a_checkpoint_that_is_none_is_refused_before_any_worker_starts(
    earlier: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setattr(pretrain, "launch_local", lambda *_, **__: pytest.fail("workers were started"))
    assert pretrain.main(["quickstart", "checkpoint.resume=runs"]) == 2
    assert "checkpoint.resume = runs: is no checkpoint" in capsys.readouterr().err
    assert (earlier / "config.yaml").read_text() == ""
