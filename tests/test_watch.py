"""Who is at fault when a run makes no progress, judged from the beats of its ranks; and what a beat
shows of a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from parallel3d.watch import heartbeat
from parallel3d.watch.hang_detector import HangDetector, process_state
from parallel3d.watch.heartbeat import Beat, Heartbeat, beats_to_file, phase

COMPUTES = "forward or backward"


class Story:
    """Beats of some ranks, half a second apart, and what the detector says of them. The rank that
    `busy` names is in that phase; all others wait."""

    def __init__(self, hosts: str = "aaaa", step_s: float | None = 0.2) -> None:
        self.detector = HangDetector(list(hosts), "a")
        self.now = 100.0
        self.count = 0
        self.hosts = hosts
        self.step_s = step_s
        self.last: dict[int, Beat] = {}
        self.go_on(1.0, steps=True)

    def go_on(
        self,
        seconds: float,
        *,
        silent: tuple[int, ...] = (),
        busy: Mapping[int, str] | None = None,
        states: Mapping[int, str] | None = None,
        steps: bool = False,
    ) -> tuple[int, str] | None:
        """Returns what the detector finds first within so many seconds."""
        for _ in range(round(seconds / 0.5)):
            self.now = self.now + 0.5
            self.count = self.count + 1
            for rank in {*range(len(self.hosts))} - {*silent}:
                phase = (busy or {}).get(rank)
                self.last[rank] = Beat(
                    count=self.count,
                    step=self.count if steps else 7,
                    step_s=self.step_s,
                    phase=phase or COMPUTES,
                    waits=phase is None,
                    stack="mlp.py:3 (forward)",
                )
            if found := self.detector.check(self.last, states or {}, self.now):
                return found
        return None


EVERYBODY_READS = dict.fromkeys(range(4), "data")
STUCK = r"is stuck for \d+ s in {} after step 7, {}; mlp\.py:3 "


@pytest.mark.parametrize(
    "fault, hosts, not_within_s, rank, said",
    [
        (
            {"silent": (2,), "states": {2: "T"}},
            "aaaa",
            2,
            2,
            rf"is stopped \(state T\) in {COMPUTES} after",
        ),
        ({"busy": {2: "data"}}, "aaaa", 6.5, 2, STUCK.format("data", "while the others wait")),
        (
            {"busy": {2: "optimizer"}},
            "aaaa",
            6.5,
            2,
            STUCK.format("optimizer", "while the others wait"),
        ),
        ({"busy": EVERYBODY_READS}, "aaaa", 59, 0, STUCK.format("data", "as are all others")),
        (
            {"silent": (3,), "states": {3: "R"}},
            "aaaa",
            6.5,
            3,
            r".*: its interpreter is held \(state R\)",
        ),
        (
            {"silent": (2, 3)},
            "aabb",
            3.5,
            2,
            ".*, like all 2 ranks on its host: the host is lost or cut off",
        ),
        ({"silent": (2,)}, "aab", 6.5, 2, ".*: its host is lost or its interpreter is held"),
    ],
)
def test_the_rank_at_fault_is_named_in_time_and_not_too_early(
    fault: dict[str, Any], hosts: str, not_within_s: float, rank: int, said: str
) -> None:
    story = Story(hosts)
    assert story.go_on(not_within_s, **fault) is None
    assert story.go_on(1, steps=True) is None  # it was no fault, and the clock begins anew
    assert story.go_on(not_within_s, **fault) is None
    found = story.go_on(3, **fault)
    assert found is not None and found[0] == rank and re.match(said, found[1]), found


@pytest.mark.parametrize(
    "step_s, more",
    [
        (0.2, {"steps": True, "busy": {2: "data"}}),
        (0.2, {}),  # all wait, and the time-out decides
        (0.2, {"busy": dict.fromkeys(range(4), COMPUTES)}),
        (0.2, {"busy": {0: "save"}}),
        (None, {"busy": {0: COMPUTES}}),  # before the second step
        (None, {"silent": (3,), "states": {3: "R"}}),
    ],
)
def test_nobody_is_named_for_what_may_take_long(step_s: float | None, more: dict[str, Any]) -> None:
    assert Story(step_s=step_s).go_on(600, **more) is None


def test_a_save_does_not_count_when_the_rank_continues() -> None:
    story = Story()
    assert story.go_on(300, busy={0: "save"}) is None
    assert story.go_on(6.5, busy={0: COMPUTES}) is None
    assert story.go_on(3, busy={0: COMPUTES}) is not None


def test_a_slow_step_has_the_time_of_five() -> None:
    story = Story(step_s=30.0)
    assert story.go_on(149, busy={0: "optimizer"}) is None
    assert story.go_on(5, busy={0: "optimizer"}) is not None


def test_a_job_that_is_stopped_and_continued_as_a_whole_starts_all_clocks_anew() -> None:
    story = Story("aabb")
    story.go_on(3, busy={1: "data"})
    story.now += 3600  # the watcher was stopped with them
    assert story.go_on(3, silent=(2, 3), busy={1: "data"}) is None
    assert story.go_on(8, busy={1: "data"}, steps=True) is None


def beat_of_main_thread(own: Heartbeat) -> Beat:
    """Returns a beat that another thread makes, as in a run."""
    seen: list[Beat] = []
    thread = threading.Thread(target=lambda: (time.sleep(0.05), seen.append(own.beat())))
    thread.start()
    thread.join()
    return seen[0]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    """The heartbeat of this process, anew."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT", Heartbeat())
    return heartbeat.HEARTBEAT


def test_a_beat_shows_the_steps_the_phase_and_where_the_main_thread_is(own: Heartbeat) -> None:
    heartbeat.step_done(1)
    heartbeat.step_done(2)
    with phase("evaluation"), phase("save"):
        found = beat_of_main_thread(own)
    assert found.count == 1
    assert found.step == 2
    assert found.phase == "save"
    assert not found.waits
    assert found.step_s is not None
    assert found.step_s < 1
    assert "threading.py" in found.stack
    assert "test_watch.py" in found.stack
    assert Beat.from_json(found.to_json()) == found
    assert beat_of_main_thread(own).phase == "other"


def test_the_code_that_waits_for_other_ranks_says_so(own: Heartbeat) -> None:
    from parallel3d.shared_memory import ring

    with phase("forward or backward", waits=True):
        assert beat_of_main_thread(own).waits
    source = "def wait(look): return look()"
    for module, waits in ((vars(ring), True), ({"__name__": "parallel3d.data.loader"}, False)):
        names = dict(module)
        exec(source, names)
        assert names["wait"](lambda: beat_of_main_thread(own)).waits is waits
    names = {"__name__": "torch.distributed.distributed_c10d"}
    exec(source, names)
    assert names["wait"](lambda: beat_of_main_thread(own)).waits  # type: ignore[operator]


def test_beats_are_read_from_a_file_and_the_last_says_that_the_rank_is_done(
    own: Heartbeat, tmp_path: Path
) -> None:
    with beats_to_file(tmp_path / "beat"), phase("optimizer"):
        while not (tmp_path / "beat").exists():
            time.sleep(0.05)
        assert Beat.from_json((tmp_path / "beat").read_text()).phase == "optimizer"
    assert Beat.from_json((tmp_path / "beat").read_text()).phase == "other"


def test_the_state_of_a_process_is_linuxs_letter() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGSTOP)
    while (state := process_state(process.pid)) not in "tT":
        time.sleep(0.01)
    assert state == "T"
    process.kill()
    process.wait()
    assert process_state(process.pid) == ""
