"""Ranks that another launcher has started watch each other: which of them is told to have failed,
and by whom."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from launch_targets import recipe_in

from parallel3d.launch import peer_monitor
from parallel3d.launch.devices import Place
from parallel3d.launch.failure import Failure
from parallel3d.launch.peer_monitor import PeerMonitor
from parallel3d.watch.heartbeat import Beat


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def monitor(store: dist.TCPStore, rank: int, places: list[Place]) -> PeerMonitor:
    own = dist.TCPStore(
        "127.0.0.1",
        store.port,
        is_master=False,
        wait_for_workers=False,
    )
    return PeerMonitor(own, rank, places, recipe_in(Path(), len(places)))


def lost_peer(rank: int) -> Failure:
    return Failure(
        rank=rank,
        coordinates="c",
        message="Connection closed by peer",
        secondary=True,
    )


def test_a_rank_that_was_alone_on_its_host_is_named_where_it_gives_no_sign(
    store: dist.TCPStore,
) -> None:
    """Rank 2 is on another host, and its heart has stopped. Two ranks have lost it, and both report
    the same."""
    places = [
        Place(host="here", pid=os.getpid()),
        Place(host="there", pid=os.getpid()),
        Place(host="lost", pid=1),
    ]
    monitors = [monitor(store, rank, places) for rank in range(2)]
    beat = Beat(
        count=9,
        step=3,
        step_s=0.1,
        phase="data",
        waits=False,
        stack="",
    )
    store.set("beat/2", beat.to_json())
    while not store.check(["beat/0", "beat/1"]):
        time.sleep(0.05)
    told = {}

    def report(rank: int) -> None:
        told[rank] = monitors[rank].report(lost_peer(rank))

    threads = [threading.Thread(target=report, args=[rank]) for rank in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [error.failure.rank for error in told.values()] == [2, 2]
    assert "dp_shard 2, cp 0, tp 0) gives no sign: it was killed or stopped" in str(told[0])
    assert sorted(error.is_ours for error in told.values()) == [False, True]


def test_where_all_give_a_sign_a_rank_tells_of_what_it_has_seen(store: dist.TCPStore) -> None:
    places = [Place(host=host, pid=os.getpid()) for host in ("here", "there")]
    monitors = [monitor(store, rank, places) for rank in range(2)]
    error = monitors[0].report(lost_peer(0))
    monitors[1].close()
    assert error.failure.rank == 0
    assert error.is_ours
    assert "Connection closed by peer" in str(error)


def test_a_neighbour_whose_process_has_ended_is_named_at_once(store: dist.TCPStore) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    places = [Place(host="here", pid=os.getpid()), Place(host="here", pid=gone.pid)]
    error = monitor(store, 0, places).report(lost_peer(0))
    assert "dp_shard 1, cp 0, tp 0) ended without an error message" in str(error)


@pytest.mark.parametrize("reporter", [0, 1])
def test_a_rank_that_reports_itself_is_left_alive_to_print_its_report(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reporter: int
) -> None:
    monkeypatch.chdir(tmp_path)  # the run's folder

    def end(exit_status: int) -> None:
        raise SystemExit(exit_status)

    monkeypatch.setattr(peer_monitor, "end_process", end)
    with subprocess.Popen(["sleep", "60"]) as stuck:
        places = [Place(host="here", pid=os.getpid()), Place(host="here", pid=stuck.pid)]
        cause = Failure(
            rank=1, coordinates="c", message="is stuck for 9 s", died=True, reporter=reporter
        )
        watcher = monitor(store, 0, places)
        watcher.close()  # its thread would end this process once the other one has ended
        with pytest.raises(SystemExit):
            watcher._end(cause)
        time.sleep(0.2)
        is_alive = stuck.poll() is None
        stuck.kill()
    assert is_alive == (reporter == 1)
