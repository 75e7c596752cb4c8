"""Ranks that torchrun or srun started monitor each other.

Such a launcher ends the other ranks only by SIGTERM, which asks them to save, and only on its own
host. So the first failure is written to the store at which the ranks met. A thread of each rank
reads the store twice a second, writes this rank's heartbeat, and checks the processes of its own
host. Rank 0 judges the heartbeats of all ranks; the others judge those of rank 0 and of their own
host. The rank that reports a failure prints it; all others end silently with its exit status. A
rank that gets no answer from the store is cut off and ends.
"""

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
from parallel3d.watch.hang_detector import LOST_S, STOPPED_S, HangDetector, process_state
from parallel3d.watch.heartbeat import BEAT_S, HEARTBEAT, Beat

if TYPE_CHECKING:
    import torch.distributed as dist

_T = TypeVar("_T")
# A rank that learns of a failure may be about to report its own.
_GRACE_S = 2.5
_HURRY_S = 0.1  # between two looks at the peers once a rank has failed
_FAILURE = "failure"  # the key of the first one; `told/RANK` says that a rank knows of it


class ReportedError(RankError):
    """Replaces the error of a failing rank after the ranks agreed on the cause. `is_ours` says that
    this rank prints it."""

    def __init__(self, failure: Failure, is_ours: bool) -> None:
        super().__init__(failure.line())
        self.failure = failure
        self.is_ours = is_ours


class PeerMonitor:
    """Monitors the other ranks in a thread, because the main thread of a hanging rank does nothing.

    `store` is a connection that only this monitor uses."""

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
        # Under srun, rank 0 holds the store. The next rank of its host reports for it.
        self._speaker = min({*self._neighbours} - {0}, default=0)
        self._detector = HangDetector(hosts, hosts[rank])
        self._closed = threading.Event()
        self._ending = threading.Lock()  # the thread that has it ends the process
        self._found: Future[Failure] = Future()  # by the thread that monitors
        # A store on a lost host never answers, so another thread asks it.
        self._requests = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._thread = threading.Thread(target=self._monitor, name="peer-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops monitoring. Every rank calls it before the first of them ends."""
        self._closed.set()
        self._thread.join()
        with suppress(RuntimeError):
            self._ask(self._write_beat)
        self._requests.shutdown()

    def report(self, failure: Failure) -> ReportedError:
        """Reports the failure of this rank, unless another was reported before. Returns the error
        to raise instead of the original one."""
        self._ending.acquire()
        found = None
        if failure.secondary:
            with suppress(RuntimeError):
                found = self._find_cause()
        cause = found or self._publish(failure)
        is_ours = cause.reporter == self._rank
        if not is_ours:
            time.sleep(0.5)  # launchers blame the process that ends first
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
            # A rank that failed by itself gets time to report; one that hangs does not.
            if not self._closed.wait(_HURRY_S if found.died else _GRACE_S):
                self._ending.acquire()
                self._end(found)
            return

    def _check_peers(self) -> Failure | None:
        """Returns the first reported failure. Without one, reports a neighbour whose process has
        ended, a rank that hangs, or a store that has gone."""
        states = self._read_states()
        try:
            reported, beats = self._ask(self._exchange)
        except RuntimeError:
            time.sleep(_HURRY_S)  # a process that is killed closes its connections before it ends
            if self._read_states().get(0) == "":
                return self._blame_end(0)
            message = "does not answer: the store that it or its launcher holds has gone"
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
        """Returns the state of each process of this host, "" if it has ended; nothing if the system
        is not Linux."""
        states = {rank: process_state(self._places[rank].pid) for rank in self._neighbours}
        return states if states[self._rank] else {}

    def _exchange(self) -> tuple[Failure | None, dict[int, Beat]]:
        """Returns the reported failure; without one, writes this rank's beat and returns those of
        the watched ranks."""
        if self._store.check([_FAILURE]):
            return _parse_failure(self._store.get(_FAILURE)), {}
        self._write_beat()
        return None, self._read_beats(self._watched)

    def _ask(self, request: Callable[..., _T], *arguments: object) -> _T:
        """Returns the answer of the store. Ends this rank if none comes in LOST_S. The time counts
        in short waits, so that a process that was stopped meanwhile does not end."""
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
            why = f"has no answer of the store for {LOST_S:.0f} s: its host is cut off"
            failure = self._failure_of(self._rank, f"{why}, and its ranks end")
            print_error(failure.line())
        end_process(RankError.exit_status)

    def _wait_for_readers(self, cause: Failure) -> None:
        """Has rank 0, with which the store may end, wait until the others know of the failure. If
        the rank at fault is on another host, all of that may be lost."""
        readers = {*self._ranks} - {0, cause.rank}
        if cause.rank not in self._neighbours:
            readers = {each for each in readers if self._places[each].host != cause.host}
        if self._rank == 0:
            keys = [f"told/{each}" for each in readers]
            with suppress(RuntimeError):
                self._ask(self._store.wait, keys, timedelta(seconds=_GRACE_S))

    def _find_cause(self) -> Failure | None:
        """Waits for another rank's report. Without one, names a rank whose heart does not beat."""
        others = [each for each in self._ranks if each != self._rank]
        before: dict[int, Beat] = {}
        with suppress(RuntimeError):  # the store has gone, of which the other thread reports
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
        """Returns the newest beats; none before all ranks have sent one."""
        keys = [f"beat/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return {}
        beats = map(Beat.from_json, self._store.multi_get(keys))
        return dict(zip(ranks, beats, strict=True))

    def _blame(self, rank: int, message: str) -> Failure:
        return self._publish(self._failure_of(rank, message))

    def _blame_end(self, rank: int) -> Failure:
        seen = self._detector.last_seen(rank)
        message = f"ended without a word{seen}; the lines of its launcher may say how"
        return self._blame(rank, message)

    def _publish(self, failure: Failure) -> Failure:
        """Writes a failure to the store. Returns the first one that any rank has written."""
        own = replace(failure, reporter=self._rank, traceback="")
        text = json.dumps(asdict(own))
        try:
            return _parse_failure(self._ask(self._store.compare_set, _FAILURE, "", text))
        except RuntimeError:  # nobody can read it
            return replace(own, reporter=self._speaker) if failure.rank == 0 else own

    def _failure_of(self, rank: int, message: str) -> Failure:
        return Failure(
            rank=rank,
            host=self._places[rank].host,
            coordinates=str(self._recipe.parallel.coordinates(rank)),
            message=message,
            died=True,
        )

    def _end(self, cause: Failure) -> None:
        """Ends this process, and one on this host that is stopped or held: its launcher would wait
        for it."""
        others = {*self._neighbours} - {self._rank}
        if cause.died and cause.rank in others:
            with suppress(ProcessLookupError):
                os.kill(self._places[cause.rank].pid, signal.SIGKILL)
        if cause.reporter == self._rank:
            print_error(cause.line())
        if self._rank in (0, cause.reporter):
            RunOutcome.of(cause).write(self._recipe.run_dir)
        self._wait_for_readers(cause)
        end_process(cause.exit_status)


def _parse_failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))
