"""What goes wrong in the workers of test_failures.py, and the program that launches them, one fault
after another.

python failure_targets.py local|torchrun FOLDER FAULT...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from parallel3d import recipes
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.launch.failure import Failure
from parallel3d.launch.local import launch_local
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.recipes import pretrain

_PRELOAD = ("torch", "torch._dynamo", "parallel3d.training.worker", "parallel3d.models.llama")
_STEP = 2  # the step in which something goes wrong


def work(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """Trains as one rank; the name of the run's folder says what goes wrong."""
    from parallel3d.models import model_class
    from parallel3d.training.trainer import Trainer
    from parallel3d.training.worker import run_worker

    assert recipe.run_dir is not None
    folder = Path(recipe.run_dir)
    (folder / f"rank{rendezvous.rank}.pid").write_text(str(os.getpid()))
    step = Trainer.train_step

    def faulty_step(trainer: Trainer, *args: Any, **keywords: Any) -> Any:
        if trainer.step + 1 == _STEP:
            break_step(trainer, folder, rendezvous.rank)
        return step(trainer, *args, **keywords)

    Trainer.train_step = faulty_step  # type: ignore[method-assign]
    # a busy machine, where torchrun's SIGTERM is there before a rank has found its words
    if rendezvous.rank == 0:
        words = Failure.of
        Failure.of = lambda *details: (time.sleep(0.5), words(*details))[1]  # type: ignore[method-assign]
    run_worker(
        recipe, rendezvous, model_class(recipe.model.architecture), lambda name, precision: None
    )


def break_step(trainer: Any, folder: Path, rank: int) -> None:
    """Prepares a rank's fault in the step that it is about to do. Rank 1 is at fault, but where it
    is stopped."""
    import torch
    import torch.distributed as dist

    fault, module = folder.name, trainer.stages[0].module

    def raise_here(*args: object) -> None:
        now()
        raise ValueError("a fault")

    def now() -> None:
        (folder / "failed_at").write_text(str(time.monotonic()))

    def in_forward(act: Callable[[], object]) -> None:
        module.register_forward_pre_hook(lambda *_: (now(), act())[0])

    if rank != 1:
        if "hang" in fault:  # not in a collective, which would notice
            in_forward(lambda: (time.sleep(100), (folder / "slept").touch()))
        if fault == "asked_to_stop" and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return
    if fault.startswith("forward"):
        module.register_forward_pre_hook(raise_here)
    elif fault == "backward":
        module.register_forward_hook(
            lambda _module, _inputs, output: (output.register_hook(raise_here), None)[1]
        )
    elif fault == "optimizer":
        trainer.optimizer.step = raise_here
    elif fault == "collective":
        now()
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)  # not of floats
    elif fault.startswith("killed"):
        in_forward(lambda: os.kill(os.getpid(), signal.SIGKILL))
    elif fault == "exits":
        in_forward(lambda: os._exit(3))
    elif fault == "stopped":
        in_forward(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def recipe_in(folder: Path) -> Recipe:
    """A run of two data ranks, or of four on two axes where a rank is stopped: on several axes
    there are groups beside that of all ranks, and a stopped rank is noticed by a time-out alone."""
    corpus = folder.parent / "corpus.txt"
    corpus.write_text("\n".join(f"line {number} of a text" for number in range(400)))
    is_stopped = folder.name == "stopped"
    return Recipe(
        model=ModelConfig(layers=2, hidden=16, heads=2, ffn_hidden=32, vocab=258),
        train=TrainConfig(
            steps=4,
            global_batch_size=4,
            seq_len=16,
            device="cpu",
            timeout_s=3 if is_stopped else 300,
        ),
        parallel=ParallelConfig(tp=2, pp=2) if is_stopped else ParallelConfig(dp_shard=2),
        data=DataConfig(source="text", path=str(corpus)),
        checkpoint=CheckpointConfig(every=None if is_stopped else 4),
        run_dir=str(folder),
    )


def run_locally(recipe: Recipe) -> int:
    return launch_local(
        "failure_targets:work", recipe, recipe.parallel.world_size, preload=_PRELOAD
    )


def run_by_torchrun(recipe: Recipe) -> int:
    """Runs a recipe under torchrun's own agent, which forks the workers here, where torch is
    imported already."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    assert recipe.run_dir is not None
    path = Path(recipe.run_dir) / "recipe.yaml"
    path.write_text(to_yaml(recipe))
    workers = recipe.parallel.world_size
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=path.parent.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    try:
        elastic_launch(config, join)([str(path)])
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        (path.parent / "torchrun.json").write_text(
            json.dumps({"rank": rank, "message": first.message})
        )
        return 1
    return 0


def join(arguments: list[str]) -> None:
    """Runs a worker of torchrun: the command `parallel3d-train`, with its faulty rank."""
    # a forked worker has its launcher's handler, which raises
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    recipes.work = work
    if status := pretrain.main(arguments):
        os._exit(status)


def main() -> int:
    launcher, folder, *faults = sys.argv[1:]
    if launcher == "join":
        join([folder])
        return 0
    if launcher == "torchrun":
        for name in _PRELOAD:  # what is imported here, the forked workers have
            import_module(name)
    for fault in faults:
        run_dir = Path(folder) / fault
        run_dir.mkdir()
        recipe = recipe_in(run_dir)
        print(f"=== {fault}", file=sys.stderr, flush=True)
        status = (run_locally if launcher == "local" else run_by_torchrun)(recipe)
        failed_at = run_dir / "failed_at"
        took_s = time.monotonic() - float(failed_at.read_text()) if failed_at.exists() else None
        (run_dir / "ended.json").write_text(json.dumps({"status": status, "took_s": took_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
