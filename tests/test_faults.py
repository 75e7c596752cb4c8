"""Faults of a real run: what it prints, how it ends, what it leaves,
and that the same command resumes with the losses of a run without the fault, bitwise.

No test measures time. What a run prints within the bounds of the docs is measured by hand.
"""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from parallel3d.checkpoint.store import find_checkpoints
from parallel3d.config.recipe import ParallelConfig
from tests.live_run import (
    LONGEST_S,
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

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

DATA = ParallelConfig(dp_shard=2)
TENSOR = ParallelConfig(tp=2)
FOUR = ParallelConfig(pp=2, tp=2)
KILL = signal.SIGKILL
STOP = signal.SIGSTOP
STOP_ONE = to_rank(1, STOP)


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
        return f"{self.name}, {self.launch.__name__}"


def names(
    rank: int, fate: str, act: Act, parallel: ParallelConfig = DATA, launch: Launch = local
) -> Fault:
    """Returns a fault whose one error names the rank and its fate."""
    place = rf"(?m)^error: rank {rank} \(.*, {parallel.coordinates(rank)}\)"
    name = f"rank {rank} {fate}, {parallel.axes}"
    return Fault(
        name=name,
        act=act,
        said=(place + fate,),
        parallel=parallel,
        launch=launch,
    )


def killed(rank: int, launch: Launch = local) -> Fault:
    how = "was killed by SIGKILL" if launch is local else "ended without an error message"
    fate = rf" {how}, last seen in [a-z ]+ after step \d+; "
    return names(rank, fate, to_rank(rank, KILL), FOUR, launch)


def stopped(rank: int, parallel: ParallelConfig = FOUR, launch: Launch = local) -> Fault:
    return names(rank, r" is stopped \(state T\)", to_rank(rank, STOP), parallel, launch)


def stuck(function: str, launch: Launch = local) -> Fault:
    fate = rf" is stuck for \d+ s in .*planted.py:\d+ \({function}\)"
    return names(2, fate, plant(2, function), FOUR, launch)


def raises(function: str, rank: int | str = 1, launch: Launch = local) -> Fault:
    return names(1, ": .*ValueError: a planted fault", plant(rank, function), DATA, launch)


def asked(signum: signal.Signals, act: Act, launch: Launch = local) -> Fault:
    name = "Ctrl-C" if signum == signal.SIGINT else signum.name
    said = (rf"(?m)^error: stopped by {name} after step \d+, saved: ",)
    status = 130 if signum == signal.SIGINT else 75
    return Fault(
        name=name,
        act=act,
        said=said,
        status=status,
        launch=launch,
        saves=True,
    )


def kill_in_a_save(run: LiveRun) -> None:
    while not any(run.run_dir.glob("checkpoints/*.partial")):
        assert run.command.poll() is None
    to_rank(0, KILL)(run)


def wrong_number(
    function: str, said: str, parallel: ParallelConfig = TENSOR, status: int = 70
) -> Fault:
    return Fault(
        name=f"{function}, {parallel.world_size} ranks",
        act=plant(1, function),
        said=(f"(?m)^error: .*{said}",),
        parallel=parallel,
        status=status,
        train=(("compare_replicas_every", 5),),
    )


ENDS = [
    raises("raise_in_backward"),
    raises("raise_in_rank_1_while_others_loop", "all", torchrun),
    names(1, " ended with status 3", plant(1, "exit_with_3")),
    *(killed(rank) for rank in (0, 3)),
    *(killed(3, launch) for launch in (torchrun, srun)),
    killed(0, srun),
    Fault(name="SIGKILL of rank 0 in a save", act=kill_in_a_save),
    Fault(
        name="SIGKILL of the launcher",
        act=to_launcher(KILL),
        parallel=FOUR,
        status=-KILL,
    ),
    *(
        Fault(
            name="SIGKILL of the launcher, rank 1 stopped",
            act=one_after_the_other(STOP_ONE, to_launcher(KILL)),
            launch=launch,
            status=-KILL,
        )
        for launch in (local, torchrun)
    ),
    Fault(
        name="SIGKILL of the fork server",
        act=to_fork_server(KILL),
        said=("all ranks end like this if their fork server is killed",),
    ),
    names(1, " was killed by SIGABRT", plant(1, "abort")),
    names(1, " was killed by SIGSEGV", to_rank(1, signal.SIGSEGV)),
    *(stopped(1, ParallelConfig(**{axis: 2})) for axis in ("pp", "dp_replicate", "dp_shard", "tp")),
    stopped(0),
    *(stopped(rank, launch=torchrun) for rank in (0, 3)),
    *(stopped(rank, launch=srun) for rank in (0, 2)),
    *(stuck("loop_forever", launch) for launch in (local, torchrun)),
    stuck("read_forever"),
    *(asked(signum, to_launcher(signum)) for signum in (signal.SIGHUP, signal.SIGINT)),
    *(asked(signum, to_group(signum)) for signum in (signal.SIGTERM, signal.SIGINT)),
    asked(signal.SIGTERM, to_rank(1, signal.SIGTERM), torchrun),
    asked(signal.SIGTERM, to_launcher(signal.SIGTERM), torchrun),
    asked(signal.SIGTERM, to_launcher(signal.SIGALRM), timeout),
    asked(signal.SIGTERM, one_after_the_other(STOP_ONE, to_group(signal.SIGTERM))),
    Fault(
        name="Ctrl-C twice",
        act=one_after_the_other(plant(1, "save_slowly"), *2 * [to_group(signal.SIGINT)]),
        said=("Ctrl-C again ends at once", "(?m)^error: stopped by SIGINT$"),
        status=130,
    ),
    Fault(
        name="SIGTERM and a slow save",
        act=one_after_the_other(plant(1, "save_slowly"), to_group(signal.SIGTERM)),
        said=("not saved within checkpoint.grace_s = 1.0: .*/step_00000010 is the last complete ",),
        status=143,
        grace_s=1.0,
    ),
    wrong_number(
        "spoil_a_gradient",
        r"gradient norm nan; the first non-finite .* layers\.1\.mlp\.up\.weight on rank 1 ",
        status=71,
    ),
    wrong_number(
        "flip_a_bit",
        r"layers\.1\.mlp\.up\.weight on rank 1 \(.* differs from ranks 0, 2 and 3",
        ParallelConfig(dp_replicate=4, sharding="NO_SHARD"),
    ),
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


def check_end(fault: Fault, folder: Path) -> LiveRun:
    """Does the fault to a run, and checks what the run has said at its end, and how it has
    ended."""
    run = LiveRun(folder, recipe_of(fault, folder), fault.launch)
    step = disturb(run, fault.act)
    stderr = run.stderr()
    for pattern in fault.said:
        assert re.search(pattern, stderr), stderr
    assert run.exit_status() == fault.status, stderr
    most_errors = 1 if fault.status > 0 else 0
    assert len(re.findall("(?m)^error: ", stderr)) == most_errors, stderr
    if fault.saves:
        (newest, *_) = find_checkpoints("auto", run.run_dir / "checkpoints")
        assert newest.name == f"step_{run.step():08d}"
        assert run.step() <= step + 2
    return run


@pytest.mark.parametrize("fault", ENDS, ids=str)
def test_a_run_names_the_fault_that_ends_it_and_resumes(fault: Fault, tmp_path: Path) -> None:
    run = check_end(fault, tmp_path)
    recipe = recipe_of(fault, tmp_path)
    (tmp_path / "plant").unlink(missing_ok=True)  # a fault of all ranks is still there
    again = LiveRun(tmp_path, recipe, fault.launch)
    try:
        assert again.command.wait(LONGEST_S) == 0, again.stderr()
    finally:
        again.end()
    assert losses(run.run_dir) == undisturbed_losses(tmp_path / "straight", recipe)


SAVES = r"SIGUSR1: saving after step 1\d, then continuing"
SURVIVED = [
    Fault(
        name="SIGUSR1 to the launcher",
        act=to_launcher(signal.SIGUSR1),
        said=(SAVES,),
    ),
    Fault(
        name="SIGUSR1 to the group",
        act=to_group(signal.SIGUSR1),
        said=(SAVES,),
    ),
    Fault(
        name="SIGHUP under nohup",
        act=to_group(signal.SIGHUP),
        launch=nohup,
    ),
    Fault(
        name="NaN in a gradient, skipped",
        act=plant(1, "spoil_a_gradient"),
        said=(r"(?m)^warning: step \d+: .* rank 1 \(.*; step skipped \(1 in a row, at most 10\)",),
        parallel=TENSOR,
        train=(("on_nonfinite", "skip"),),
    ),
]


@pytest.mark.parametrize("fault", SURVIVED, ids=str)
def test_a_run_goes_on_after(fault: Fault, tmp_path: Path) -> None:
    run = LiveRun(tmp_path, recipe_of(fault, tmp_path), fault.launch)
    disturb(run, fault.act)
    assert (run.command.returncode, run.step()) == (0, 60), run.stderr()
    for pattern in fault.said:
        assert re.search(pattern, run.stderr()), run.stderr()
