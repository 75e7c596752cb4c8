"""Faults of docs/faults.md, each done to a real run: what it prints, how it ends, what it leaves,
and that the same command resumes with the losses of a run without the fault, bitwise.

No test measures time. What a run prints within the bounds of the docs is measured by hand.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from parallel3d.checkpoint.store import find_checkpoints
from parallel3d.config.recipe import ParallelConfig
from tests.live_run import (
    LONGEST_S,
    MODEL,
    Act,
    Launch,
    LiveRun,
    local,
    losses,
    nohup,
    one_after_the_other,
    plant,
    small_recipe,
    srun,
    timeout,
    to_fork_server,
    to_group,
    to_launcher,
    to_rank,
    torchrun,
    undisturbed_losses,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

DATA = ParallelConfig(dp_shard=2)
FOUR = ParallelConfig(pp=2, tp=2)
TENSOR = ParallelConfig(tp=2)
AXES = {
    "pp": ParallelConfig(pp=2),
    "dp_replicate": ParallelConfig(dp_replicate=2),
    "dp_shard": DATA,
    "tp": TENSOR,
}
KILL = signal.SIGKILL
LAST_SEEN = r"last seen in [a-z ]+ after step \d+"
SERVER_KILLED = "all ranks do when the server that forks them is killed"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that `act` does to a run after step 12. Each pattern of `said` matches stderr."""

    name: str
    act: Act
    said: tuple[str, ...] = ()
    parallel: ParallelConfig = DATA
    launch: Launch = local
    status: int = 70
    train: tuple[tuple[str, Any], ...] = ()
    grace_s: float | None = None  # checkpoint.grace_s
    saves: bool = False  # the last step is saved

    def __str__(self) -> str:
        return self.name


def place(rank: int, parallel: ParallelConfig) -> str:
    return rf"(?m)^error: rank {rank} \(.*, {parallel.coordinates(rank)}\) "


def killed(rank: int, launch: Launch = local) -> Fault:
    how = "was killed by SIGKILL" if launch is local else "ended without a word"
    return Fault(
        name=f"SIGKILL of rank {rank}, {launch.__name__}",
        act=to_rank(rank, KILL),
        said=(place(rank, FOUR) + rf"{how}, {LAST_SEEN}; ",),
        parallel=FOUR,
        launch=launch,
    )


def died(name: str, act: Act) -> Fault:
    return Fault(
        name=f"{name} in rank 1", act=act, said=(place(1, DATA) + f"was killed by {name}",)
    )


def stopped(rank: int, parallel: ParallelConfig, launch: Launch = local) -> Fault:
    axes = " x ".join(f"{axis} {size}" for axis, size in parallel.axes.items() if size > 1)
    return Fault(
        name=f"SIGSTOP of rank {rank}, {axes}, {launch.__name__}",
        act=to_rank(rank, signal.SIGSTOP),
        said=(place(rank, parallel) + r"is stopped \(state T\)",),
        parallel=parallel,
        launch=launch,
    )


def stuck(function: str, launch: Launch = local) -> Fault:
    return Fault(
        name=f"{function}, {launch.__name__}",
        act=plant(2, function),
        said=(place(2, FOUR) + rf"is stuck for \d+ s in .*planted.py:\d+ \({function}\)",),
        parallel=FOUR,
        launch=launch,
    )


def asked(signum: signal.Signals, whom: str, act: Act, launch: Launch = local) -> Fault:
    name = "Ctrl-C" if signum == signal.SIGINT else signum.name
    return Fault(
        name=f"{signum.name} to {whom}, {launch.__name__}",
        act=act,
        said=(rf"(?m)^error: stopped by {name} after step \d+, saved: ",),
        status=130 if signum == signal.SIGINT else 75,
        launch=launch,
        saves=True,
    )


def wrong_number(function: str, said: str, parallel: ParallelConfig, status: int) -> Fault:
    return Fault(
        name=f"{function}, {parallel.world_size} ranks",
        act=plant(1, function),
        said=(f"(?m)^error: .*{said}",),
        parallel=parallel,
        status=status,
        train=(("compare_replicas_every", 5),),
    )


STOP_ONE = to_rank(1, signal.SIGSTOP)
ASKING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
WHOM = {
    "the launcher": to_launcher,
    "rank 1": lambda signum: to_rank(1, signum),
    "the group": to_group,
}
ENDS = [
    killed(0),
    killed(1),
    killed(3),
    killed(3, torchrun),
    killed(0, srun),
    killed(3, srun),
    Fault(name="SIGKILL of the launcher", act=to_launcher(KILL), parallel=FOUR, status=-KILL),
    Fault(
        name="SIGKILL of the launcher, rank 1 stopped",
        act=one_after_the_other(STOP_ONE, to_launcher(KILL)),
        status=-KILL,
    ),
    Fault(
        name="SIGKILL of torchrun, rank 1 stopped",
        act=one_after_the_other(STOP_ONE, to_launcher(KILL)),
        launch=torchrun,
        status=-KILL,
    ),
    Fault(name="SIGKILL of the fork server", act=to_fork_server(KILL), said=(SERVER_KILLED,)),
    died("SIGABRT", plant(1, "abort")),
    died("SIGSEGV", to_rank(1, signal.SIGSEGV)),
    died("SIGUSR2", to_rank(1, signal.SIGUSR2)),
    *(stopped(1, parallel) for parallel in AXES.values()),
    *(stopped(rank, FOUR) for rank in range(4)),
    *(stopped(rank, FOUR, torchrun) for rank in (0, 3)),
    *(stopped(rank, FOUR, srun) for rank in (0, 2)),
    stuck("loop_forever"),
    stuck("loop_forever", torchrun),
    stuck("read_forever"),
    *(asked(signum, whom, send(signum)) for signum in ASKING for whom, send in WHOM.items()),
    asked(signal.SIGTERM, "torchrun", to_launcher(signal.SIGTERM), torchrun),
    asked(signal.SIGTERM, "timeout", to_launcher(signal.SIGALRM), timeout),
    asked(
        signal.SIGTERM,
        "the group, rank 1 stopped",
        one_after_the_other(STOP_ONE, to_group(signal.SIGTERM)),
    ),
    Fault(
        name="Ctrl-C twice",
        act=one_after_the_other(plant(1, "save_slowly"), *2 * [to_group(signal.SIGINT)]),
        said=("Ctrl-C again ends at once", "(?m)^error: stopped by SIGINT$"),
        status=130,
    ),
    Fault(
        name="SIGTERM and a slow save",
        act=one_after_the_other(plant(1, "save_slowly"), to_group(signal.SIGTERM)),
        said=("not saved within checkpoint.grace_s = 1.0: .*/step_00000010 is the last good one",),
        status=143,
        grace_s=1.0,
    ),
    wrong_number(
        "spoil_a_gradient",
        r"gradient norm nan; the first gradient .* that of layers\.1\.mlp\.up\.weight on rank 1 ",
        TENSOR,
        71,
    ),
    wrong_number(
        "flip_a_bit",
        r"layers\.1\.mlp\.up\.weight is not the same on ranks 0 and 1 \(",
        ParallelConfig(dp_replicate=2, sharding="NO_SHARD"),
        70,
    ),
    wrong_number(
        "flip_a_bit",
        r"layers\.1\.mlp\.up\.weight on rank 1 \(.* is not what it is on ranks 0, 2 and 3",
        ParallelConfig(dp_replicate=4, sharding="NO_SHARD"),
        70,
    ),
]


def failed(function: str, launch: Launch, rank: int | str = 1) -> Fault:
    said = [place(1, DATA).replace(r"\) ", r"\): .*ValueError: a planted fault")]
    if launch is torchrun:
        said.append("(?m)^ .*ValueError: a planted fault")  # in its own report
    return Fault(
        name=f"{function}, {launch.__name__}",
        act=plant(rank, function),
        said=tuple(said),
        launch=launch,
    )


FAILURES = [
    failed("raise_error", local),
    failed("raise_error", torchrun),
    failed("raise_in_backward", local),
    Fault(
        name="exit with status 3",
        act=plant(1, "exit_with_3"),
        said=(place(1, DATA) + "ended with status 3",),
    ),
    failed("raise_in_rank_1_while_others_loop", torchrun, "all"),
    Fault(
        name="SIGKILL of rank 1, torchrun",
        act=to_rank(1, KILL),
        said=(place(1, DATA) + "ended without a word",),
        launch=torchrun,
    ),
    asked(signal.SIGTERM, "rank 1", to_rank(1, signal.SIGTERM), torchrun),
]


def recipe_of(fault: Fault, folder: Path) -> Any:
    recipe = small_recipe(folder, fault.parallel, **dict(fault.train))
    if fault.grace_s is None:
        return recipe
    return replace(recipe, checkpoint=replace(recipe.checkpoint, grace_s=fault.grace_s))


def disturb(run: LiveRun, act: Act) -> int:
    """Does a fault to a run after step 12, waits for its end, and returns the step of the fault."""
    try:
        run.wait_for_step(12)
        step = run.step()
        act(run)
        run.command.wait(LONGEST_S)
    finally:
        left = run.end()
    assert not left, f"left behind: {left}"
    return step


@pytest.mark.parametrize("fault", FAILURES, ids=str)
def test_a_failing_rank_is_told_once_and_ends_all(fault: Fault, tmp_path: Path) -> None:
    run = LiveRun(tmp_path, recipe_of(fault, tmp_path), fault.launch)
    disturb(run, fault.act)
    check_end(run, fault)
    assert run.outcome()["rank"] == (None if fault.saves else 1)


def check_end(run: LiveRun, fault: Fault) -> None:
    """Checks what a run has said at its end, and how it has ended."""
    stderr = run.stderr()
    for pattern in fault.said:
        assert re.search(pattern, stderr), stderr
    assert run.exit_status() == fault.status, stderr
    most_errors = 1 if fault.status > 0 else 0
    assert len(re.findall("(?m)^error: ", stderr)) == most_errors, stderr
    if fault.saves:
        (newest, *_) = find_checkpoints("auto", run.run_dir / "checkpoints")
        assert newest.name == f"step_{run.step():08d}"


@pytest.mark.long
@pytest.mark.parametrize("fault", ENDS, ids=str)
def test_a_run_names_the_fault_that_ends_it_and_resumes(fault: Fault, tmp_path: Path) -> None:
    recipe = recipe_of(fault, tmp_path)
    run = LiveRun(tmp_path, recipe, fault.launch)
    step = disturb(run, fault.act)
    check_end(run, fault)
    assert not fault.saves or run.step() <= step + 2
    again = LiveRun(tmp_path, recipe, fault.launch)
    try:
        assert again.command.wait(LONGEST_S) == 0, again.stderr()
    finally:
        again.end()
    assert losses(run.run_dir) == undisturbed_losses(tmp_path / "straight", recipe)


SAVES = r"SIGUSR1: saves after step 1\d, and goes on"
SURVIVED = [
    Fault(name="SIGUSR1 to the launcher", act=to_launcher(signal.SIGUSR1), said=(SAVES,)),
    Fault(name="SIGUSR1 to the group", act=to_group(signal.SIGUSR1), said=(SAVES,)),
    Fault(name="SIGHUP under nohup", act=to_group(signal.SIGHUP), launch=nohup),
    Fault(
        name="NaN in a gradient, skipped",
        act=plant(1, "spoil_a_gradient"),
        said=(r"(?m)^warning: step \d+: .* rank 1 \(.*; the step is left out, 1 in a row of 10",),
        parallel=TENSOR,
        train=(("on_nonfinite", "skip"),),
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("fault", SURVIVED, ids=str)
def test_a_run_goes_on_after(fault: Fault, tmp_path: Path) -> None:
    run = LiveRun(tmp_path, recipe_of(fault, tmp_path), fault.launch)
    disturb(run, fault.act)
    assert (run.command.returncode, run.step()) == (0, 60), run.stderr()
    for pattern in fault.said:
        assert re.search(pattern, run.stderr()), run.stderr()


def crowd(run: LiveRun) -> None:
    """Binds rank 1 to the last processor, together with three busy programs, and all other
    processes of the run to the other processors."""
    *others, last = sorted(os.sched_getaffinity(0))
    slow = run.rank_pid(1)
    for pid in run.processes():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {last} if pid == slow else others or {last})
    busy = ["sh", "-c", "while kill -0 $1 2>/dev/null; do :; done", "sh", str(run.command.pid)]
    # Linux may share a processor among sessions, so each program has a session of its own.
    programs = [subprocess.Popen(busy, start_new_session=True) for _ in range(3)]
    for program in programs:
        os.sched_setaffinity(program.pid, {last})
    for each in (run.command, *programs):
        with suppress(OSError):
            Path(f"/proc/{each.pid}/autogroup").write_text("-10")


@pytest.mark.long
@pytest.mark.parametrize("is_crowded", [True, False], ids=["crowded", "quiet"])
@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp"])
def test_a_rank_is_called_slow_only_if_others_use_its_processor(
    axis: str, is_crowded: bool, tmp_path: Path
) -> None:
    recipe = small_recipe(tmp_path, AXES[axis], steps=40, callbacks=())
    model = replace(MODEL, layers=4, hidden=128, heads=4, ffn_hidden=512)
    recipe = replace(recipe, model=model, train=replace(recipe.train, seq_len=64))
    run = LiveRun(tmp_path, recipe)
    step = disturb(run, crowd if is_crowded else lambda run: None)
    slow = rf"(?m)^warning: rank 1 \(.*, {AXES[axis].coordinates(1)}\) is slow: its work takes \d"
    found = re.search(slow, run.stderr())
    assert bool(found) == is_crowded, run.stderr()
    if found is not None:
        before = re.findall(r"(?m)^step (\d+)/", run.stderr()[: found.start()])
        assert int(before[-1]) <= step + 20
