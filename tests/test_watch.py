"""Who is at fault when a run stands still, judged from the beats of its ranks; and what a beat shows of a thread."""

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
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel3d.watch import pulse
from parallel3d.watch.pulse import Beat, Pulse, beat_file, beating_into, look_at
from parallel3d.watch.verdict import Judge, process_state

STEP_S = 0.2


def beat(count: int, *, step: int = 7, waits: bool = True, phase: str = "forward or backward") -> Beat:
    return Beat(count=count, step=step, step_s=STEP_S, phase=phase, waits=waits, stack="mlp.py:3 (forward)")


class Story:
    """Beats of some ranks, half a second apart, and what the judge says of them."""

    def __init__(self, hosts: str = "aaaa", own: str = "a") -> None:
        self.judge, self.now, self.count, self.hosts = Judge(list(hosts), own), 100.0, 0, hosts
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
        """Returns the first verdict within so many seconds."""
        last = self.last
        for _ in range(round(seconds / 0.5)):
            self.now, self.count = self.now + 0.5, self.count + 1
            for rank in range(len(self.hosts)):
                if rank not in silent:
                    phase = (busy or {}).get(rank)
                    step = self.count if steps else 7
                    last[rank] = beat(self.count, step=step, waits=phase is None, phase=phase or "forward or backward")
            if found := self.judge.look(last, states or {}, self.now):
                return found
        return None


def test_a_run_that_steps_is_left_alone() -> None:
    assert Story().go_on(600, steps=True, busy={2: "data"}) is None


@pytest.mark.parametrize("rank", range(4))
def test_a_stopped_rank_is_named_in_a_few_seconds_and_not_at_once(rank: int) -> None:
    story = Story()
    assert story.go_on(2, silent=(rank,), states={rank: "T"}) is None
    found = story.go_on(2, silent=(rank,), states={rank: "T"})
    assert found is not None and found[0] == rank
    assert "is stopped (state T) in forward or backward after step 7" in found[1]


def test_a_rank_that_is_stopped_for_a_moment_is_not_named() -> None:
    story = Story()
    assert story.go_on(1.5, silent=(1,), states={1: "T"}) is None
    assert story.go_on(20, steps=True) is None


@pytest.mark.parametrize("phase", ["data", "forward or backward", "optimizer"])
def test_the_rank_that_keeps_the_others_waiting_is_named(phase: str) -> None:
    story = Story()
    story.go_on(1, steps=True)
    assert story.go_on(6.5, busy={2: phase}) is None
    found = story.go_on(3, busy={2: phase})
    assert found is not None and found[0] == 2
    assert "is stuck for 8 s" in found[1] and f"in {phase} after step 7" in found[1] and "mlp.py:3" in found[1]


@pytest.mark.parametrize("phase", ["save", "evaluation", "compilation", "callback", "metrics", "export", "other"])
def test_what_may_take_long_on_one_rank_is_not_judged(phase: str) -> None:
    story = Story()
    assert story.go_on(300, busy={0: phase}) is None


@pytest.mark.parametrize("phase", ["save", "evaluation", "compilation", "callback", "metrics", "export", "other"])
def test_what_was_not_judged_does_not_count_when_the_rank_goes_on(phase: str) -> None:
    story = Story()
    assert story.go_on(300, busy={0: phase}) is None
    assert story.go_on(6.5, busy={0: "forward or backward"}) is None
    found = story.go_on(3, busy={0: "forward or backward"})
    assert found is not None and found[0] == 0 and "is stuck for 8 s" in found[1]


def test_where_all_read_for_a_minute_the_first_is_named_with_its_stack() -> None:
    story = Story()
    story.go_on(5, steps=True)
    everybody, computing = dict.fromkeys(range(4), "data"), dict.fromkeys(range(4), "forward or backward")
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
    assert found is not None and found[0] == 3 and "(state R): its interpreter is held" in found[1]


def test_a_host_that_is_cut_off_is_named_within_five_seconds_and_not_for_two() -> None:
    story = Story("aabb")
    story.go_on(1)
    assert story.go_on(3.5, silent=(2, 3)) is None
    assert story.go_on(1, steps=True) is None
    assert story.go_on(4, silent=(2, 3)) is None
    found = story.go_on(1, silent=(2, 3))
    assert found is not None and found[0] == 2
    assert "nor do the 1 others on its host: the host is lost or cut off" in found[1]


def test_a_host_that_is_done_is_not_lost() -> None:
    story = Story("aabb")
    story.go_on(1)
    for rank in (2, 3):
        story.last[rank] = beat(99, phase="done")
    assert story.go_on(60, silent=(2, 3)) is None


def test_a_job_that_is_stopped_and_continued_as_a_whole_starts_all_clocks_anew() -> None:
    story = Story("aabb")
    story.go_on(3, busy={1: "data"})
    story.now += 3600  # the watcher was stopped with them
    assert story.go_on(3, silent=(2, 3), busy={1: "data"}) is None
    assert story.go_on(8, busy={1: "data"}, steps=True) is None


def test_a_beat_shows_the_steps_and_where_the_main_thread_is() -> None:
    pulse, seen = Pulse(), []
    thread = threading.Thread(target=lambda: (time.sleep(0.05), seen.append(pulse.beat())))
    pulse.step_done(1)
    pulse.step_done(2)
    thread.start()
    thread.join()
    (found,) = seen
    assert (found.count, found.step, found.phase, found.waits) == (1, 2, "other", False)
    assert found.step_s is not None and found.step_s < 1
    assert "threading.py" in found.stack and "test_watch.py" in found.stack
    assert Beat.of_json(found.to_json()) == found
    assert Beat.of_json(found.to_json()[:20]) is None


def test_a_rank_that_waits_for_its_batch_is_in_data_and_shows_where_the_loader_is() -> None:
    from parallel3d.data.loader import batches_ahead

    pulse, seen, is_over = Pulse(), [], threading.Event()

    class Blocked:
        def batch(self, *args: object) -> None:
            is_over.wait(10)
            raise ValueError

        def __getattr__(self, name: str) -> object:
            return self.batch

    def look() -> None:
        time.sleep(0.3)
        seen.append(pulse.beat())
        is_over.set()

    thread = threading.Thread(target=look)
    thread.start()
    with pytest.raises((ValueError, TypeError, queue.Empty)):
        next(batches_ahead(Blocked(), range(3), "cpu"))  # type: ignore[arg-type]
    thread.join()
    assert seen[0].phase == "data" and not seen[0].waits
    assert "loader.py" in seen[0].stack


def test_beats_are_read_from_a_file_and_the_last_says_that_the_rank_is_done(tmp_path: Path) -> None:
    with beating_into(tmp_path, 3, Pulse()):
        while not beat_file(tmp_path, 3).exists():
            time.sleep(0.05)
    last = Beat.of_json(beat_file(tmp_path, 3).read_text())
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


def test_no_garbage_is_collected_while_a_thread_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to Python 3.11 a collection in the midst of it may spoil the frame that is being made."""
    may_collect: list[bool] = []
    monkeypatch.setattr(pulse, "look_at", lambda frame: (may_collect.append(gc.isenabled()), ("other", False, ""))[1])
    Pulse().beat()
    assert may_collect == [False] and gc.isenabled()
    gc.disable()
    try:
        Pulse().beat()
        assert may_collect == [False, False] and not gc.isenabled()
    finally:
        gc.enable()


def test_a_look_that_fails_costs_no_beat_and_nobody_is_named_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at(frame: object) -> None:
        raise AttributeError("'Tensor' object has no attribute 'f_code'")

    monkeypatch.setattr(pulse, "look_at", look_at)
    own = Pulse()
    for step in range(4):
        own.step_done(step)
    unseen = own.beat()
    assert (unseen.count, unseen.step, unseen.waits) == (1, 3, False)
    assert "no attribute 'f_code'" in unseen.stack
    judge = Judge(["a", "a"], "a")
    for second in range(60):
        assert judge.look({0: replace(unseen, count=second), 1: beat(second)}, {}, float(second)) is None


def test_a_step_without_compile_is_not_seen_in_compilation() -> None:
    """Eager code passes through wrappers of torch._dynamo, too."""
    seen = []

    def compiled(graph: torch.fx.GraphModule, examples: object) -> object:
        seen.append(look_at(sys._getframe())[0])
        return graph.forward

    assert torch.compiler.disable(lambda: look_at(sys._getframe())[0])() == "other"
    torch.compile(lambda x: x + 1, backend=compiled)(torch.zeros(1))
    assert seen == ["compilation"]
