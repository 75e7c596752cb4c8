"""The main function of a worker that `launch_local` has forked: set up, run the target, and report
a failure."""

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
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection

from parallel3d.config.import_class import BESIDE_RECIPES
from parallel3d.config.recipe import Recipe
from parallel3d.launch.failure import Failure, end_process, writing_output
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.launch.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """What the launcher tells all of its workers."""

    target: str  # "module:function"
    arguments: Sequence[object]
    heard: Sequence[signal.Signals]  # the others are ignored, as the launcher does
    folders: Sequence[str]  # that workers remove if the launcher is killed
    beside_recipes: Sequence[str]  # where classes of the user are found


def run_worker_process(
    recipe: Recipe, rendezvous: Rendezvous, reports: Connection, setup: WorkerSetup
) -> None:
    """Sets torchrun's variables and runs the target. Reports None if it returns, and a Failure if
    it raises, even SystemExit. Signals end the worker until the run catches them."""
    _die_with_the_launcher(setup.folders)
    BESIDE_RECIPES.extend(setup.beside_recipes)
    for each in STOP_SIGNALS:  # the fork server ignores all of them
        signal.signal(each, signal.SIG_DFL if each in setup.heard else signal.SIG_IGN)
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
        module, _, name = setup.target.partition(":")
        with writing_output():
            getattr(import_module(module), name)(recipe, rendezvous, *setup.arguments)
        reports.send(None)
    except BaseException as error:
        coordinates = str(recipe.parallel.coordinates(rendezvous.rank))
        failure = Failure.of(error, rendezvous.rank, coordinates)
        reports.send(failure.with_record(recipe.run_dir))  # first: ending groups may take for ever
        end_process(failure.exit_status)


def _die_with_the_launcher(folders: Sequence[str]) -> None:
    """Has a thread wait for the launcher's end, remove its folders, and kill the fork server, which
    is this process's parent. With the fork server every worker ends, even one that is stopped."""
    die_with_the_parent()
    launcher, fork_server = multiprocessing.parent_process(), os.getppid()
    assert launcher is not None

    def follow() -> None:
        launcher.join()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if os.getppid() == fork_server:
            os.kill(fork_server, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="die-with-the-launcher", daemon=True).start()


def die_with_the_parent() -> None:
    """Has the kernel kill this process when its parent ends, even if this process is stopped."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before the kernel knew
            os.kill(os.getpid(), signal.SIGKILL)


def cores() -> int:
    """Returns the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
