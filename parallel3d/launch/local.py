"""Starts the workers of a run on this machine, where no other launcher has started them, and watches them.

`launch_local` never imports torch. A fork server imports it once and forks the workers, so that eight of them start in
the time of one; the workers meet through a file, so no port is needed. The first failure ends the run: one line says
who failed and why, and no process outlives its launcher.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import FrameType

from parallel3d.config.named_class import BESIDE_RECIPES
from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.launch.failure import Failure, print_error, root_cause
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.launch.run_dir import RunOutcome
from parallel3d.launch.signals import LAUNCHER_SIGNALS, SAVE_SIGNAL, STOP_SIGNALS, handled
from parallel3d.launch.worker_process import run_worker_process
from parallel3d.watch.pulse import BEAT_S, Beat, beat_file
from parallel3d.watch.verdict import Judge, process_state

# timeout(1), terminals and systemd send a signal twice at once; what comes within so many seconds, for a signal and for
# SIGINT, is the same request.
_SAME_S = (1.0, 0.1)
_NO_FORK_SERVER = 255  # what multiprocessing makes of the status of a process whose fork server has gone


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The times that the launcher waits, in seconds."""

    reports_s: float = 1.5  # after a first failure, for further reports: the first to arrive is seldom the cause
    stragglers_s: float = 60.0  # after a rank is done, for the other ranks


def launch_local(
    target: str,
    recipe: Recipe,
    world_size: int,
    *,
    arguments: Sequence[object] = (),
    preload: Sequence[str] = ("torch",),
    verbose: bool = False,
    patience: Patience | None = None,
) -> int:
    """Runs `target` ("module:function") in `world_size` processes of this machine; returns the exit status.

    The function is called with the recipe, its `Rendezvous` and `arguments`. `preload` names modules that are imported
    once for all workers. A failure is reported on stderr in one line, with a traceback where the error is not the
    user's (or with `verbose`), and in `outcome.json` of an existing run_dir. `SignalRelay` says which signals go on
    to the workers, so that they may save; the status is 128 + the signal where they end otherwise."""
    workers: list[_Worker] = []
    relay = SignalRelay(workers, saves=recipe.checkpoint.every is not None)
    # What nohup or a shell's & has started ignores Ctrl-C on purpose.
    heard = [each for each in STOP_SIGNALS if signal.getsignal(each) != signal.SIG_IGN]
    with tempfile.TemporaryDirectory(prefix="parallel3d-") as meeting_place, handled([*heard, SAVE_SIGNAL], relay):
        try:
            forkserver.set_forkserver_preload([*preload, "parallel3d.launch.worker_process", target.partition(":")[0]])
            with handled(LAUNCHER_SIGNALS, signal.SIG_IGN):  # the server that forks the workers inherits this
                start_fork_server()
            left = [meeting_place, get_temp_dir()]  # in the second one the fork server has its socket
            for rank in range(world_size):
                rendezvous = Rendezvous(
                    rank=rank,
                    local_rank=rank,
                    world_size=world_size,
                    local_world_size=world_size,
                    init_method=f"file://{meeting_place}/store",
                )
                workers.append(_Worker(target, recipe, rendezvous, (arguments, heard, left, BESIDE_RECIPES)))
                workers[-1].start()
            relay.passes_on = True
            failures = _watch(workers, patience or Patience(), Path(meeting_place))
            if failures and relay.has_ended(root_cause(failures)):
                raise _Stopped(relay.passed_on)
            outcome = _tell(failures, world_size, verbose)
        except _Stopped as stop:
            (signum,) = stop.args
            reason = f"stopped by {signal.Signals(signum).name}"
            print_error(reason)
            outcome = RunOutcome(exit_status=128 + signum, reason=reason)
        finally:
            relay.is_deaf = True
            started = [worker.process for worker in workers if worker.process.pid is not None]
            for process in started:
                process.kill()  # not terminate: a worker may take SIGTERM for a request and go on
            for process in started:
                process.join()
    outcome.write(recipe.run_dir)
    return outcome.exit_status


class _Stopped(KeyboardInterrupt):
    """Raised in the launcher by Ctrl-C or SIGTERM, with the number of the signal."""


class _Worker:
    """A local worker process, with its report and the time of its end."""

    def __init__(
        self,
        target: str,
        recipe: Recipe,
        rendezvous: Rendezvous,
        more: tuple[Sequence[object], Sequence[signal.Signals], Sequence[str], Sequence[str]],  # for run_worker_process
    ) -> None:
        self.rank, self.coordinates = rendezvous.rank, str(recipe.parallel.coordinates(rendezvous.rank))
        self._run_dir = recipe.run_dir
        self.ended_at: float | None = None
        context = multiprocessing.get_context("forkserver")
        self._reports, self._sender = context.Pipe(duplex=False)
        args = (target, recipe, rendezvous, self._sender, *more)
        self.process: BaseProcess = context.Process(target=run_worker_process, args=args, name=f"rank-{self.rank}")

    def start(self) -> None:
        self.process.start()
        self._sender.close()  # the worker holds a copy of its own

    def collect(self, last_seen: str) -> Failure | None:
        """Returns the failure of a process that has just ended, and was `last_seen` somewhere; None for a good end."""
        self.process.join()
        self.ended_at = time.monotonic()
        exitcode = self.process.exitcode
        report: Failure | None = None
        is_done = False
        with suppress(EOFError, OSError):
            if self._reports.poll():
                report = self._reports.recv()
                is_done = report is None
        if report is not None or (is_done and not exitcode):
            return report
        if exitcode == -signal.SIGKILL:
            message = f"was killed by SIGKILL{last_seen}; if nobody sent it, the host ran out of memory (see dmesg)"
        elif not exitcode:
            message = f"ended with status 0 before its work was done{last_seen}"
        elif exitcode < 0:
            message = f"was killed by {signal.Signals(-exitcode).name}{last_seen}"
        else:
            message = f"ended with status {exitcode} and without a word{last_seen}"
            if exitcode == _NO_FORK_SERVER:
                message += "; all ranks do when the server that forks them is killed, by someone or for want of memory"
        # A communication library that loses a peer may abort its process.
        aborted = exitcode == -signal.SIGABRT
        failure = Failure(rank=self.rank, coordinates=self.coordinates, message=message, died=True, secondary=aborted)
        return failure.with_record(self._run_dir)


def _watch(workers: Sequence[_Worker], patience: Patience, meeting_place: Path) -> list[Failure]:
    """Waits until all workers have ended well, until one keeps the others waiting, or until some time after a first
    failure. Returns the failures."""
    failures: list[Failure] = []
    deadline: float | None = None
    host = socket.gethostname()
    judge = Judge([host] * len(workers), host)
    while running := {worker.process.sentinel: worker for worker in workers if worker.ended_at is None}:
        left = BEAT_S if deadline is None else max(0.0, deadline - time.monotonic())
        ended = connection.wait(list(running), timeout=min(left, BEAT_S))
        if deadline is None and not ended and (found := _look(judge, workers, meeting_place)):
            return [found]
        if not ended and (deadline is None or time.monotonic() < deadline):
            continue
        if not ended and not failures:
            ended_at, first = min((worker.ended_at, worker.rank) for worker in workers if worker.ended_at is not None)
            waited = f"{time.monotonic() - ended_at:.0f} s after rank {first} ({workers[first].coordinates}) was done"
            left_over = next(iter(running.values()))
            message = f"still runs {waited}; it hangs"
            failures = [Failure(rank=left_over.rank, coordinates=left_over.coordinates, message=message, died=True)]
        if not ended:
            return failures
        for sentinel in ended:
            assert isinstance(sentinel, int)
            failure = running[sentinel].collect(judge.last_seen(running[sentinel].rank))
            if failure is not None:
                if not failures:
                    deadline = time.monotonic() + patience.reports_s
                failures.append(failure)
        if deadline is None:
            deadline = time.monotonic() + patience.stragglers_s
    return failures


def _look(judge: Judge, workers: Sequence[_Worker], meeting_place: Path) -> Failure | None:
    """Reads the beats of the workers, and returns the failure of one that keeps the others waiting."""
    beats, states = {}, {}
    for worker in workers:
        with suppress(OSError):
            beat = Beat.of_json(beat_file(meeting_place, worker.rank).read_text())
            if beat is not None and worker.process.pid is not None:
                beats[worker.rank], states[worker.rank] = beat, process_state(worker.process.pid)
    if (found := judge.look(beats, states, time.monotonic())) is None:
        return None
    rank, message = found
    return Failure(rank=rank, coordinates=workers[rank].coordinates, message=message, died=True)


def _tell(failures: Sequence[Failure], world_size: int, verbose: bool) -> RunOutcome:
    """Prints the failure that caused the others, if any rank failed, and returns how the run ended."""
    if not failures:
        return RunOutcome()
    cause = root_cause(failures)
    # What all ranks say alike is about the run: no rank is named.
    all_alike = len(failures) == world_size and all(failure.message == cause.message for failure in failures)
    line = cause.message if all_alike and cause.foreseen else cause.line()
    is_wanted = cause.traceback and (verbose or not cause.foreseen)
    print_error(line + ("\n" + cause.traceback.rstrip() if is_wanted else ""))
    return RunOutcome(exit_status=cause.exit_status, rank=cause.rank, reason=line.partition("\n")[0])


def start_fork_server() -> None:
    """Starts the server that forks processes. It imports modules from its own current folder first, so that must not be
    a folder whose files this process does not import either. Raises ConfigError if it cannot start."""
    try:
        with chdir("." if os.getcwd() in sys.path else "/"):
            forkserver.ensure_running()
    except OSError as error:
        folder = tempfile.gettempdir()
        raise ConfigError(f"TMPDIR = {folder}: no socket can be made there ({error}); try TMPDIR=/tmp") from error


class SignalRelay:
    """The launcher's handler of signals. Those that ask for an end raise `_Stopped`; once `passes_on` is set, the first
    of them is sent on to the workers instead, but for a SIGINT to workers that cannot save (not `saves`), and a second
    one raises it. SIGUSR1 is sent on to workers that can save. Once `is_deaf` is set, signals are ignored.

    A worker that is stopped would keep the others waiting, and the run from its end: it is told to continue, as SLURM,
    systemd and timeout do."""

    def __init__(self, workers: Sequence[_Worker], *, saves: bool) -> None:
        self._workers, self._saves = workers, saves
        self.passes_on = self.is_deaf = False
        self.passed_on = 0  # the signal that was sent on
        self._passed_on_at = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.is_deaf or (signum == SAVE_SIGNAL and not (self.passes_on and self._saves)):
            return
        now = time.monotonic()
        if self.passed_on and now - self._passed_on_at < _SAME_S[signum == signal.SIGINT]:
            return
        if signum != SAVE_SIGNAL:
            if not self.passes_on or self.passed_on or (signum == signal.SIGINT and not self._saves):
                raise _Stopped(signum)
            self.passed_on, self._passed_on_at = signum, now
        if signum == signal.SIGINT:  # not by print, which this handler may have interrupted
            os.write(2, b"\nsaves and ends after this step; Ctrl-C again ends at once, and saves nothing\n")
        for worker in self._workers:
            if worker.ended_at is None and worker.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(worker.process.pid, signum)
                    os.kill(worker.process.pid, signal.SIGCONT)

    def has_ended(self, failure: Failure) -> bool:
        """True if a worker was ended by the signal that was sent on, which had come before it could save."""
        if not self.passed_on or not failure.died:
            return False
        return failure.message.startswith(f"was killed by {signal.Signals(self.passed_on).name}")
