"""Workers on this machine: their start, every way they end, and that none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
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


def launched(target: str, world_size: int, folder: Path) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, PROGRAM, target, str(world_size), str(folder)]
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
    assert done.returncode == 0
    assert done.stderr == ""
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert [
        (one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in told
    ] == [(str(rank), str(rank), "3", "3") for rank in range(3)]
    for one in told:
        assert int(one["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 3)
    assert len({one["init_method"] for one in told}) == 1
    meeting_place = Path(told[0]["init_method"].removeprefix("file://")).parent
    assert not meeting_place.exists()
    assert outcome(tmp_path) == {"status": "done", "exit_status": 0, "rank": None, "reason": None}


@pytest.mark.parametrize(
    "target, world_size, status, line",
    [
        (
            "raises_on_rank_2",
            4,
            70,
            "rank 2 (*, pp 0, dp_replicate 0, dp_shard 2, cp 0, tp 0): ValueError: a bug of ours",
        ),
        ("diverges_on_rank_1", 2, 71, "rank 1 (*dp_shard 1, cp 0, tp 0): step 3: loss nan"),
        # the peers that lost it speak first
        ("loses_a_peer_before_the_cause_is_told", 3, 70, "rank 1 (*): ValueError: the cause"),
        (
            "is_killed_on_rank_3",
            4,
            70,
            "rank 3 (*dp_shard 3, cp 0, tp 0) was killed by SIGKILL; * out of memory *",
        ),
        ("reduces_until_rank_1_is_killed", 3, 70, "rank 1 (*) was killed by SIGKILL*"),
        ("all_refuse_alike", 3, 2, "train.device = cuda: this host has none"),
        (
            "rank_0_leaves_early",
            2,
            70,
            "rank 1 (*) still runs * after another rank was done; it hangs",
        ),
        ("exits_with_0", 1, 70, "rank 0 (*): SystemExit: 0"),
        ("ends_at_once_with_0", 1, 70, "rank 0 (*) ended with status 0 before its work was done"),
    ],
)
def test_the_cause_of_a_failure_is_told_once_and_all_ranks_end(
    target: str, world_size: int, status: int, line: str, tmp_path: Path
) -> None:
    done = launched(target, world_size, tmp_path)
    first, *rest = done.stderr.splitlines()
    assert done.returncode == status
    assert outcome(tmp_path)["exit_status"] == status
    assert fnmatch(first, f"error: {line}"), done.stderr
    assert "error:" not in "".join(rest)
    # only a bug has a traceback
    has_traceback = "ValueError" in line or "SystemExit" in line
    assert ("Traceback" in done.stderr) == bool(rest) == has_traceback
    for pid in signed_in(tmp_path, 0):
        assert not is_alive(pid)


def test_a_rank_of_another_launcher_that_exits_with_status_0_is_a_failure(tmp_path: Path) -> None:
    recipe = Recipe(
        model=ModelConfig(
            layers=1,
            hidden=8,
            heads=2,
            ffn_hidden=8,
            vocab=16,
        ),
        train=TrainConfig(steps=1, global_batch_size=1, seq_len=4),
        run_dir=str(tmp_path),
    )
    where = Rendezvous(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        init_method="env://",
    )
    assert run_rank(lambda: sys.exit(0), recipe, where) == (70, False)
    assert "SystemExit: 0" in outcome(tmp_path)["reason"]


@pytest.mark.parametrize(
    "target, signum, status",
    [
        ("sleeps", signal.SIGINT, 130),
        ("sleeps", signal.SIGTERM, 143),
        ("sleeps_and_ignores_sigterm", signal.SIGTERM, 143),  # at the second one
    ],
)
def test_a_stopped_launcher_takes_its_workers_down(
    tmp_path: Path, target: str, signum: signal.Signals, status: int
) -> None:
    launcher = start(target, tmp_path)
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
    for pid in pids:
        assert not is_alive(pid)
    assert outcome(tmp_path)["exit_status"] == status


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_worker_outlives_a_killed_launcher_not_even_a_stopped_one(tmp_path: Path) -> None:
    launcher = start("beats_without_a_pause", tmp_path)
    pids = signed_in(tmp_path, 3)
    store = Path((tmp_path / "store").read_text().removeprefix("file://"))
    time.sleep(1)  # the first beat comes after half a second
    os.kill(pids[1], signal.SIGSTOP)  # it cannot run its own thread: the kernel has to kill it
    launcher.kill()
    launcher.communicate(timeout=20)
    all_end(pids)
    assert not store.parent.exists()


def start(target: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, PROGRAM, target, "3", str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # What a shell starts with & ignores Ctrl-C, and so would all that it starts: these tests,
        # too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def signed_in(folder: Path, world_size: int) -> list[int]:
    """The process ids of all workers, once each has begun."""
    wait_until(lambda: len([*folder.glob("*.pid")]) >= world_size, 30)
    return [int(file.read_text()) for file in folder.glob("*.pid")]


def wait_until(what: Callable[[], bool], within_s: float, said: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, said()
        time.sleep(0.01)


def all_end(pids: Sequence[int], within_s: float = 10.0) -> None:
    wait_until(lambda: not any(is_alive(pid) for pid in pids), within_s)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
}
MASTER = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environ, tasks",
    [
        (TORCHRUN, 4),
        (SLURM, 4),
        (TORCHRUN | SLURM, 4),
        (SLURM | {"SLURM_NNODES": "3"}, 3),  # on the fullest node
        (SLURM | {"SLURM_NNODES": "8", "SLURM_STEP_NUM_NODES": "4"}, 2),
    ],
)
def test_a_launchers_environment_says_who_a_worker_is(environ: dict[str, str], tasks: int) -> None:
    assert Rendezvous.from_environment(environ | MASTER) == Rendezvous(
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=tasks,
        init_method="env://",
    )


@pytest.mark.parametrize(
    "environ, message",
    [
        (TORCHRUN | {"MASTER_PORT": "1"}, "and MASTER_ADDR must name the host of rank 0"),
        (TORCHRUN | {"MASTER_ADDR": "host0"}, "MASTER_PORT = None: must be an integer"),
        (TORCHRUN | MASTER | {"RANK": "one"}, "RANK = one: must be an integer"),
        (TORCHRUN | MASTER | {"RANK": "8"}, "RANK = 8: must be below WORLD_SIZE = 8"),
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


def test_an_aborted_rank_is_the_cause_where_the_others_have_merely_lost_it() -> None:
    """A survivor may speak before the launcher has seen the end of the one that it has lost."""
    survivor = Failure(
        rank=0,
        coordinates="c",
        message="m",
        secondary=True,
        at=1.0,
    )
    aborted = replace(survivor, rank=1, died=True, at=2.0)
    killed = replace(aborted, rank=2, secondary=False, at=3.0)
    assert root_cause([survivor, aborted]).rank == 1
    # gloo aborts a process that loses a peer
    assert root_cause([survivor, aborted, killed]).rank == 2
