"""What the workers of test_launch.py and test_failures.py do, and the program that launches them.

python launch_targets.py TARGET WORLD_SIZE FOLDER [--verbose]
python launch_targets.py faults local|torchrun FOLDER FAULT...    trains; one fault after another
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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
from parallel3d.errors import ConfigError, NonFiniteError, PreemptedError
from parallel3d.launch import local
from parallel3d.launch.failure import Failure
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.launch.signals import catch_stop_signals

_PRELOAD = ("torch", "torch._dynamo", "parallel3d.training.worker", "parallel3d.models.llama")
_STEP = 2  # the step in which something goes wrong


def tells_its_environment(recipe: Recipe, rendezvous: Rendezvous) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    told = {name: os.environ[name] for name in names} | {"init_method": rendezvous.init_method}
    (_folder(recipe) / f"rank{rendezvous.rank}.json").write_text(json.dumps(told))


def raises_on_rank_2(recipe: Recipe, rendezvous: Rendezvous) -> None:
    _sign_in(recipe, rendezvous)
    if rendezvous.rank == 2:
        raise ValueError("a bug of ours\nwith more to say")
    time.sleep(60)


def diverges_on_rank_1(recipe: Recipe, rendezvous: Rendezvous) -> None:
    if rendezvous.rank == 1:
        raise NonFiniteError("step 3: loss nan")
    time.sleep(60)


def loses_a_peer_before_the_cause_is_told(recipe: Recipe, rendezvous: Rendezvous) -> None:
    if rendezvous.rank == 1:
        time.sleep(0.4)
        raise ValueError("the cause")
    raise RuntimeError(
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
    )


def is_killed_on_rank_3(recipe: Recipe, rendezvous: Rendezvous) -> None:
    if rendezvous.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def all_refuse_alike(recipe: Recipe, rendezvous: Rendezvous) -> None:
    raise ConfigError("train.device = cuda: this host has none")


def rank_0_leaves_early(recipe: Recipe, rendezvous: Rendezvous) -> None:
    if rendezvous.rank > 0:
        time.sleep(60)


def prints_on_both(recipe: Recipe, rendezvous: Rendezvous) -> None:
    sys.stderr.write("progress\n")
    print("a result")


def exits_with_0(recipe: Recipe, rendezvous: Rendezvous) -> None:
    sys.exit(0)


def ends_at_once_with_0(recipe: Recipe, rendezvous: Rendezvous) -> None:
    os._exit(0)


def sleeps(recipe: Recipe, rendezvous: Rendezvous) -> None:
    _sign_in(recipe, rendezvous)
    time.sleep(60)


def sleeps_and_ignores_sigterm(recipe: Recipe, rendezvous: Rendezvous) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeps(recipe, rendezvous)


def saves_at_sigterm(recipe: Recipe, rendezvous: Rendezvous) -> None:
    with catch_stop_signals() as stop:
        _sign_in(recipe, rendezvous)
        while not stop.is_made:
            time.sleep(0.01)
    raise PreemptedError("stopped after step 7, saved")


def reduces_until_rank_1_is_killed(recipe: Recipe, rendezvous: Rendezvous) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=rendezvous.init_method,
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
    )
    for step in range(1000):
        if rendezvous.rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))


def recipe_in(folder: Path, world_size: int) -> Recipe:
    return Recipe(
        model=ModelConfig(layers=2, hidden=8, heads=2, ffn_hidden=8, vocab=264),
        train=TrainConfig(steps=1, global_batch_size=world_size, seq_len=8),
        parallel=ParallelConfig(dp_shard=world_size),
        run_dir=str(folder),
    )


def _folder(recipe: Recipe) -> Path:
    assert recipe.run_dir is not None
    return Path(recipe.run_dir)


def _sign_in(recipe: Recipe, rendezvous: Rendezvous) -> None:
    partial = _folder(recipe) / f"rank{rendezvous.rank}.partial"
    partial.write_text(str(os.getpid()))
    partial.rename(partial.with_suffix(".pid"))


def work(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """Trains as one rank; the name of the run's folder says what goes wrong."""
    from parallel3d.models import model_class
    from parallel3d.training.trainer import Trainer
    from parallel3d.training.worker import run_worker

    folder = _folder(recipe)
    _sign_in(recipe, rendezvous)
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
    """Prepares a rank's fault in the step that it is about to do. Rank 1 is at fault."""
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
    elif fault == "collective":
        now()
        dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND)  # not of floats
    elif fault.startswith("killed"):
        in_forward(lambda: os.kill(os.getpid(), signal.SIGKILL))
    elif fault == "exits":
        in_forward(lambda: os._exit(3))


def training_recipe(folder: Path) -> Recipe:
    """Returns the recipe of a run of two data ranks."""
    corpus = folder.parent / "corpus.txt"
    corpus.write_text("\n".join(f"line {number} of a text" for number in range(400)))
    recipe = recipe_in(folder, 2)
    return replace(
        recipe,
        train=replace(recipe.train, steps=4, global_batch_size=4, seq_len=16, device="cpu"),
        data=DataConfig(source="text", path=str(corpus)),
        checkpoint=CheckpointConfig(every=4),
    )


def run_by_torchrun(recipe: Recipe) -> int:
    """Runs a recipe under torchrun's own agent, which forks the workers here, where torch is
    imported already."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in _PRELOAD:
        import_module(name)
    folder = _folder(recipe)
    path = folder / "recipe.yaml"
    path.write_text(to_yaml(recipe))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=recipe.parallel.world_size,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    try:
        elastic_launch(config, join)(str(path))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        told = json.dumps({"rank": rank, "message": first.message})
        (folder / "torchrun.json").write_text(told)
        return 1
    return 0


def join(recipe: str) -> None:
    """Runs a worker of torchrun: the command `parallel3d-train`, with its faulty rank."""
    # a forked worker has its launcher's handler, which raises
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    recipes.work = work
    from parallel3d.recipes import pretrain

    if status := pretrain.main([recipe]):
        os._exit(status)


def train_with_faults(launcher: str, folder: Path, faults: list[str]) -> None:
    for fault in faults:
        run_dir = folder / fault
        run_dir.mkdir()
        recipe = training_recipe(run_dir)
        print(f"=== {fault}", file=sys.stderr, flush=True)
        if launcher == "local":
            status = local.launch_local("launch_targets:work", recipe, 2, preload=_PRELOAD)
        else:
            status = run_by_torchrun(recipe)
        failed_at = run_dir / "failed_at"
        took_s = time.monotonic() - float(failed_at.read_text()) if failed_at.exists() else None
        (run_dir / "ended.json").write_text(json.dumps({"status": status, "took_s": took_s}))


def main() -> int:
    target, world_size, folder, *options = sys.argv[1:]
    if target == "faults":
        train_with_faults(world_size, Path(folder), options)
        return 0
    preload = ("torch",) if target.startswith("reduces") else ()
    local.REPORTS_S, local.STRAGGLERS_S = 1.0, 0.7
    status = local.launch_local(
        f"launch_targets:{target}",
        recipe_in(Path(folder), int(world_size)),
        int(world_size),
        preload=preload,
        verbose="--verbose" in options,
    )
    assert "torch" not in sys.modules, "the launcher imported torch"
    return status


if __name__ == "__main__":
    sys.exit(main())
