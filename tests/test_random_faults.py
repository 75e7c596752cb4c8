"""A long run hit by faults drawn at random: started again by the same command each time, it has
the losses of an undisturbed run, bitwise, and each fault costs only the steps since the last
checkpoint."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from parallel3d.checkpoint.store import list_checkpoints
from parallel3d.config.recipe import CheckpointConfig, ParallelConfig
from tests.live_run import (
    Act,
    LiveRun,
    losses,
    one_after_the_other,
    patiently,
    plant,
    small_recipe,
    to_fork_server,
    to_group,
    to_launcher,
    to_rank,
    undisturbed_losses,
)

FAULTS = 12
EVERY = 4  # steps between checkpoints
STEPS = 5 * FAULTS  # faults come sooner than five steps, so that all of them find a run
PATIENCE_S = 30.0


@dataclass(frozen=True)
class RandomFault:
    """A fault, done by `act` and undone by `undo` after the end of the run. The run resumes from
    its last step if it `saves`, else from the newest of its checkpoints that is not damaged."""

    name: str
    act: Act
    statuses: tuple[int, ...]
    saves: bool = False
    damages: bool = False
    undo: Callable[[Path], object] = lambda run_dir: None


def faults(rank: int) -> list[RandomFault]:
    """Returns a fault of each kind."""
    kill = signal.SIGKILL
    interrupt = signal.SIGINT
    terminate = signal.SIGTERM
    twice = one_after_the_other(to_group(interrupt), to_group(interrupt))
    return [
        RandomFault("SIGKILL of a rank", to_rank(rank, kill), (70,)),
        RandomFault("SIGKILL of the launcher", to_launcher(kill), (-kill,)),
        RandomFault("SIGKILL of the fork server", to_fork_server(kill), (70,)),
        RandomFault("SIGTERM to the launcher", to_launcher(terminate), (75,), saves=True),
        RandomFault("SIGINT to the group", to_group(interrupt), (130,), saves=True),
        RandomFault("SIGINT twice", twice, (130, -interrupt)),
        RandomFault("SIGSTOP of a rank", to_rank(rank, signal.SIGSTOP), (70,)),
        RandomFault("an error in a rank", plant(rank, "raise_error"), (70,)),
        RandomFault("NaN in a gradient", plant(rank, "spoil_a_gradient"), (71,)),
        RandomFault("no checkpoints", block_saves, (73,), undo=unblock_saves),
        RandomFault("a damaged checkpoint", kill_and_damage, (-kill,), damages=True),
        RandomFault("garbage in the metrics", kill_and_scribble, (-kill,)),
    ]


def block_saves(run: LiveRun) -> None:
    """Puts a file in the place of the folder of checkpoints."""
    checkpoints = run.run_dir / "checkpoints"
    checkpoints.rename(run.run_dir / "away")
    checkpoints.write_text("")


def unblock_saves(run_dir: Path) -> None:
    (run_dir / "checkpoints").unlink()
    (run_dir / "away").rename(run_dir / "checkpoints")


def kill_and_damage(run: LiveRun) -> None:
    """Kills the run, and flips a bit in the largest file of its newest checkpoint."""
    to_group(signal.SIGKILL)(run)
    run.end()
    newest = list_checkpoints(run.run_dir / "checkpoints")[-1]
    files = [path for path in newest.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 16
    largest.write_bytes(content)


def kill_and_scribble(run: LiveRun) -> None:
    to_group(signal.SIGKILL)(run)
    run.end()
    with (run.run_dir / "metrics.jsonl").open("a") as file:
        file.write('garbage\n{"step": 1')


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("seed", range(16, 20))
def test_faults_of_all_kinds_cost_the_steps_since_the_last_save(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    parallel = ParallelConfig(tp=2) if seed % 2 else ParallelConfig(pp=2)
    recipe = small_recipe(tmp_path, parallel, steps=STEPS, timeout_s=8)
    recipe = replace(recipe, checkpoint=CheckpointConfig(every=EVERY, keep=3, resume="auto"))
    newest = 0  # the step from which the run resumes
    for _ in range(FAULTS):
        if newest > STEPS - EVERY:
            break
        fault = draw.choice(faults(draw.randrange(2)))
        run = LiveRun(tmp_path, recipe)
        try:
            # A damaged checkpoint needs one before it.
            least = EVERY + 1 if fault.damages else 1
            run.wait_for_step(min(newest + least + draw.randrange(9), STEPS - EVERY))
            time.sleep(draw.uniform(0, 0.08))
            fault.act(run)
            for _ in patiently(PATIENCE_S):
                if run.command.poll() is not None:
                    break
        finally:
            status = run.command.poll()
            run.end()
            fault.undo(run.run_dir)
        said = f"{fault.name}:\n{run.stderr()}"
        assert status in fault.statuses, said
        assert not newest or f"resumed at step {newest} " in run.stderr(), said
        saved = [int(path.name[5:]) for path in list_checkpoints(run.run_dir / "checkpoints")]
        usable = saved[:-1] if fault.damages else saved
        newest = usable[-1] if usable else 0
        most = 0 if fault.saves else EVERY
        if fault.damages:
            most += EVERY
        assert 0 <= run.step() - newest <= most, said
    last = LiveRun(tmp_path, recipe)
    try:
        assert last.command.wait(600) == 0, last.stderr()
    finally:
        last.end()
    assert losses(last.run_dir) == undisturbed_losses(tmp_path / "straight", recipe)
