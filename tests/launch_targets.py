"""What the workers of test_launch.py do, and the program that launches them: a process of its own
for each test.

python launch_targets.py TARGET WORLD_SIZE FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.errors import ConfigError, NonFiniteError
from parallel3d.launch import local
from parallel3d.launch.rendezvous import Rendezvous
from parallel3d.watch import heartbeat


def tells_its_environment(recipe: Recipe, rendezvous: Rendezvous) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    told = {name: os.environ[name] for name in names} | {"init_method": rendezvous.init_method}
    (_folder(recipe) / f"rank{rendezvous.rank}.json").write_text(json.dumps(told))


def beats_without_a_pause(recipe: Recipe, rendezvous: Rendezvous) -> None:
    heartbeat.BEAT_S = 0.0
    (_folder(recipe) / "store").write_text(rendezvous.init_method)
    sleeps(recipe, rendezvous)


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
        model=ModelConfig(
            layers=2,
            hidden=8,
            heads=2,
            ffn_hidden=8,
            vocab=264,
        ),
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


def main() -> int:
    target, world_size, folder = sys.argv[1:]
    preload = ("torch",) if target.startswith("reduces") else ()
    local.REPORTS_S = 1.0
    local.STRAGGLERS_S = 0.7
    status = local.launch_local(
        f"launch_targets:{target}",
        recipe_in(Path(folder), int(world_size)),
        int(world_size),
        preload=preload,
    )
    assert "torch" not in sys.modules, "the launcher imported torch"
    return status


if __name__ == "__main__":
    sys.exit(main())
