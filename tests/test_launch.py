"""Workers on this machine: their start, every way they end, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import launch_targets
import pytest

from parallel3d.config.recipe import ModelConfig, Recipe, TrainConfig
from parallel3d.errors import ConfigError, NonFiniteError, RankError, RendezvousError
from parallel3d.launch.failure import Failure, is_lost_peer, root_cause
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.recipes.pretrain import run_rank

PROGRAM = launch_targets.__file__


def launched(
    target: str, world_size: int, folder: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, PROGRAM, target, str(world_size), str(folder), *options]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60)


def outcome(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "outcome.json").read_text())
    assert isinstance(found, dict)
    return found


def test_all_ranks_run_and_know_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = launched("tells_its_environment", 3, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert [
        (one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in told
    ] == [(str(rank), str(rank), "3", "3") for rank in range(3)]
    assert all(
        int(one["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3) for one in told
    )
    assert len({one["init_method"] for one in told}) == 1
    meeting_place = Path(told[0]["init_method"].removeprefix("file://")).parent
    assert not meeting_place.exists()
    assert outcome(tmp_path) == {"status": "done", "exit_status": 0, "rank": None, "reason": None}


def test_a_bug_on_one_rank_is_told_once_with_its_traceback_and_ends_all(tmp_path: Path) -> None:
    done = launched("raises_on_rank_2", 4, tmp_path)
    assert done.returncode == 70
    first, *rest = done.stderr.splitlines()
    assert first.startswith("error: rank 2 (")
    assert first.endswith(", pp 0, dp_replicate 0, dp_shard 2, tp 0): ValueError: a bug of ours")
    assert done.stderr.count("Traceback") == 1
    assert "raises_on_rank_2" in "\n".join(rest)
    assert outcome(tmp_path)["rank"] == 2
    assert not any(is_alive(pid) for pid in signed_in(tmp_path, 4))


def test_a_foreseen_error_has_its_own_status_and_a_traceback_only_if_wanted(tmp_path: Path) -> None:
    done = launched("diverges_on_rank_1", 2, tmp_path)
    assert done.returncode == 71
    assert done.stderr.endswith("dp_shard 1, tp 0): step 3: loss nan\n")
    assert len(done.stderr.splitlines()) == 1
    assert outcome(tmp_path)["exit_status"] == 71
    assert "Traceback" in launched("diverges_on_rank_1", 2, tmp_path, "--verbose").stderr


def test_the_cause_is_told_and_not_the_peers_that_lost_it_though_they_speak_first(
    tmp_path: Path,
) -> None:
    done = launched("loses_a_peer_before_the_cause_is_told", 3, tmp_path)
    assert done.returncode == 70
    assert done.stderr.startswith("error: rank 1 (")
    assert "the cause" in done.stderr
    assert "Connection closed" not in done.stderr


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    done = launched("is_killed_on_rank_3", 4, tmp_path)
    assert done.returncode == 70
    assert len(done.stderr.splitlines()) == 1
    assert "error: rank 3 (" in done.stderr
    assert "dp_shard 3, tp 0) was killed by SIGKILL" in done.stderr
    assert "out of memory" in done.stderr


def test_a_rank_killed_in_a_collective_is_named_and_not_its_peers(tmp_path: Path) -> None:
    done = launched("reduces_until_rank_1_is_killed", 3, tmp_path)
    assert done.returncode == 70
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")][0].startswith(
        "error: rank 1 ("
    )
    assert "was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_all_ranks_say_alike_is_told_without_a_rank(tmp_path: Path) -> None:
    done = launched("all_refuse_alike", 3, tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: train.device = cuda: this host has none\n")


def test_ranks_that_stay_when_another_is_done_are_a_hang(tmp_path: Path) -> None:
    done = launched("rank_0_leaves_early", 2, tmp_path)
    assert done.returncode == 70
    assert "error: rank 1 (" in done.stderr
    assert "after another rank was done; it hangs" in done.stderr


def test_a_worker_that_exits_early_with_status_0_is_a_failure_with_its_cause(
    tmp_path: Path,
) -> None:
    causes = {
        "exits_with_0": "SystemExit: 0",
        "ends_at_once_with_0": "ended with status 0 before its work was done",
    }
    for target, cause in causes.items():
        done = launched(target, 1, tmp_path)
        assert done.returncode == 70 and cause in done.stderr.splitlines()[0], done.stderr
        assert outcome(tmp_path)["exit_status"] == 70


def test_a_rank_of_another_launcher_that_exits_with_status_0_is_a_failure(tmp_path: Path) -> None:
    recipe = Recipe(
        model=ModelConfig(layers=1, hidden=8, heads=2, ffn_hidden=8, vocab=16),
        train=TrainConfig(steps=1, global_batch_size=1, seq_len=4),
        run_dir=str(tmp_path),
    )
    where = Rendezvous(rank=0, local_rank=0, world_size=1, local_world_size=1, init_method="env://")
    assert run_rank(lambda: sys.exit(0), recipe, where) == (70, False)
    assert "SystemExit: 0" in outcome(tmp_path)["reason"]


@pytest.mark.parametrize(
    ("target", "signum", "status"),
    [
        ("sleeps", signal.SIGINT, 130),
        ("sleeps", signal.SIGTERM, 143),
        ("sleeps_and_ignores_sigterm", signal.SIGTERM, 143),  # at the second one
    ],
)
def test_a_stopped_launcher_takes_its_workers_down(
    tmp_path: Path, target: str, signum: signal.Signals, status: int
) -> None:
    launcher = start(target, 3, tmp_path)
    pids = signed_in(tmp_path, 3)
    if signum == signal.SIGINT:
        os.killpg(launcher.pid, signum)  # as the terminal does at Ctrl-C
    else:
        launcher.send_signal(signum)
        if "ignores" in target:
            time.sleep(1.1)  # what comes sooner is the same request, sent twice
            launcher.send_signal(signum)
    _, stderr = launcher.communicate(timeout=20)
    assert launcher.returncode == status
    assert stderr == f"error: stopped by {signum.name}\n"
    assert not any(is_alive(pid) for pid in pids)
    assert outcome(tmp_path)["exit_status"] == status


def test_what_nohup_ignores_stays_ignored_by_the_launcher_and_its_workers(tmp_path: Path) -> None:
    launcher = start("sleeps", 2, tmp_path, "nohup")
    pids = signed_in(tmp_path, 2)
    os.killpg(launcher.pid, signal.SIGHUP)  # it would be heard before a signal of a higher number
    launcher.send_signal(signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=20)
    assert stderr.splitlines()[-1] == "error: stopped by SIGTERM"
    assert launcher.returncode == 143
    assert not any(is_alive(pid) for pid in pids)


def test_workers_may_save_and_end_at_the_first_sigterm(tmp_path: Path) -> None:
    launcher = start("saves_at_sigterm", 3, tmp_path)
    signed_in(tmp_path, 3)
    launcher.send_signal(signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=20)
    assert (launcher.returncode, stderr) == (75, "error: stopped after step 7, saved\n")
    assert outcome(tmp_path)["exit_status"] == 75


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_worker_outlives_a_killed_launcher_not_even_a_stopped_one(tmp_path: Path) -> None:
    launcher = start("sleeps", 3, tmp_path)
    pids = signed_in(tmp_path, 3)
    os.kill(pids[1], signal.SIGSTOP)
    launcher.kill()
    launcher.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(pid) for pid in pids)


def start(target: str, world_size: int, folder: Path, *before: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, PROGRAM, target, str(world_size), str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What a shell starts with & ignores Ctrl-C, and so would all that it starts: these tests,
        # too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def signed_in(folder: Path, world_size: int) -> list[int]:
    """The process ids of all workers, once each has begun."""
    deadline = time.monotonic() + 30
    while len(found := list(folder.glob("*.pid"))) < world_size:
        assert time.monotonic() < deadline, f"only {len(found)} workers began"
        time.sleep(0.02)
    return [int(file.read_text()) for file in found]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
}
MASTER = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environ", [TORCHRUN | MASTER, SLURM | MASTER, TORCHRUN | SLURM | MASTER])
def test_a_launchers_environment_says_who_a_worker_is(environ: dict[str, str]) -> None:
    assert Rendezvous.from_environment(environ) == Rendezvous(
        rank=5, local_rank=1, world_size=8, local_world_size=4, init_method="env://"
    )


@pytest.mark.parametrize(
    ("environ", "tasks"),
    [
        ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_TASKS_PER_NODE": "4,2(x3)", "SLURM_NODEID": "2"}, 2),
        # the step's own
        ({"SLURM_STEP_TASKS_PER_NODE": "3,7", "SLURM_TASKS_PER_NODE": "9", "SLURM_NODEID": "1"}, 7),
        ({"SLURM_NNODES": "3"}, 3),  # of 8 tasks, on the fullest node
        ({}, 8),
    ],
)
def test_slurm_says_how_many_tasks_a_node_has(environ: dict[str, str], tasks: int) -> None:
    known = {name: value for name, value in SLURM.items() if name != "SLURM_NTASKS_PER_NODE"}
    found = Rendezvous.from_environment(known | MASTER | environ)
    assert found is not None
    assert found.local_world_size == tasks


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN, "MASTER_ADDR is not set"),
        (TORCHRUN | {"MASTER_ADDR": "host0"}, "MASTER_PORT is not set"),
        (TORCHRUN | MASTER | {"RANK": "one"}, "RANK = one: must be a whole number"),
        (TORCHRUN | MASTER | {"RANK": "8"}, "RANK = 8: must be below WORLD_SIZE = 8"),
        (
            SLURM | MASTER | {"SLURM_TASKS_PER_NODE": "4x2"},
            "SLURM_TASKS_PER_NODE = 4x2: must be numbers of tasks",
        ),
    ],
)
def test_a_half_set_environment_is_refused(environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rendezvous.from_environment(environ)


def lost_peers() -> Iterator[BaseException]:
    yield RankError("rank 3 died")
    yield RendezvousError("not met")
    yield ConnectionResetError("[Errno 104]")
    yield RuntimeError(
        "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3"
    )
    yield RuntimeError("NCCL communicator was aborted on rank 1.")
    yield RuntimeError("Timed out waiting 3000ms for recv operation to complete")
    wrapped = ValueError("step failed")
    wrapped.__cause__ = BrokenPipeError("gone")
    yield wrapped


@pytest.mark.parametrize("error", list(lost_peers()), ids=repr)
def test_the_loss_of_a_peer_is_recognised(error: BaseException) -> None:
    assert is_lost_peer(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shape"),
        NonFiniteError("timed out of luck"),
        RuntimeError("out of memory"),
        KeyError("peer"),
    ],
)
def test_an_error_of_the_ranks_own_is_not_taken_for_the_loss_of_a_peer(
    error: BaseException,
) -> None:
    assert not is_lost_peer(error)


def test_a_failure_names_the_flight_record_that_nccl_has_written(tmp_path: Path) -> None:
    failure = Failure(rank=3, host="h", coordinates="c", message="was killed by SIGABRT", died=True)
    assert failure.with_record(str(tmp_path)) == failure
    record = tmp_path / "nccl_flight_record_rank_3"
    record.touch()
    assert failure.with_record(str(tmp_path)).line() == (
        f"rank 3 (h, c) was killed by SIGABRT; NCCL's flight record: {record}"
    )


def test_an_aborted_rank_is_the_cause_where_the_others_have_merely_lost_it() -> None:
    """A survivor may speak before the launcher has seen the end of the one that it has lost."""

    def failure(rank: int, at: float, *, aborted: bool = False, secondary: bool = True) -> Failure:
        return Failure(
            rank=rank,
            host="h",
            coordinates="c",
            message="m",
            died=aborted,
            secondary=secondary,
            at=at,
        )

    survivor, aborted, killed = (
        failure(0, 1.0),
        failure(1, 2.0, aborted=True),
        failure(2, 3.0, secondary=False),
    )
    assert root_cause([survivor, aborted]).rank == 1
    # gloo aborts a process that loses a peer
    assert root_cause([survivor, aborted, killed]).rank == 2
