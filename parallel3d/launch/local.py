"""Starts the workers of a run on this machine and monitors them.

The launcher does not import torch. A fork server imports it once and forks the workers, so eight
start as fast as one. They meet through a file, not a port. The first failure ends the run, and an
error line names the rank and the reason. No worker outlives the launcher."""

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
from parallel3d.launch.run_log import see_log
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

# Seconds within which a second signal counts as the same request, because timeout(1), terminals and
# systemd send signals twice. Users press Ctrl-C again sooner.
_SAME_SIGNAL_S = 1.0
_SAME_CTRL_C_S = 0.1
# Exit code of a worker -> explanation for its error line. 255: the fork server was killed.
_WHY_KILLED = {
    -signal.SIGKILL: "; if no user sent this signal, the host ran out of memory (see dmesg)",
    255: (
        "; all ranks end like this if their fork server is killed, by a user or for lack of memory"
    ),
}
# Seconds to wait for further reports after the first, which may not be the root cause.
REPORTS_S = 1.5
STRAGGLERS_S = 60.0  # Seconds to wait for the other ranks after one is done.


def launch_local(
    target: str,
    recipe: Recipe,
    world_size: int,
    *,
    arguments: Sequence[object] = (),
    preload: Sequence[str] = ("torch",),
    verbose: bool = False,
) -> int:
    """Runs a function in `world_size` processes on this machine, and waits for them.

    Prints an error line if one fails. Writes `outcome.json` if the recipe has a `run_dir`.

    Args:
        target: Function as "module:function". It is called with the recipe, its `Rendezvous` and
            `arguments`.
        recipe: Recipe of the run.
        world_size: Number of processes.
        arguments: Further arguments of the function.
        preload: Modules that the fork server imports, once for all workers.
        verbose: Print a traceback even for user errors and lost peers.

    Returns:
        Exit status. It is 128 + the signal number if a signal ended the run without a save.
    """
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
            with handled(LAUNCHER_SIGNALS, signal.SIG_IGN):  # The fork server inherits this.
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
                workers.append(_Worker(rank, coordinates, process, reports, recipe.run_dir))
                sender.close()  # The worker has its own copy.
            relay.passes_on = True
            failures = _wait_for(workers, Path(folder))
            ends = [worker.process.exitcode for worker in workers]
            # The forwarded signal killed a worker before it could save.
            if relay.passed_on and -relay.passed_on in ends:
                raise _Stopped(relay.passed_on)
            outcome = _report(failures, recipe, verbose)
        except _Stopped as stop:
            (signum,) = stop.args
            reason = f"stopped by {signal.Signals(signum).name}"
            print_error(reason, recipe.run_dir)
            outcome = RunOutcome(exit_status=128 + signum, reason=reason)
        finally:
            ignore_stop_signals()
            for worker in workers:
                worker.process.kill()  # SIGTERM would ask a worker to save.
            for worker in workers:
                worker.process.join()
    outcome.write(recipe.run_dir)
    return outcome.exit_status


class _Stopped(KeyboardInterrupt):
    """Raised in the launcher by a stop signal. Its only argument is the signal number."""


@dataclass
class _Worker:
    """A local worker process and the pipe for its report."""

    rank: int
    coordinates: str
    process: ForkServerProcess
    reports: Connection
    run_dir: str | None
    has_ended: bool = False

    def failure(self, message: str, *, secondary: bool = False) -> Failure:
        """Returns a failure that this rank did not report itself."""
        return Failure(
            rank=self.rank,
            coordinates=self.coordinates,
            message=message + see_log(self.run_dir, self.rank),
            died=True,
            secondary=secondary,
        )

    def collect(self, last_seen: str) -> Failure | None:
        """Returns the failure of this ended worker, or None. `last_seen` is its last activity."""
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
        # Communication libraries may abort the process if a peer is lost.
        return self.failure(message, secondary=exitcode == -signal.SIGABRT)


def _wait_for(workers: Sequence[_Worker], folder: Path) -> list[Failure]:
    """Waits until all workers have ended, and returns their failures.

    Stops waiting REPORTS_S after the first failure and STRAGGLERS_S after the first success. If a
    rank hangs before that, returns only its failure, immediately."""
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
    """Reads the heartbeats of the workers. Returns the failure of a worker that hangs, or None."""
    beats = {}
    states = {}
    for worker in workers if len(workers) > 1 else ():
        with suppress(OSError):
            beats[worker.rank] = Beat.from_json((folder / f"beat_{worker.rank}").read_text())
            states[worker.rank] = process_state(worker.process.pid or 0)
    found = detector.check(beats, states, time.monotonic())
    return workers[found[0]].failure(found[1]) if found else None


def _report(failures: Sequence[Failure], recipe: Recipe, verbose: bool) -> RunOutcome:
    """Prints the failure that caused the others, if any. Returns the outcome of the run."""
    if not failures:
        return RunOutcome()
    cause = root_cause(failures)
    line = cause.line()
    alike = [each for each in failures if each.message == cause.message]
    if cause.foreseen and len(alike) == recipe.parallel.world_size:
        line = cause.message  # All ranks report the same error.
    print_error(line + cause.traceback_for_user(verbose=verbose), recipe.run_dir)
    return replace(RunOutcome.of(cause), reason=line.partition("\n")[0])


def start_fork_server() -> None:
    """Starts the fork server. Raises ConfigError if it cannot start.

    The server imports modules from its working directory first, so it starts in `/` unless the
    working directory of this process is on `sys.path`."""
    try:
        with chdir("." if os.getcwd() in sys.path else "/"):
            forkserver.ensure_running()
    except OSError as error:
        folder = tempfile.gettempdir()
        raise ConfigError(
            f"TMPDIR = {folder}: cannot create a socket there ({error}); try TMPDIR=/tmp"
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
    """Main function of a worker: sets the rank variables as torchrun does, and runs the target.

    Sends None to `reports` if the target returns, or a Failure if it raises, even SystemExit. Stop
    signals in `heard` kill the worker until the target installs handlers."""
    folder = Path(rendezvous.init_method.removeprefix("file://")).parent
    _die_with_the_launcher(folder)
    BESIDE_RECIPES.extend(beside_recipes)
    for each in heard:  # Ignored in the fork server.
        signal.signal(each, signal.SIG_DFL)
    for name in ("rank", "local_rank", "world_size", "local_world_size"):
        os.environ[name.upper()] = str(getattr(rendezvous, name))
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, cores() // rendezvous.local_world_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:  # The fork server imported torch before the variable was set.
            sys.modules["torch"].set_num_threads(threads)
    if sys.platform == "linux" and any(name == "lo" for _, name in socket.if_nameindex()):
        # By default gloo uses the address of the hostname, which may not be local.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        module, _, name = target.partition(":")
        with writing_output(), beats_to_file(folder / f"beat_{rendezvous.rank}"):
            getattr(import_module(module), name)(recipe, rendezvous, *arguments)
        reports.send(None)
    except BaseException as error:
        failure = Failure.of(error, rendezvous.rank, recipe)
        reports.send(failure)  # Report first, because ending process groups can block.
        end_process(failure.exit_status)


def _die_with_the_launcher(folder: Path) -> None:
    """Ensures that this worker does not outlive the launcher.

    Starts a thread that waits until the launcher ends, removes the launcher's temporary folders,
    and kills the fork server and this worker. A stopped worker cannot run this thread. On Linux the
    kernel kills it when its parent, the fork server, ends."""
    die_with_the_parent()
    launcher = multiprocessing.parent_process()
    fork_server = os.getppid()
    assert launcher is not None

    def follow() -> None:
        launcher.join()
        for _ in range(100):  # Each heartbeat that is written meanwhile stops one removal.
            shutil.rmtree(folder, ignore_errors=True)
        # The folder that contains the socket of the fork server.
        shutil.rmtree(get_temp_dir(), ignore_errors=True)
        if os.getppid() == fork_server:
            os.kill(fork_server, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="die-with-the-launcher", daemon=True).start()


def cores() -> int:
    """Returns the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SignalRelay:
    """Signal handler of the launcher, which forwards signals to the workers.

    The first stop signal is forwarded. `_Stopped` is raised for a second one after _SAME_SIGNAL_S
    or _SAME_CTRL_C_S, for one before all workers were started, and for SIGINT unless `saves`.
    SIGUSR1 is forwarded if `saves`. SIGCONT follows every forwarded signal, because a stopped
    worker would keep the others waiting."""

    def __init__(self, workers: Sequence[_Worker], *, saves: bool) -> None:
        self._workers = workers
        self._saves = saves
        self.passes_on = False  # True once all workers were started.
        self.passed_on = 0  # Stop signal that was forwarded, or 0.
        self._passed_on_at = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if signum == SAVE_SIGNAL:
            if self._saves:  # Workers that are still starting ignore SIGUSR1.
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
        if signum == signal.SIGINT:  # os.write, because this handler may have interrupted a print
            os.write(
                2,
                b"\nsaves and ends after this step; Ctrl-C again ends at once without saving\n",
            )
        self._pass_on(signum)

    def _pass_on(self, signum: int) -> None:
        for worker in self._workers:
            pid = worker.process.pid
            if pid is not None and not worker.has_ended:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)
                    os.kill(pid, signal.SIGCONT)
