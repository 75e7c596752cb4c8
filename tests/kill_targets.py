"""Runs that are killed while they save, for test_checkpoint_kills.py. This process imports torch
once and forks each run, so that a try costs a fraction of a second; what is forked is an ordinary
worker, with the lock of its folder.

python -m tests.kill_targets runs|background FOLDER KILLS
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parallel3d.checkpoint.integrity import find_damage
from parallel3d.checkpoint.store import list_checkpoints
from parallel3d.config.recipe import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.launch.run_dir import locked
from parallel3d.models import model_class
from parallel3d.training.callbacks import Callback, RunView
from parallel3d.training.worker import run_worker

RECIPE = Recipe(
    model=ModelConfig(layers=2, hidden=32, heads=2, ffn_hidden=64, vocab=264),
    train=TrainConfig(steps=40, global_batch_size=2, seq_len=16, device="cpu"),
    optimizer=OptimizerConfig(warmup_steps=1),
    data=DataConfig(source="text", path=__file__, validation_fraction=0.1),
    checkpoint=CheckpointConfig(every=1, keep=2, resume="auto"),
    logging=LoggingConfig(every=1),
)


class Tells(Callback):
    """Writes the number of each step into a pipe, when its checkpoint has been acknowledged."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def saved(self, run: RunView, checkpoint: Path) -> None:
        os.write(self._pipe, f"{int(checkpoint.name[5:])}\n".encode())


def train(folder: Path, pipe: int) -> None:
    """Trains on from the newest checkpoint of the folder to the end."""
    _train(replace(RECIPE, run_dir=str(folder)), folder, pipe)


def train_with_saves_behind(folder: Path, pipe: int) -> None:
    """Trains on as `train` does, and goes on while a checkpoint is written."""
    saves = replace(RECIPE.checkpoint, in_background=True)
    _train(replace(RECIPE, run_dir=str(folder), checkpoint=saves), folder, pipe)


def _train(recipe: Recipe, folder: Path, pipe: int) -> None:
    with locked(folder):
        model = model_class(recipe.model.architecture)
        run_worker(recipe, _alone(folder), model, lambda name, precision: None, [Tells(pipe)])


def _alone(folder: Path) -> Rendezvous:
    store = f"file://{folder.parent}/store_{os.getpid()}"
    return Rendezvous(rank=0, local_rank=0, world_size=1, local_world_size=1, init_method=store)


def run_and_kill(
    target: Callable[[Path, int], None], folder: Path, live_s: float | None
) -> tuple[list[int], bool]:
    """Forks a run and kills it after `live_s` seconds from its first acknowledged save; None:
    never. Returns what it acknowledged, and whether it was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        status = 1
        try:
            target(folder, writer)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    told = os.read(reader, 1 << 16)  # the first save, or the end
    if live_s is not None and told:
        time.sleep(live_s)
        os.kill(pid, signal.SIGKILL)
    while more := os.read(reader, 1 << 16):
        told += more
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0, (
        f"the run failed with status {os.WEXITSTATUS(status)}"
    )
    return [int(line) for line in told.split()], killed


def torn(checkpoints: Path) -> list[str]:
    """Returns what is damaged in a folder that has the name of a checkpoint."""
    found = [path for path in checkpoints.glob("step_*") if path.suffix == ""]
    return [f"{path.name}: {damage}" for path in found for damage in find_damage(path)]


def left_overs(checkpoints: Path) -> bool:
    return any(path.suffix for path in checkpoints.iterdir())


def kill_runs(target: Callable[[Path, int], None], folder: Path, kills: int) -> dict[str, object]:
    """Kills runs until it has been done so often, each started again in its folder until it is at
    its end. Losses are compared with those of a run that nobody killed and whose saves are waited
    for."""
    draw, count, in_save, finished, wrong = random.Random(15), 0, 0, 0, list[str]()
    run_and_kill(train, folder / "straight", None)
    losses = _losses(folder / "straight")
    assert len(losses) == RECIPE.train.steps
    while count < kills:
        run, acknowledged, killed = folder / f"run_{finished}", 0, True
        while killed:
            told, killed = run_and_kill(
                target, run, draw.uniform(0, 0.2) if count < kills else None
            )
            if told and told[0] <= acknowledged:
                wrong.append(
                    f"step {told[0]} was trained again, and {acknowledged} was acknowledged"
                )
            acknowledged = max([acknowledged, *told])
            wrong += torn(run / "checkpoints")
            in_save += killed and left_overs(run / "checkpoints")
            count += killed
            newest = max(
                (int(path.name[5:]) for path in list_checkpoints(run / "checkpoints")), default=0
            )
            if newest < acknowledged:
                wrong.append(f"step {acknowledged} was acknowledged, and the newest is {newest}")
        finished += 1
        if _losses(run) != losses:
            wrong.append(f"{run.name} has other losses than a run that nobody killed")
        shutil.rmtree(run)
    return {"kills": count, "in a save": in_save, "finished": finished, "wrong": wrong}


def _losses(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


if __name__ == "__main__":
    kind, where, times = sys.argv[1:]
    target = {"runs": train, "background": train_with_saves_behind}[kind]
    print(json.dumps(kill_runs(target, Path(where), int(times))))
