"""How ranks that another program has launched (torchrun, srun) learn of each other's failures, and end.

`launch_local` watches its workers itself. torchrun ends the others only by SIGTERM, which asks a worker to save, and on
its own host alone: a rank that waits in a collective for one that has failed would wait until the collective times
out. So the first failure is written into the store at which the ranks have met, and each rank looks there twice a
second, and at the processes of its own host: whether they live, and whether they are stopped. The first to tell of a
failure prints it; the others end without a word, with its exit status.

Each rank writes its beats into the store, too. Rank 0 reads them all and judges who keeps the others waiting; the
others watch rank 0 and the ranks of their own host. A rank that the store does not answer is cut off, and ends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from parallel3d.errors import RankError
from parallel3d.launch.devices import Place
from parallel3d.launch.failure import Failure, end_process, print_error
from parallel3d.launch.run_dir import RunOutcome
from parallel3d.watch.pulse import BEAT_S, Beat, Pulse
from parallel3d.watch.verdict import LOST_S, STOPPED_S, Judge, process_state

if TYPE_CHECKING:
    import torch.distributed as dist

# A rank that hears of a failure may itself be about to raise, and a rank that has lost a peer may hear why.
_GRACE_S = 2.0
_ROLL_S = 2.5  # several looks of a rank that lives, and some more
_KEY, _ROLL, _BEAT = "failure", "roll", "beat"


class SettledError(RankError):
    """Raised in the place of a failing rank's own error: `failure` is the one that caused it, perhaps on another rank,
    and `is_ours_to_tell` says that nobody else prints it."""

    def __init__(self, failure: Failure, is_ours_to_tell: bool) -> None:
        super().__init__(failure.line())
        self.failure, self.is_ours_to_tell, self.exit_status = failure, is_ours_to_tell, failure.exit_status


class PeerWatch:
    """Watches the other ranks from a thread of its own, because the main thread of a rank that hangs does nothing.

    `connect` opens a connection to the store for this watch alone: in another, a wait of the main thread would keep the
    watch waiting. `coordinates` says where a rank is on the mesh."""

    def __init__(
        self,
        connect: Callable[[], dist.Store],
        rank: int,
        places: Sequence[Place],
        coordinates: Callable[[int], str],
        run_dir: str | None,
        pulse: Pulse,
    ) -> None:
        self._connect, self._store, self._rank, self._run_dir = connect, connect(), rank, run_dir
        self._places, self._coordinates, self._pulse = places, coordinates, pulse
        own = places[rank]
        here = (own.host, own.pid_namespace)
        self._neighbours = [each for each, at in enumerate(places) if (at.host, at.pid_namespace) == here]
        watched = range(len(places)) if rank == 0 else {0, *self._neighbours}
        self._watched = {each: f"{_BEAT}/{each}" for each in watched if each != rank}
        self._judge = Judge([f"{each.host} {each.pid_namespace}" for each in places], f"{own.host} {own.pid_namespace}")
        self._answered_at = time.monotonic()  # when the store last did
        self._is_closed, self._is_settled = threading.Event(), threading.Event()  # the ends of the two threads
        self._ending = threading.Lock()  # held to the end of the process by the thread that tells why it ends
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="peer-guard", daemon=True).start()

    def close(self) -> None:
        """Stops watching. Every rank closes its watch before the first of them ends."""
        self._is_closed.set()
        self._is_settled.set()
        self._thread.join()
        with suppress(RuntimeError):
            self._beat("done")

    def settle(self, failure: Failure) -> SettledError:
        """Tells the others of this rank's failure, unless another has told of one before. Returns what is to be raised
        in the place of the error. Until then the guard goes on: a store that is cut off answers this thread no more
        than the other one, and the neighbours' ends may be what has brought it here."""
        self._is_closed.set()
        self._ending.acquire()
        # The loss of a peer has a cause, which that peer tells, or which is seen when its process has ended.
        cause = self._look_for(_GRACE_S) if failure.secondary else None
        if failure.secondary and cause is None:  # it is stopped, or was alone on its host
            cause = self._call_the_roll()
        teller, first = cause or self._tell(failure)
        self._is_settled.set()
        if teller == self._rank:
            return SettledError(failure if first.rank == self._rank else first, True)
        time.sleep(0.5)  # launchers blame the process that ends first
        return SettledError(first, False)

    def _look_for(self, seconds: float) -> tuple[int, Failure] | None:
        """Looks for a cause until there is one, or the time is over."""
        deadline, cause = time.monotonic() + seconds, None
        while cause is None and time.monotonic() < deadline:
            cause = self._look()
            self._answered_at = time.monotonic()
            time.sleep(0.1)
        return cause

    def _call_the_roll(self) -> tuple[int, Failure] | None:
        """Asks all ranks for a sign, and tells of the first that gives none. Returns what `_look` does."""
        with suppress(RuntimeError):
            self._store.set(_ROLL, "")
            if cause := self._look_for(_ROLL_S):
                return cause
            silent = [rank for rank in range(len(self._places)) if not self._store.check([f"{_ROLL}/{rank}"])]
            if silent:
                others = f", and neither do {len(silent) - 1} others" * (len(silent) > 1)
                message = f"gives no sign{others}: it was killed or stopped, or its host is lost or cut off"
                return self._tell(self._died(silent[0], message))
        return None

    def _watch(self) -> None:
        while not self._is_closed.wait(BEAT_S):
            cause = self._look() or self._judge_beats()
            self._answered_at = time.monotonic()
            # A process that is judged from outside tells nothing more of itself.
            if cause is not None and not self._is_closed.wait(BEAT_S if cause[1].died else _GRACE_S):
                self._ending.acquire()
                self._end(*cause)

    def _guard(self) -> None:
        """Ends this rank where the store does not answer the other thread: the host is cut off from that of the store,
        and what this host would tell or save may not count. But where rank 0 has the store, is on this host and is
        stopped, that is told. A look that comes late means that the process was held."""
        looked_at = time.monotonic()
        while not self._is_settled.wait(BEAT_S):
            now = time.monotonic()
            if now - looked_at > LOST_S / 2:
                self._answered_at = now
            looked_at = now
            silent_s = now - self._answered_at
            if silent_s > STOPPED_S and self._rank == self._teller() and self._is_stopped(0):
                self._end(self._rank, self._died(0, f"is stopped (state T){self._judge.last_seen(0)}"))
            if silent_s > LOST_S:
                if self._rank == min(self._neighbours):
                    message = f"has no answer of the store for {LOST_S:.0f} s: its host is cut off, and its ranks end"
                    print_error(self._died(self._rank, message).line())
                end_process(RankError.exit_status)

    def _judge_beats(self) -> tuple[int, Failure] | None:
        """Shows this rank's beat, and judges those that it watches. Returns what `_look` does."""
        states = {rank: process_state(self._places[rank].pid) for rank in self._neighbours}
        with suppress(RuntimeError):
            beats = {self._rank: self._beat()}
            beats |= {rank: beat for rank, text in self._read_beats().items() if (beat := Beat.of_json(text))}
            if found := self._judge.look(beats, states, time.monotonic()):
                return self._tell(self._died(*found))
        return None

    def _beat(self, phase: str | None = None) -> Beat:
        beat = self._pulse.beat(phase)
        self._store.set(f"{_BEAT}/{self._rank}", beat.to_json())
        return beat

    def _read_beats(self) -> dict[int, bytes]:
        """Returns the newest beats of those that this rank watches; of none before all have beaten once."""
        keys = list(self._watched.values())
        if not keys or not self._store.check(keys):
            return {}
        return dict(zip(self._watched, self._store.multi_get(keys), strict=True))

    def _look(self) -> tuple[int, Failure] | None:
        """Returns the first failure and the rank that told of it, or None where all is well."""
        gone = self._gone()
        try:
            is_told = self._store.check([_KEY])
        except RuntimeError:
            try:  # a connection may be lost and the store be there
                self._store = self._connect()
                is_told = self._store.check([_KEY])
            except (RuntimeError, OSError):
                message = "does not answer: the store that it or its launcher holds has gone"
                return self._teller(), self._ended(0) if 0 in self._gone() else self._died(0, message)
        with suppress(RuntimeError):
            if self._store.check([_ROLL]):
                self._store.set(f"{_ROLL}/{self._rank}", "")
        if is_told:  # a rank that tells of its own failure does so before it ends
            return _read(self._store.get(_KEY))
        if not gone:
            return None
        return self._tell(self._ended(gone[0]))

    def _teller(self) -> int:
        """Returns the rank of this host that tells what rank 0 cannot, whose process may hold the store."""
        return min({*self._neighbours} - {0} or {0})

    def _is_stopped(self, rank: int) -> bool:
        return rank in self._neighbours and process_state(self._places[rank].pid) == "T"

    def _gone(self) -> list[int]:
        """Returns the ranks of this host whose processes have ended."""
        return [rank for rank in self._neighbours if not _is_alive(self._places[rank].pid)]

    def _ended(self, rank: int) -> Failure:
        seen = self._judge.last_seen(rank)
        return self._died(rank, f"ended without a word{seen}; the lines of its launcher may say how")

    def _died(self, rank: int, message: str) -> Failure:
        place = self._places[rank]
        return Failure(rank=rank, host=place.host, coordinates=self._coordinates(rank), message=message, died=True)

    def _tell(self, failure: Failure) -> tuple[int, Failure]:
        own = json.dumps([self._rank, asdict(replace(failure, traceback=""))])
        try:
            return _read(self._store.compare_set(_KEY, "", own))
        except RuntimeError:  # nobody can be told
            return self._rank, failure

    def _end(self, teller: int, cause: Failure) -> None:
        """Ends this process, after one that is stopped or held and would keep a launcher waiting for its end."""
        self._is_settled.set()
        try:
            if cause.died and cause.rank != self._rank and cause.rank in self._neighbours:
                with suppress(ProcessLookupError):
                    os.kill(self._places[cause.rank].pid, signal.SIGKILL)
            if teller == self._rank:
                print_error(cause.line())
            if self._rank in (0, teller):
                RunOutcome.of(cause).write(self._run_dir)
        finally:
            end_process(cause.exit_status)


def _read(told: bytes) -> tuple[int, Failure]:
    teller, failure = json.loads(told)
    return teller, Failure(**failure)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
