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
from functools import partial
from typing import TYPE_CHECKING, TypeVar

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
_HURRY_S = 0.1  # between two looks at the peers once this rank has failed
_FAILURE, _TOLD = "failure", "told"  # the number of ranks that know of it, beside rank 0


class ReportedError(RankError):
    """Replaces the error of a failing rank after the ranks agreed on the cause. `is_ours` says that
    this rank prints it."""

    def __init__(self, failure: Failure, is_ours: bool) -> None:
        super().__init__(failure.line())
        self.failure, self.is_ours, self.exit_status = failure, is_ours, failure.exit_status


class PeerMonitor:
    """Monitors the other ranks in a thread, because the main thread of a hanging rank does nothing.

    `store` is a connection that only this monitor uses. `coordinates` are the places of all ranks
    in the mesh."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        places: Sequence[Place],
        coordinates: Sequence[str],
        run_dir: str | None,
    ) -> None:
        self._store, self._rank, self._run_dir = store, rank, run_dir
        self._places, self._coordinates = places, coordinates
        hosts = [f"{place.host} {place.pid_namespace}" for place in places]
        self._neighbours = [each for each, host in enumerate(hosts) if host == hosts[rank]]
        self._others = [each for each in range(len(places)) if each != rank]
        watched = {*self._others} if rank == 0 else {0, *self._neighbours}
        self._watched = sorted(watched - {rank})
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
            if self._rank != 0:
                with suppress(RuntimeError):
                    self._ask(lambda: self._store.add(_TOLD, 1))
            # A rank that failed by itself gets time to report; one that hangs does not.
            if not self._closed.wait(BEAT_S if found.died else _GRACE_S):
                self._ending.acquire()
                self._end(found)
            return

    def _check_peers(self) -> Failure | None:
        """Returns the first reported failure. Without one, reports a neighbour whose process has
        ended, a rank that hangs, or a store that has gone."""
        states = {rank: process_state(self._places[rank].pid) for rank in self._neighbours}
        has_states = states[self._rank] != ""  # on Linux
        gone = [rank for rank, state in states.items() if has_states and not state]
        try:
            reported, beats = self._ask(self._exchange)
        except RuntimeError:
            time.sleep(_HURRY_S)  # a process that is killed closes its connections before it ends
            has_ended = 0 in self._neighbours and not process_state(self._places[0].pid)
            message = "does not answer: the store that it or its launcher holds has gone"
            failure = self._ended(0) if has_states and has_ended else self._failure_of(0, message)
            return replace(failure, reporter=self._speaker())
        if reported is not None:
            return reported
        if gone:
            return self._publish(self._ended(gone[0]))
        hanging = self._detector.check(beats, states, time.monotonic())
        return None if hanging is None else self._publish(self._failure_of(*hanging))

    def _exchange(self) -> tuple[Failure | None, dict[int, Beat]]:
        """Returns the reported failure; without one, writes this rank's beat and returns those of
        the watched ranks."""
        if self._store.check([_FAILURE]):
            return _parse_failure(self._store.get(_FAILURE)), {}
        return None, {self._rank: self._write_beat(), **self._read_beats(self._watched)}

    def _ask(self, request: Callable[[], _T]) -> _T:
        """Returns the answer of the store. Ends this rank if none comes in LOST_S. The time counts
        in short waits, so that a process that was stopped meanwhile does not end."""
        answer: Future[_T] = self._requests.submit(request)
        for waited in range(round(LOST_S / BEAT_S)):
            with suppress(TimeoutError):
                return answer.result(timeout=BEAT_S)
            # Under srun, rank 0 holds the store. The next rank of its host reports for it.
            is_stopped = 0 in self._neighbours and process_state(self._places[0].pid) == "T"
            if is_stopped and waited * BEAT_S >= STOPPED_S and self._rank == self._speaker():
                message = f"is stopped (state T){self._detector.last_seen(0)}"
                self._end(replace(self._failure_of(0, message), reporter=self._rank))
        if self._rank == min(self._neighbours):
            why = f"has no answer of the store for {LOST_S:.0f} s: its host is cut off"
            print_error(self._failure_of(self._rank, f"{why}, and its ranks end").line())
        end_process(RankError.exit_status)

    def _wait_for_readers(self, cause: Failure) -> None:
        """Has rank 0, with which the store may end, wait until the others know of the failure. If
        the rank at fault is on another host, all of that may be lost."""
        readers = {*self._others} - {cause.rank}
        if cause.rank not in self._neighbours:
            readers = {each for each in readers if self._places[each].host != cause.host}
        deadline, told = time.monotonic() + _GRACE_S, 0
        with suppress(RuntimeError):
            while self._rank == 0 and told < len(readers) and time.monotonic() < deadline:
                time.sleep(_HURRY_S)
                told = self._ask(lambda: self._store.add(_TOLD, 0))

    def _find_cause(self) -> Failure | None:
        """Waits for another rank's report. Without one, names a rank whose heart does not beat."""
        before: dict[int, Beat] = {}
        with suppress(RuntimeError):  # the store has gone, of which the other thread reports
            before = self._ask(partial(self._read_beats, self._others))
        with suppress(TimeoutError):
            return self._found.result(timeout=_GRACE_S)
        after = self._ask(partial(self._read_beats, self._others))
        silent = [rank for rank, beat in before.items() if beat == after.get(rank)]
        if not silent:
            return None
        message = "gives no sign: it was killed or stopped, or its host is lost or cut off"
        return self._publish(self._failure_of(silent[0], message))

    def _write_beat(self) -> Beat:
        beat = HEARTBEAT.beat()
        self._store.set(f"beat/{self._rank}", beat.to_json())
        return beat

    def _read_beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """Returns the newest beats; none before all ranks have sent one."""
        keys = [f"beat/{rank}" for rank in ranks]
        if not keys or not self._store.check(keys):
            return {}
        beats = map(Beat.from_json, self._store.multi_get(keys))
        return dict(zip(ranks, beats, strict=True))

    def _publish(self, failure: Failure) -> Failure:
        """Writes a failure to the store. Returns the first one that any rank has written."""
        own = replace(failure, reporter=self._rank, traceback="")
        text = json.dumps(asdict(own))
        try:
            return self._ask(lambda: _parse_failure(self._store.compare_set(_FAILURE, "", text)))
        except RuntimeError:  # nobody can read it
            return replace(own, reporter=self._speaker()) if failure.rank == 0 else own

    def _speaker(self) -> int:
        """Returns the rank of this host that reports for rank 0, which may hold the store."""
        return min({*self._neighbours} - {0} or {0})

    def _ended(self, rank: int) -> Failure:
        seen = self._detector.last_seen(rank)
        message = f"ended without a word{seen}; the lines of its launcher may say how"
        return self._failure_of(rank, message)

    def _failure_of(self, rank: int, message: str) -> Failure:
        return Failure(
            rank=rank,
            host=self._places[rank].host,
            coordinates=self._coordinates[rank],
            message=message,
            died=True,
        )

    def _end(self, cause: Failure) -> None:
        """Ends this process, and one on this host that is stopped or held: its launcher would wait
        for it."""
        if cause.died and cause.rank != self._rank and cause.rank in self._neighbours:
            with suppress(ProcessLookupError):
                os.kill(self._places[cause.rank].pid, signal.SIGKILL)
        if cause.reporter == self._rank:
            print_error(cause.line())
        if self._rank in (0, cause.reporter):
            RunOutcome.of(cause).write(self._run_dir)
        self._wait_for_readers(cause)
        end_process(cause.exit_status)


def _parse_failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))
