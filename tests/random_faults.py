"""One run hit by fault after fault, for test_random_faults.py: each is drawn by chance, done to the real command at a
random step, and the same command is started again.

python -m tests.random_faults FOLDER FAULTS SEED PP TP DP
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from parallel3d.checkpoint.store import list_checkpoints
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.tools.bench.faults.fault import (
    PLANTED,
    LiveRun,
    local,
    plant,
    to_fork_server,
    to_group,
    to_launcher,
    to_rank,
)

EVERY = 4  # steps between checkpoints
_STEPS_PER_FAULT = 5  # of the whole run: faults come sooner than that, so that they all find it running
_PATIENCE_S = 30.0  # after which a person would kill a run that does not end
_STEPS_AHEAD = 9  # the most steps from the start of a run to its fault

Act = Callable[[LiveRun], object]


@dataclass(frozen=True)
class RandomFault:
    """A kind of fault. `act` is done to the run, and `undo` once it has ended. The run may end with one of `statuses`.
    It goes on from the step it was at where it `saves`, and else from its newest checkpoint, or where that `is_damaged`
    from the one before."""

    name: str
    act: Act
    statuses: tuple[int, ...]
    saves: bool = False
    is_damaged: bool = False
    undo: Callable[[Path], object] = lambda run_dir: None


def faults(ranks: int, draw: random.Random) -> list[RandomFault]:
    """Returns a fault of each kind, done to a rank drawn by chance."""
    rank = draw.randrange(ranks)
    kill, died, asked = signal.SIGKILL, (70,), (75,)
    return [
        RandomFault("SIGKILL of a rank", to_rank(rank, kill), died),
        RandomFault("SIGKILL of all ranks", _to_all(ranks, kill), died),
        RandomFault("SIGKILL of the launcher", to_launcher(kill), (-kill,)),
        RandomFault("SIGKILL of the group", to_group(kill), (-kill,)),
        RandomFault("SIGKILL of the fork server", to_fork_server(kill), died),
        RandomFault("SIGABRT of a rank", to_rank(rank, signal.SIGABRT), died),
        RandomFault("SIGSEGV of a rank", to_rank(rank, signal.SIGSEGV), died),
        RandomFault("SIGTERM to the launcher", to_launcher(signal.SIGTERM), asked, saves=True),
        RandomFault("SIGTERM to a rank", to_rank(rank, signal.SIGTERM), asked, saves=True),
        RandomFault("SIGTERM to the group", to_group(signal.SIGTERM), asked, saves=True),
        RandomFault("SIGINT to the group", to_group(signal.SIGINT), (130,), saves=True),
        RandomFault("SIGINT to the launcher", to_launcher(signal.SIGINT), (130,), saves=True),
        RandomFault("two SIGINT to the launcher", _twice(to_launcher(signal.SIGINT)), (130,)),
        RandomFault("SIGHUP to the launcher", to_launcher(signal.SIGHUP), (75, -signal.SIGHUP)),
        RandomFault("SIGSTOP of a rank", to_rank(rank, signal.SIGSTOP), died),
        RandomFault("an error in a rank", plant(rank, "raise_error"), died),
        RandomFault("NaN in a gradient of a rank", plant(rank, "spoil_a_gradient"), (71,)),
        RandomFault("no file can grow", _fill_the_disk(ranks), (73,)),
        RandomFault("no checkpoint can be made", _block_saves, (73,), undo=_unblock_saves),
        RandomFault("the newest checkpoint is damaged", _kill_and_damage, (-kill,), is_damaged=True),
        RandomFault("a line of the metrics is garbage", _kill_and_scribble, (-kill,)),
    ]


def _to_all(ranks: int, signum: int) -> Act:
    return lambda run: [os.kill(pid, signum) for pid in [run.rank_pid(rank) for rank in range(ranks)]]


def _twice(act: Act) -> Act:
    def act_twice(run: LiveRun) -> None:
        act(run)
        time.sleep(0.02)
        if run.command.poll() is None:
            act(run)

    return act_twice


def _fill_the_disk(ranks: int) -> Act:
    """Makes each write to a file fail beyond some hundred bytes, as on a full disk."""

    def act(run: LiveRun) -> None:
        for pid in [run.rank_pid(rank) for rank in range(ranks)]:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (300, 300))

    return act


def _block_saves(run: LiveRun) -> None:
    """Puts a file where the checkpoints are, so that the next save fails as in a folder that cannot be written."""
    checkpoints = run.folder / "run" / "checkpoints"
    checkpoints.rename(checkpoints.with_name("away"))
    checkpoints.write_text("")


def _unblock_saves(run_dir: Path) -> None:
    (run_dir / "checkpoints").unlink()
    (run_dir / "away").rename(run_dir / "checkpoints")


def _kill(run: LiveRun) -> None:
    to_group(signal.SIGKILL)(run)
    run.command.wait()
    for pid in run.processes():
        os.kill(pid, signal.SIGKILL)


def _kill_and_damage(run: LiveRun) -> None:
    """Kills the run, and flips a bit in the largest file of its newest checkpoint."""
    _kill(run)
    for newest in list_checkpoints(run.folder / "run" / "checkpoints")[-1:]:
        file = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 16
        file.write_bytes(content)


def _kill_and_scribble(run: LiveRun) -> None:
    _kill(run)
    with (run.folder / "run" / "metrics.jsonl").open("a") as file:
        file.write('garbage\n{"step": 1')


def recipe(folder: Path, steps: int, parallel: ParallelConfig) -> Recipe:
    """Returns the run that all this happens to."""
    return Recipe(
        model=PLANTED,
        train=TrainConfig(
            steps=steps,
            global_batch_size=8,
            seq_len=16,
            device="cpu",
            timeout_s=8,
            callbacks=("parallel3d.tools.bench.faults.pace:Pace",),
        ),
        parallel=parallel,
        data=DataConfig(source="text", path=str(folder / "corpus.txt")),
        checkpoint=CheckpointConfig(every=EVERY, keep=3, resume="auto"),
        logging=LoggingConfig(every=1),
        run_dir=str(folder / "run"),
    )


class Trials:
    """A run in `folder`, and all that has been done to it."""

    def __init__(self, folder: Path, steps: int, parallel: ParallelConfig) -> None:
        folder.mkdir(parents=True)
        self._folder, self._run_dir, self._ranks, self._steps = folder, folder / "run", parallel.world_size, steps
        (folder / "corpus.txt").write_text("\n".join(f"line {number} of a text" for number in range(400)))
        (folder / "recipe.yaml").write_text(to_yaml(recipe(folder, steps, parallel)))
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lost = 0  # steps that were trained again
        self._newest = 0  # the step from which the run goes on

    def to_the_end(self) -> None:
        """Runs, or goes on, to the last step."""
        run = self._start()
        try:
            if status := run.command.wait(600):
                self.wrong.append(f"the last run ended with status {status}:\n{run.said()}")
        finally:
            run.end()

    def hit(self, draw: random.Random) -> None:
        """Starts the run again, does a fault to it some steps later, and waits for its end."""
        fault, goes_on_from = draw.choice(faults(self._ranks, draw)), self._newest
        run = self._start()
        try:
            target = min(goes_on_from + 1 + draw.randrange(_STEPS_AHEAD), self._steps - EVERY)
            _wait(lambda: _step(run) >= target or run.command.poll() is not None, 4 * _PATIENCE_S)
            time.sleep(draw.uniform(0, 0.08))
            fault.act(run)
            _wait(lambda: run.command.poll() is not None, _PATIENCE_S)
            status = run.command.poll()
        finally:
            run.end()
            fault.undo(self._run_dir)
        self.done[fault.name] += 1
        self.wrong += [
            f"fault {self.done.total()}, {fault.name}: {each}\n{run.said()}"
            for each in self._wrong(fault, run.said(), status, _step(run), goes_on_from)
        ]

    def _wrong(self, fault: RandomFault, said: str, status: int | None, last: int, goes_on_from: int) -> Iterator[str]:
        if status not in fault.statuses:
            yield f"ended with status {status}, not {fault.statuses}"
        if goes_on_from and f"goes on from step {goes_on_from} " not in said:
            yield f"did not go on from step {goes_on_from}"
        saved = [int(path.name[5:]) for path in list_checkpoints(self._run_dir / "checkpoints")]
        usable = saved[:-1] if fault.is_damaged else saved
        self._newest = usable[-1] if usable else 0
        lost, most = last - self._newest, (0 if fault.saves else EVERY) + EVERY * fault.is_damaged
        self.lost += lost
        if not 0 <= lost <= most:
            yield f"it was at step {last}, and goes on from step {self._newest}"

    def _start(self) -> LiveRun:
        command = [*local(self._ranks), str(self._folder / "recipe.yaml")]
        return LiveRun(command, self._folder, self._run_dir / "metrics.jsonl")

    def losses(self) -> list[tuple[int, float]]:
        """Returns the losses of metrics.jsonl, which has the last pass over each step."""
        lines = [json.loads(line) for line in (self._run_dir / "metrics.jsonl").read_text().splitlines()]
        return [(line["step"], line["loss"]) for line in lines]


def _step(run: LiveRun) -> int:
    """Returns the last step that a run has told of, 0 before its first: metrics.jsonl has those of earlier runs."""
    told = re.findall(r"^step (\d+)/", run.said(), re.MULTILINE)
    return int(told[-1]) if told else 0


def _wait(until: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    where, count, seed, pp, tp, dp = Path(sys.argv[1]), *map(int, sys.argv[2:])
    layout, chance = ParallelConfig(pp=pp, tp=tp, dp_shard=dp), random.Random(seed)
    straight, trials = (Trials(where / name, count * _STEPS_PER_FAULT, layout) for name in ("straight", "hit"))
    straight.to_the_end()
    for _ in range(count):
        trials.hit(chance)
    trials.to_the_end()
    if trials.losses() != straight.losses():
        trials.wrong.append("the losses are not those of a run without a fault")
    wrong = straight.wrong + trials.wrong
    print(
        json.dumps({"faults": trials.done, "steps lost": trials.lost, "losses": len(trials.losses()), "wrong": wrong})
    )
