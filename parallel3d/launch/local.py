"""How the workers of a run start on this machine, where no launcher of the user's has started them, and are watched.

`launch_local` never imports torch. A fork server imports it once and forks the workers, so that eight of them start in
the time of one; the workers meet through a file, so no port is needed. The first failure ends the run: one line says
who failed and why, and no process outlives its launcher.
"""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from parallel3d.config.recipe import Recipe
from parallel3d.errors import PreemptedError
from parallel3d.launch.failure import Failure, print_error, root_cause, told_once
from parallel3d.launch.local_worker import Job, run_job
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.launch.run_dir import Outcome, write_outcome

__all__ = ["Patience", "Rendezvous", "launch_local"]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the launcher waits for what, in seconds."""

    reports_s: float = 1.5  # after a first failure, for those of the others: the first to be heard is seldom the cause
    stragglers_s: float = 60.0  # after a rank is done, for the others to be done too


def launch_local(
    target: str,
    recipe: Recipe,
    world_size: int,
    *,
    preload: Sequence[str] = ("torch",),
    verbose: bool = False,
    patience: Patience | None = None,
) -> int:
    """Runs `target` ("module:function") in `world_size` processes of this machine; returns the exit status.

    The function is called with the recipe and its `Rendezvous`. `preload` names modules that are imported once for all
    workers. A failure is told on stderr in one line, with a traceback where the error is not the user's (or `verbose`),
    and in `outcome.json` of an existing run_dir. Ctrl-C gives 130. SIGTERM is passed on to the workers, which may save
    and end; 143 where they end otherwise, or at a second one.
    """
    patience = patience or Patience()
    workers: list[_Worker] = []
    ear = _Ear(workers)
    with tempfile.TemporaryDirectory(prefix="parallel3d-") as meeting_place, ear.listening():
        try:
            _start_server([*preload, "parallel3d.launch.local_worker", target.partition(":")[0]])
            for rank in range(world_size):
                workers.append(_Worker(_job(target, recipe, rank, world_size, meeting_place)))
                workers[-1].start()
            ear.passes_on = True
            failures = _watch(workers, patience)
            if ear.has_passed_on and failures and root_cause(failures).exit_status != PreemptedError.exit_status:
                raise _Stopped(signal.SIGTERM)
            outcome = _tell(failures, world_size, verbose)
        except _Stopped as stop:
            print_error(f"stopped by {stop.signal.name}")
            outcome = Outcome(status="failed", exit_status=128 + stop.signal, reason=f"stopped by {stop.signal.name}")
        finally:
            ear.is_deaf = True
            _take_down(workers)
    if recipe.run_dir is not None:
        write_outcome(Path(recipe.run_dir), outcome)
    return outcome.exit_status


class _Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, wherever the launcher is."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signal = signal.Signals(signum)


class _Worker:
    """A local process, and what is known of its end."""

    def __init__(self, job: Job) -> None:
        self.rank = job.rendezvous.rank
        self.coordinates = job.coordinates
        self.ended_at: float | None = None
        context = multiprocessing.get_context("forkserver")
        self._reports, self._sender = context.Pipe(duplex=False)
        self.process: BaseProcess = context.Process(target=run_job, args=(job, self._sender), name=f"rank-{self.rank}")

    def start(self) -> None:
        self.process.start()
        self._sender.close()  # the worker has its own

    def collect(self) -> Failure | None:
        """The failure of a process that has just ended, or None for a good end."""
        self.process.join()
        self.ended_at = time.monotonic()
        exitcode = self.process.exitcode
        try:
            report = self._reports.recv() if self._reports.poll() else None
        except (EOFError, OSError):
            report = None
        if isinstance(report, Failure):
            return report
        return Failure.of_death(exitcode, self.rank, self.coordinates) if exitcode else None


def _job(target: str, recipe: Recipe, rank: int, world_size: int, meeting_place: str) -> Job:
    rendezvous = Rendezvous(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        init_method=f"file://{meeting_place}/store",
    )
    return Job(target=target, recipe=recipe, rendezvous=rendezvous, coordinates=str(recipe.parallel.coordinates(rank)))


def _start_server(preload: list[str]) -> None:
    """Starts the process that forks the workers, deaf to Ctrl-C: the launcher hears it, and the server ends with it."""
    forkserver.set_forkserver_preload(preload)
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    try:
        forkserver.ensure_running()
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, before)


def _watch(workers: Sequence[_Worker], patience: Patience) -> list[Failure]:
    """Waits until all workers have ended well, or until a first failure and a moment more; returns the failures."""
    failures: list[Failure] = []
    deadline: float | None = None
    while running := {worker.process.sentinel: worker for worker in workers if worker.ended_at is None}:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended = connection.wait(list(running), timeout=left)
        if not ended:
            return failures or [_straggler(workers)]
        for sentinel in ended:
            assert isinstance(sentinel, int)
            failure = running[sentinel].collect()
            if failure is not None:
                if not failures:
                    deadline = time.monotonic() + patience.reports_s
                failures.append(failure)
        if deadline is None:
            deadline = time.monotonic() + patience.stragglers_s
    return failures


def _straggler(workers: Sequence[_Worker]) -> Failure:
    running = next(worker for worker in workers if worker.ended_at is None)
    first = min(
        (worker for worker in workers if worker.ended_at is not None), key=lambda worker: worker.ended_at or 0.0
    )
    waited = time.monotonic() - (first.ended_at or 0.0)
    message = f"still runs {waited:.0f} s after rank {first.rank} ({first.coordinates}) was done; it hangs"
    return Failure.of_silence(message, running.rank, running.coordinates)


def _tell(failures: Sequence[Failure], world_size: int, verbose: bool) -> Outcome:
    """Prints the failure that caused the others, if there is one."""
    if not failures:
        return Outcome(status="done", exit_status=0)
    cause = root_cause(failures)
    line = told_once(cause, failures, world_size)
    if cause.traceback and (verbose or not cause.foreseen):
        line += "\n" + cause.traceback.rstrip()
    print_error(line)
    return Outcome(status="failed", exit_status=cause.exit_status, rank=cause.rank, reason=line.partition("\n")[0])


def _take_down(workers: Sequence[_Worker]) -> None:
    """Ends every worker that still runs: at once, since it may take SIGTERM for a request, and hang."""
    started = [worker.process for worker in workers if worker.process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()


class _Ear:
    """SIGINT and SIGTERM, raised as `_Stopped`: but the first SIGTERM, once `passes_on`, is the workers' to answer; and
    nothing any more when it `is_deaf`."""

    def __init__(self, workers: Sequence[_Worker]) -> None:
        self._workers = workers
        self.passes_on = self.has_passed_on = self.is_deaf = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """In the main thread; another one gets no signals."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signum) != signal.SIG_IGN:  # nohup and background jobs ignore Ctrl-C on purpose
                    before[signum] = signal.signal(signum, self._hear)
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        if self.is_deaf:
            return
        if signum != signal.SIGTERM or not self.passes_on or self.has_passed_on:
            raise _Stopped(signum)
        self.has_passed_on = True
        for worker in self._workers:
            worker.process.terminate()
