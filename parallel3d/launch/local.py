"""Starts the workers of a run on this machine and monitors them.

`launch_local` never imports torch. A fork server imports it once and forks the workers, so eight
start in the time of one. They meet through a file, so no port is needed. The first failure ends the
run: one line names the rank and the reason, and no process outlives its launcher.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import FrameType

from parallel3d.config.import_class import BESIDE_RECIPES
from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.launch.failure import (
    Failure,
    end_process,
    print_error,
    root_cause,
    writing_output,
)
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.launch.run_dir import RunOutcome
from parallel3d.launch.signals import (
    LAUNCHER_SIGNALS,
    SAVE_SIGNAL,
    die_with_the_parent,
    handled,
    heeded_stop_signals,
    ignore_stop_signals,
)
from parallel3d.watch.hang_detector import HangDetector, process_state
from parallel3d.watch.heartbeat import BEAT_S, Beat, beats_to_file

# timeout(1), terminals and systemd send a signal twice. A second one within this time is the same
# request; people press Ctrl-C again sooner.
_SAME_SIGNAL_S = 1.0
_SAME_CTRL_C_S = 0.1
# Words on the exit code of a process; it is 255 if the fork server has gone.
_WHY_KILLED = {
    -signal.SIGKILL: "; if nobody sent it, the host ran out of memory (see dmesg)",
    255: (
        "; all ranks do when the server that forks them is killed, by someone or for want of memory"
    ),
}
REPORTS_S = 1.5  # after a first failure, for further reports: the first is seldom the cause
STRAGGLERS_S = 60.0  # after a rank is done, for the others


def launch_local(
    target: str,
    recipe: Recipe,
    world_size: int,
    *,
    arguments: Sequence[object] = (),
    preload: Sequence[str] = ("torch",),
    verbose: bool = False,
) -> int:
    """Runs `target` ("module:function") in `world_size` processes of this machine.

    The function gets the recipe, its `Rendezvous` and `arguments`. `preload` names modules that are
    imported once for all workers. A failure is one line on stderr, with a traceback if the error is
    not the user's (or with `verbose`), and in `outcome.json`. Returns the exit status: 128 + the
    signal if the launcher was stopped by one that workers could not answer."""
    workers: list[_Worker] = []
    relay = SignalRelay(workers, saves=recipe.checkpoint.every is not None)
    heard = heeded_stop_signals()
    context = multiprocessing.get_context("forkserver")
    with (
        tempfile.TemporaryDirectory(prefix="parallel3d-") as folder,
        handled([*heard, SAVE_SIGNAL], relay),
    ):
        try:
            context.set_forkserver_preload([*preload, __name__, target.partition(":")[0]])
            with handled(LAUNCHER_SIGNALS, signal.SIG_IGN):  # the fork server inherits this
                start_fork_server()
            for rank in range(world_size):
                rendezvous = Rendezvous(
                    rank=rank,
                    local_rank=rank,
                    world_size=world_size,
                    local_world_size=world_size,
                    init_method=f"file://{folder}/store",
                )
                reports, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_worker,
                    args=(recipe, rendezvous, sender, target, arguments, heard, BESIDE_RECIPES),
                )
                process.start()
                coordinates = str(recipe.parallel.coordinates(rank))
                workers.append(_Worker(rank, coordinates, process, reports))
                sender.close()  # the worker has its own copy
            relay.passes_on = True
            failures = _wait_for(workers, Path(folder))
            ends = [worker.process.exitcode for worker in workers]
            if relay.passed_on and -relay.passed_on in ends:  # before that worker could save
                raise _Stopped(relay.passed_on)
            outcome = _report(failures, world_size, verbose)
        except _Stopped as stop:
            (signum,) = stop.args
            reason = f"stopped by {signal.Signals(signum).name}"
            print_error(reason)
            outcome = RunOutcome(exit_status=128 + signum, reason=reason)
        finally:
            ignore_stop_signals()
            for worker in workers:
                worker.process.kill()  # SIGTERM would ask a worker to save
            for worker in workers:
                worker.process.join()
    outcome.write(recipe.run_dir)
    return outcome.exit_status


class _Stopped(KeyboardInterrupt):
    """Raised in the launcher by Ctrl-C or SIGTERM, with the number of the signal."""


@dataclass
class _Worker:
    """A local worker process, with the pipe for its report."""

    rank: int
    coordinates: str
    process: ForkServerProcess
    reports: Connection
    has_ended: bool = False

    def failure(self, message: str, *, secondary: bool = False) -> Failure:
        """Returns the failure of this rank, which did not report it itself."""
        return Failure(
            rank=self.rank,
            coordinates=self.coordinates,
            message=message,
            died=True,
            secondary=secondary,
        )

    def collect(self, last_seen: str) -> Failure | None:
        """Returns the failure of a process that has just ended, or None if its work was done."""
        self.has_ended = True
        exitcode = self.process.exitcode or 0
        with suppress(EOFError, OSError):
            if self.reports.poll():
                report: Failure | None = self.reports.recv()
                if report is not None or exitcode == 0:
                    return report
        end = f"ended with status {exitcode} before its work was done"
        if exitcode < 0:
            end = f"was killed by {signal.Signals(-exitcode).name}"
        message = end + last_seen + _WHY_KILLED.get(exitcode, "")
        # A communication library that loses a peer may abort its process.
        return self.failure(message, secondary=exitcode == -signal.SIGABRT)


def _wait_for(workers: Sequence[_Worker], folder: Path) -> list[Failure]:
    """Waits until all workers are done. After a first failure, waits a little for further reports.
    Returns the failures; a rank that hangs is the only one."""
    failures: list[Failure] = []
    deadline = math.inf
    host = socket.gethostname()
    detector = HangDetector([host] * len(workers), host)
    while running := [worker for worker in workers if not worker.has_ended]:
        left_s = max(0.0, deadline - time.monotonic())
        connection.wait([each.process.sentinel for each in running], timeout=min(left_s, BEAT_S))
        ended = [worker for worker in running if worker.process.exitcode is not None]
        for worker in ended:
            limit_s = STRAGGLERS_S
            report = worker.collect(detector.last_seen(worker.rank))
            if report is not None:
                failures.append(report)
                limit_s = REPORTS_S
            deadline = min(deadline, time.monotonic() + limit_s)
        if not ended and time.monotonic() >= deadline:
            message = f"still runs {STRAGGLERS_S:.0f} s after another rank was done; it hangs"
            return failures or [running[0].failure(message)]
        if deadline == math.inf and (hanging := _find_hanging(detector, workers, folder)):
            return [hanging]
    return failures


def _find_hanging(
    detector: HangDetector, workers: Sequence[_Worker], folder: Path
) -> Failure | None:
    """Reads the beats of the workers. Returns the failure of one that keeps the others waiting."""
    beats = {}
    states = {}
    for worker in workers if len(workers) > 1 else ():
        with suppress(OSError):
            beats[worker.rank] = Beat.from_json((folder / f"beat_{worker.rank}").read_text())
            states[worker.rank] = process_state(worker.process.pid or 0)
    found = detector.check(beats, states, time.monotonic())
    return workers[found[0]].failure(found[1]) if found else None


def _report(failures: Sequence[Failure], world_size: int, verbose: bool) -> RunOutcome:
    """Prints the failure that caused the others, if any rank failed. Returns the outcome."""
    if not failures:
        return RunOutcome()
    cause = root_cause(failures)
    line = cause.line()
    alike = [each for each in failures if each.message == cause.message]
    if cause.foreseen and len(alike) == world_size:
        line = cause.message  # all ranks report the same, so it is about the run
    print_error(line + cause.traceback_for_user(verbose=verbose))
    return replace(RunOutcome.of(cause), reason=line.partition("\n")[0])


def start_fork_server() -> None:
    """Starts the server that forks processes. It searches its current folder for modules first, so
    it starts in `/` if this process does not import from the current folder. Raises ConfigError if
    it cannot start."""
    try:
        with chdir("." if os.getcwd() in sys.path else "/"):
            forkserver.ensure_running()
    except OSError as error:
        folder = tempfile.gettempdir()
        raise ConfigError(
            f"TMPDIR = {folder}: no socket can be made there ({error}); try TMPDIR=/tmp"
        ) from error


def _run_worker(
    recipe: Recipe,
    rendezvous: Rendezvous,
    reports: Connection,
    target: str,
    arguments: Sequence[object],
    heard: Sequence[signal.Signals],
    beside_recipes: Sequence[str],
) -> None:
    """The main function of a worker. It sets torchrun's variables and runs the target. It reports
    None if that returns, and a Failure if it raises, even SystemExit. Signals that the launcher
    heeds (`heard`) end the worker until the run catches them."""
    folder = Path(rendezvous.init_method.removeprefix("file://")).parent
    _die_with_the_launcher(folder)
    BESIDE_RECIPES.extend(beside_recipes)
    for each in heard:  # the fork server ignores all signals of the launcher
        signal.signal(each, signal.SIG_DFL)
    for name in ("rank", "local_rank", "world_size", "local_world_size"):
        os.environ[name.upper()] = str(getattr(rendezvous, name))
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, cores() // rendezvous.local_world_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:  # the fork server imported it before the variable was set
            sys.modules["torch"].set_num_threads(threads)
    if sys.platform == "linux" and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may resolve elsewhere
    try:
        module, _, name = target.partition(":")
        with writing_output(), beats_to_file(folder / f"beat_{rendezvous.rank}"):
            getattr(import_module(module), name)(recipe, rendezvous, *arguments)
        reports.send(None)
    except BaseException as error:
        failure = Failure.of(error, rendezvous.rank, recipe.parallel)
        reports.send(failure)  # first: ending groups may take for ever
        end_process(failure.exit_status)


def _die_with_the_launcher(folder: Path) -> None:
    """Has a thread wait for the launcher's end, remove its folders, and kill the fork server, which
    is this process's parent. With the fork server every worker ends, even one that is stopped."""
    die_with_the_parent()
    launcher = multiprocessing.parent_process()
    fork_server = os.getppid()
    assert launcher is not None

    def follow() -> None:
        launcher.join()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(get_temp_dir(), ignore_errors=True)  # it has the fork server's socket
        if os.getppid() == fork_server:
            os.kill(fork_server, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="die-with-the-launcher", daemon=True).start()


def cores() -> int:
    """Returns the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SignalRelay:
    """The launcher's signal handler. It passes the first signal that asks for an end on to the
    workers, and raises `_Stopped` for a second one, for one before the workers run, and for SIGINT
    to workers that cannot save. It passes SIGUSR1 on to workers that can save.

    A stopped worker would keep the others waiting, so it is told to continue."""

    def __init__(self, workers: Sequence[_Worker], *, saves: bool) -> None:
        self._workers = workers
        self._saves = saves
        self.passes_on = False
        self.passed_on = 0  # the signal that was passed on
        self._passed_on_at = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if signum == SAVE_SIGNAL:
            if self._saves:  # a worker that has just started ignores it
                self._pass_on(signum)
            return
        same_s = _SAME_CTRL_C_S if signum == signal.SIGINT else _SAME_SIGNAL_S
        if self.passed_on and time.monotonic() - self._passed_on_at < same_s:
            return
        cannot_save = signum == signal.SIGINT and not self._saves
        if not self.passes_on or self.passed_on or cannot_save:
            raise _Stopped(signum)
        self.passed_on = signum
        self._passed_on_at = time.monotonic()
        if signum == signal.SIGINT:  # print may be what this handler has interrupted
            os.write(
                2,
                b"\nsaves and ends after this step; Ctrl-C again ends at once, and saves nothing\n",
            )
        self._pass_on(signum)

    def _pass_on(self, signum: int) -> None:
        for worker in self._workers:
            pid = worker.process.pid
            if pid is not None and not worker.has_ended:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)
                    os.kill(pid, signal.SIGCONT)
