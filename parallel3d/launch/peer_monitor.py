"""Lets ranks that torchrun or srun started monitor each other.

After a failure, such a launcher sends only SIGTERM, which asks a rank to save, and only on its own
host. So the ranks share the first failure through the store of their rendezvous. In each rank, a
thread reads the store twice a second, writes a heartbeat, and checks the processes on its host.
Rank 0 checks the heartbeats of all ranks, the others those of rank 0 and of their own host. The
rank that reports a failure prints it. All others end silently with the same exit status. A rank
that gets no answer from the store for LOST_S is cut off and ends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from parallel3d.config.recipe import Recipe
from parallel3d.errors import RankError
from parallel3d.launch.devices import Place
from parallel3d.launch.failure import Failure, end_process, print_error
from parallel3d.launch.run_dir import RunOutcome
from parallel3d.launch.run_log import see_log
from parallel3d.watch.hang_detector import LOST_S, STOPPED_S, HangDetector, process_state
from parallel3d.watch.heartbeat import BEAT_S, HEARTBEAT, Beat

if TYPE_CHECKING:
    import torch.distributed as dist

_T = TypeVar("_T")
# Seconds to wait after a failure for the main thread or other ranks.
_GRACE_S = 2.5
_HURRY_S = 0.1  # Seconds between two checks after a rank has failed.
_FAILURE = "failure"  # Key of the first failure; `told/RANK` is set once RANK has read it.


class ReportedError(RankError):
    """Replaces the error of a failing rank once the root cause is known. `is_ours` is True if this
    rank prints it."""

    def __init__(self, failure: Failure, is_ours: bool) -> None:
        super().__init__(failure.line())
        self.failure = failure
        self.is_ours = is_ours


class PeerMonitor:
    """Monitors the other ranks in a thread, which runs even if the main thread hangs.

    Two threads can end the process: the main thread after its own error (`report`), and the
    monitoring thread after the failure of another rank (`_monitor`). The first one that acquires
    `_ending` does so. It never releases the lock. `store` must be a connection that nothing else
    uses.
    """

    def __init__(
        self, store: dist.Store, rank: int, places: Sequence[Place], recipe: Recipe
    ) -> None:
        self._store = store
        self._rank = rank
        self._places = places
        self._recipe = recipe
        hosts = [f"{place.host} {place.pid_namespace}" for place in places]
        self._ranks = range(len(places))
        self._neighbours = [each for each in self._ranks if hosts[each] == hosts[rank]]
        self._watched: Sequence[int] = self._ranks
        if rank != 0:
            self._watched = sorted({0, *self._neighbours})
        # Rank of this host that reports rank 0 if the store, which rank 0 may host, is lost.
        self._speaker = min({*self._neighbours} - {0}, default=0)
        self._detector = HangDetector(hosts, hosts[rank])
        self._closed = threading.Event()
        self._ending = threading.Lock()  # Held by the thread that ends the process.
        self._found: Future[Failure] = Future()  # First failure, set by the monitoring thread.
        # A store on a lost host never answers, so requests run in a separate thread.
        self._requests = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._thread = threading.Thread(target=self._monitor, name="peer-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops monitoring. All ranks must call it before any of them ends."""
        self._closed.set()
        self._thread.join()
        with suppress(RuntimeError):
            self._ask(self._write_beat)
        self._requests.shutdown()

    def report(self, failure: Failure) -> ReportedError:
        """Reports the failure of this rank, unless one was reported before, and stops monitoring.
        Returns the error to raise instead of the original one."""
        self._ending.acquire()
        found = None
        if failure.secondary:
            with suppress(RuntimeError):
                found = self._find_cause()
        cause = found or self._publish(failure)
        is_ours = cause.reporter == self._rank
        if not is_ours:
            # Ends after the rank that reported the failure, because launchers blame the process
            # that ends first.
            time.sleep(0.5)
        self._wait_for_readers(cause)
        self._closed.set()
        return ReportedError(failure if cause.rank == self._rank else cause, is_ours)

    def _monitor(self) -> None:
        while not self._closed.wait(_HURRY_S if self._ending.locked() else BEAT_S):
            found = self._check_peers()
            if found is None:
                continue
            self._found.set_result(found)
            with suppress(RuntimeError):
                self._ask(self._store.set, f"told/{self._rank}", "")
            # If the failed rank raised an error, the main thread may soon do so and report, too.
            if not self._closed.wait(_HURRY_S if found.died else _GRACE_S):
                self._ending.acquire()
                self._end(found)
            return

    def _check_peers(self) -> Failure | None:
        """Returns the first reported failure, or None.

        If there is none, looks for a lost store, an ended process on this host or a hanging rank,
        and reports what it finds."""
        states = self._read_states()
        try:
            reported, beats = self._ask(self._exchange)
        except RuntimeError:
            time.sleep(_HURRY_S)  # A killed rank 0 closes its connections before it disappears.
            if self._read_states().get(0) == "":
                return self._blame_end(0)
            message = "does not answer: the store, which this rank or its launcher hosts, has gone"
            return self._blame(0, message)
        if reported is not None:
            return reported
        for rank, state in states.items():
            if not state:
                return self._blame_end(rank)
        hanging = self._detector.check(beats, states, time.monotonic())
        if hanging is None:
            return None
        rank, message = hanging
        return self._blame(rank, message)

    def _read_states(self) -> dict[int, str]:
        """Returns the process state of each rank on this host, "" if it has ended. Returns an empty
        dict on systems other than Linux."""
        states = {rank: process_state(self._places[rank].pid) for rank in self._neighbours}
        return states if states[self._rank] else {}

    def _exchange(self) -> tuple[Failure | None, dict[int, Beat]]:
        """Returns the reported failure. If there is none, writes the heartbeat of this rank and
        returns those of the monitored ranks."""
        if self._store.check([_FAILURE]):
            return _parse_failure(self._store.get(_FAILURE)), {}
        self._write_beat()
        return None, self._read_beats(self._watched)

    def _ask(self, request: Callable[..., _T], *arguments: object) -> _T:
        """Runs a store request and returns its result. Ends this process if there is none within
        LOST_S, or earlier to report that rank 0 is stopped.

        Waits in short intervals, so that time while this process is stopped does not count."""
        answer = self._requests.submit(request, *arguments)
        for waits in range(1, round(LOST_S / BEAT_S) + 1):
            with suppress(TimeoutError):
                return answer.result(timeout=BEAT_S)
            is_late = waits * BEAT_S >= STOPPED_S
            if is_late and self._rank == self._speaker and self._read_states().get(0) == "T":
                message = f"is stopped (state T){self._detector.last_seen(0)}"
                failure = self._failure_of(0, message)
                self._end(replace(failure, reporter=self._rank))
        if self._rank == self._neighbours[0]:
            why = f"has no answer from the store for {LOST_S:.0f} s: its host is cut off"
            failure = self._failure_of(self._rank, f"{why}, so its ranks end")
            print_error(failure.line(), self._recipe.run_dir)
        end_process(RankError.exit_status)

    def _wait_for_readers(self, cause: Failure) -> None:
        """On rank 0, waits up to _GRACE_S until the others have read the failure, because the store
        may end with rank 0. If the failed rank is on a different host, does not wait for that host,
        which may be lost."""
        readers = {*self._ranks} - {0, cause.rank}
        if cause.rank not in self._neighbours:
            readers = {each for each in readers if self._places[each].host != cause.host}
        if self._rank == 0:
            keys = [f"told/{each}" for each in readers]
            with suppress(RuntimeError):
                self._ask(self._store.wait, keys, timedelta(seconds=_GRACE_S))

    def _find_cause(self) -> Failure | None:
        """Returns a failure reported within _GRACE_S. If there is none, reports a rank whose
        heartbeat has stopped, if any."""
        others = [each for each in self._ranks if each != self._rank]
        before: dict[int, Beat] = {}
        with suppress(RuntimeError):  # The monitoring thread reports a lost store.
            before = self._ask(self._read_beats, others)
        with suppress(TimeoutError):
            return self._found.result(timeout=_GRACE_S)
        after = self._ask(self._read_beats, others)
        for rank, beat in before.items():
            if beat == after.get(rank):
                message = "gives no sign: it was killed or stopped, or its host is lost or cut off"
                return self._blame(rank, message)
        return None

    def _write_beat(self) -> None:
        self._store.set(f"beat/{self._rank}", HEARTBEAT.beat().to_json())

    def _read_beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """Returns the newest heartbeats of `ranks`, or {} until all of them have sent one."""
        keys = [f"beat/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return {}
        beats = map(Beat.from_json, self._store.multi_get(keys))
        return dict(zip(ranks, beats, strict=True))

    def _blame(self, rank: int, message: str) -> Failure:
        return self._publish(self._failure_of(rank, message))

    def _blame_end(self, rank: int) -> Failure:
        seen = self._detector.last_seen(rank)
        message = f"ended without an error message{seen}; the output of its launcher may say why"
        return self._blame(rank, message)

    def _publish(self, failure: Failure) -> Failure:
        """Writes a failure to the store unless it has one. Returns the stored failure, or this one
        if the store is lost."""
        own = replace(failure, reporter=self._rank, traceback="")
        text = json.dumps(asdict(own))
        try:
            return _parse_failure(self._ask(self._store.compare_set, _FAILURE, "", text))
        except RuntimeError:  # The store is lost.
            return replace(own, reporter=self._speaker) if failure.rank == 0 else own

    def _failure_of(self, rank: int, message: str) -> Failure:
        return Failure(
            rank=rank,
            host=self._places[rank].host,
            coordinates=str(self._recipe.parallel.coordinates(rank)),
            message=message + see_log(self._recipe.run_dir, rank),
            died=True,
        )

    def _end(self, cause: Failure) -> None:
        """Reports the cause and ends this process. Also kills the failed rank if it is stopped or
        hangs on this host, because its launcher would wait for it. A rank that reports its own
        failure must stay alive until it has printed the report. It then exits."""
        others = {*self._neighbours} - {self._rank, cause.reporter}
        if cause.died and cause.rank in others:
            with suppress(ProcessLookupError):
                os.kill(self._places[cause.rank].pid, signal.SIGKILL)
        if cause.reporter == self._rank:
            print_error(cause.line(), self._recipe.run_dir)
        if self._rank in (0, cause.reporter):
            RunOutcome.of(cause).write(self._recipe.run_dir)
        self._wait_for_readers(cause)
        end_process(cause.exit_status)


def _parse_failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))
