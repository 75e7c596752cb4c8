"""The main function of a worker that `launch_local` has forked: set up, run the target, and report if it fails."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection

from parallel3d.config.named_class import BESIDE_RECIPES
from parallel3d.config.recipe import Recipe
from parallel3d.launch.failure import Failure, end_process, writing_output
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.launch.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1


def run_worker_process(
    target: str,
    recipe: Recipe,
    rendezvous: Rendezvous,
    reports: Connection,
    arguments: Sequence[object],
    heard: Sequence[signal.Signals],
    left: Sequence[str],
    beside_recipes: Sequence[str],
) -> None:
    """The main function of a worker process: reports None and returns when the target ("module:function") has, and
    reports a Failure and ends the process where it raises, also SystemExit. Sets the variables that torchrun would,
    and defaults that suit several workers on one host.

    The signals that the launcher has `heard` end the worker until it catches them; SIGUSR1 does nothing until then. A
    terminal sends Ctrl-C to every process, so what the launcher ignores the worker ignores, too. The folders `left`
    are removed where the launcher is killed, and cannot. In the folders `beside_recipes` named classes are found."""
    _die_with_the_launcher(left)
    BESIDE_RECIPES.extend(beside_recipes)
    for each in STOP_SIGNALS:  # all of which the fork server ignores
        signal.signal(each, signal.SIG_DFL if each in heard else signal.SIG_IGN)
    for name in ("rank", "local_rank", "world_size", "local_world_size"):
        os.environ[name.upper()] = str(getattr(rendezvous, name))
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, cores() // rendezvous.local_world_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if "torch" in sys.modules:  # imported by the fork server already, so it has read the variable before
            sys.modules["torch"].set_num_threads(threads)
    if sys.platform == "linux" and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that resolves elsewhere is no obstacle
    try:
        module, _, name = target.partition(":")
        with writing_output():
            getattr(import_module(module), name)(recipe, rendezvous, *arguments)
        reports.send(None)  # it is done, and has not just ended
    except BaseException as error:
        failure = Failure.of(error, rendezvous.rank, str(recipe.parallel.coordinates(rendezvous.rank)))
        reports.send(failure.with_record(recipe.run_dir))  # before any group is touched, which may never return
        end_process(failure.exit_status)


def _die_with_the_launcher(left: Sequence[str]) -> None:
    """Makes this worker end with its launcher, even if that is killed: a thread waits for the launcher's end, and then
    removes what it has `left`.

    The thread ends the fork server as well, which is this process's parent, and so every worker, also one that is
    stopped and whose own thread sleeps."""
    die_with_the_parent()
    launcher, fork_server = multiprocessing.parent_process(), os.getppid()
    assert launcher is not None

    def follow() -> None:
        launcher.join()
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        if os.getppid() == fork_server:
            os.kill(fork_server, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="die-with-the-launcher", daemon=True).start()


def die_with_the_parent() -> None:
    """Has the kernel kill this process when its parent ends, also while this process is stopped."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before the kernel knew
            os.kill(os.getpid(), signal.SIGKILL)


def cores() -> int:
    """Returns the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
