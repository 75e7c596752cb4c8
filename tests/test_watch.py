"""Who is at fault when a run makes no progress, judged from the beats of its ranks; and what a beat
shows of a process."""

from __future__ import annotations

import gc
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from parallel3d.watch import heartbeat
from parallel3d.watch.hang_detector import HangDetector, process_state
from parallel3d.watch.heartbeat import Beat, Heartbeat, beat_file, beats_to_file, phase

STEP_S = 0.2


def beat(
    count: int, *, step: int = 7, waits: bool = True, phase: str = "forward or backward"
) -> Beat:
    return Beat(
        count=count, step=step, step_s=STEP_S, phase=phase, waits=waits, stack="mlp.py:3 (forward)"
    )


class Story:
    """Beats of some ranks, half a second apart, and what the detector says of them."""

    def __init__(self, hosts: str = "aaaa", own: str = "a") -> None:
        self.detector = HangDetector(list(hosts), own)
        self.now, self.count, self.hosts = 100.0, 0, hosts
        self.last: dict[int, Beat] = {}
        self.go_on(0.5)

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
        last = self.last
        for _ in range(round(seconds / 0.5)):
            self.now, self.count = self.now + 0.5, self.count + 1
            for rank in range(len(self.hosts)):
                if rank not in silent:
                    phase = (busy or {}).get(rank)
                    step = self.count if steps else 7
                    last[rank] = beat(
                        self.count,
                        step=step,
                        waits=phase is None,
                        phase=phase or "forward or backward",
                    )
            if found := self.detector.check(last, states or {}, self.now):
                return found
        return None


def test_a_run_that_steps_is_left_alone() -> None:
    assert Story().go_on(600, steps=True, busy={2: "data"}) is None


def test_a_stopped_rank_is_named_in_a_few_seconds_and_not_at_once() -> None:
    story, rank = Story(), 2
    assert story.go_on(2, silent=(rank,), states={rank: "T"}) is None
    found = story.go_on(2, silent=(rank,), states={rank: "T"})
    assert found is not None and found[0] == rank
    assert "is stopped (state T) in forward or backward after step 7" in found[1]


@pytest.mark.parametrize("phase", ["data", "optimizer"])
def test_the_rank_that_keeps_the_others_waiting_is_named(phase: str) -> None:
    story = Story()
    story.go_on(1, steps=True)
    assert story.go_on(6.5, busy={2: phase}) is None
    found = story.go_on(3, busy={2: phase})
    assert found is not None and found[0] == 2
    assert (
        "is stuck for 8 s" in found[1]
        and f"in {phase} after step 7" in found[1]
        and "mlp.py:3" in found[1]
    )


def test_a_save_may_take_long_on_one_rank_and_does_not_count_when_the_rank_continues() -> None:
    story = Story()
    assert story.go_on(300, busy={0: "save"}) is None
    assert story.go_on(6.5, busy={0: "forward or backward"}) is None
    found = story.go_on(3, busy={0: "forward or backward"})
    assert found is not None and found[0] == 0 and "is stuck for 8 s" in found[1]


def test_where_all_read_for_a_minute_the_first_is_named_with_its_stack() -> None:
    story = Story()
    story.go_on(5, steps=True)
    everybody, computing = (
        dict.fromkeys(range(4), "data"),
        dict.fromkeys(range(4), "forward or backward"),
    )
    assert story.go_on(59, busy=everybody) is None
    assert story.go_on(300, busy=computing) is None
    assert story.go_on(59, busy=everybody) is None  # the clock began anew
    found = story.go_on(3, busy=everybody)
    assert found is not None and found[0] == 0
    assert re.match(r"is stuck for 6\d s in data after step 7, as are all others; ", found[1])


def test_where_all_wait_nobody_is_named_and_the_time_out_decides() -> None:
    assert Story().go_on(300) is None


def test_a_slow_step_has_the_time_of_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.STEP_S", 30.0)
    story = Story()
    assert story.go_on(149, busy={0: "optimizer"}) is None
    assert story.go_on(5, busy={0: "optimizer"}) is not None


def test_before_the_second_step_nobody_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.STEP_S", None)
    assert Story().go_on(600, busy={0: "forward or backward"}) is None
    assert Story().go_on(600, silent=(3,), states={3: "R"}) is None


def test_a_held_interpreter_is_named_after_ten_seconds() -> None:
    story = Story()
    story.go_on(1)
    assert story.go_on(6.5, silent=(3,), states={3: "R"}) is None
    found = story.go_on(2, silent=(3,), states={3: "R"})
    assert found is not None and found[0] == 3 and "its interpreter is held (state R)" in found[1]


def test_a_host_that_is_cut_off_is_named_within_five_seconds_and_not_for_two() -> None:
    story = Story("aabb")
    story.go_on(1)
    assert story.go_on(3.5, silent=(2, 3)) is None
    assert story.go_on(1, steps=True) is None
    assert story.go_on(4, silent=(2, 3)) is None
    found = story.go_on(1, silent=(2, 3))
    assert found is not None and found[0] == 2
    assert "like all 2 ranks on its host: the host is lost or cut off" in found[1]


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
    assert (found.count, found.step, found.phase, found.waits) == (1, 2, "save", False)
    assert found.step_s is not None and found.step_s < 1
    assert "threading.py" in found.stack and "test_watch.py" in found.stack
    assert Beat.from_json(found.to_json()) == found
    assert Beat.from_json(found.to_json()[:20]) is None
    assert beat_of_main_thread(own).phase == "other"


def test_the_code_that_waits_for_other_ranks_says_so(own: Heartbeat) -> None:
    from parallel3d.host_memory import ring

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


def test_a_phase_of_another_thread_is_not_that_of_the_rank(own: Heartbeat) -> None:
    def save() -> None:
        with phase("save"):
            seen.append(own.beat().phase)

    seen: list[str] = []
    thread = threading.Thread(target=save)
    with phase("optimizer"):
        thread.start()
        thread.join()
    assert seen == ["optimizer"]


def test_a_rank_that_waits_for_its_batch_shows_where_the_loader_is(own: Heartbeat) -> None:
    from parallel3d.data.loader import batches_ahead

    seen, is_over = [], threading.Event()

    class Blocked:
        def batch(self, *args: object) -> None:
            is_over.wait(10)
            raise ValueError

        def __getattr__(self, name: str) -> object:
            return self.batch

    def look() -> None:
        time.sleep(0.3)
        seen.append(own.beat())
        is_over.set()

    thread = threading.Thread(target=look)
    thread.start()
    with phase("data"), pytest.raises((ValueError, TypeError, queue.Empty)):
        next(batches_ahead(Blocked(), range(3), "cpu"))  # type: ignore[arg-type]
    thread.join()
    assert seen[0].phase == "data" and not seen[0].waits
    assert "(batch)" in seen[0].stack.partition("the loader ")[2]


def test_beats_are_read_from_a_file_and_the_last_says_that_the_rank_is_done(tmp_path: Path) -> None:
    with beats_to_file(beat_file(tmp_path, 3)):
        while not beat_file(tmp_path, 3).exists():
            time.sleep(0.05)
    last = Beat.from_json(beat_file(tmp_path, 3).read_text())
    assert last is not None and last.phase == "done"


def test_the_state_of_a_process_is_linuxs_letter() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGSTOP)
    while (state := process_state(process.pid)) not in "tT":
        time.sleep(0.01)
    assert state == "T"
    process.kill()
    process.wait()
    assert process_state(process.pid) == ""


def test_no_garbage_is_collected_while_threads_are_read(
    own: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to Python 3.11 a collection may spoil the frame that is being made."""
    may_collect: list[bool] = []
    monkeypatch.setattr(
        heartbeat, "_waits_for_ranks", lambda frame: may_collect.append(gc.isenabled())
    )
    own.beat()
    assert may_collect == [False] and gc.isenabled()


def test_a_stack_that_cannot_be_read_costs_no_beat_and_nobody_is_named_for_it(
    own: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(frame: object) -> None:
        raise AttributeError("'Tensor' object has no attribute 'f_code'")

    monkeypatch.setattr(heartbeat, "_waits_for_ranks", fail)
    heartbeat.step_done(3)
    with phase("forward or backward"):
        unseen = own.beat()
    assert (unseen.count, unseen.step, unseen.waits, unseen.phase) == (1, 3, False, "other")
    assert "no attribute 'f_code'" in unseen.stack


def test_a_step_without_compile_is_not_seen_in_compilation(own: Heartbeat) -> None:
    """Eager code passes through wrappers of torch._dynamo, too."""
    seen = []

    def compiled(graph: torch.fx.GraphModule, examples: object) -> object:
        seen.append(own.beat().phase)
        return graph.forward

    assert torch.compiler.disable(lambda: own.beat().phase)() == "other"
    torch.compile(lambda x: x + 1, backend=compiled)(torch.zeros(1))
    assert seen == ["compilation"]
