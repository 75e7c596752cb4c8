"""The rows of runs that stand still: a rank that is stopped, that loops, or that waits for a file; and the row of files
that would make one wait."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.data.token_files import FolderWriter, ShardTokenizer
from parallel3d.tools.bench.faults.fault import (
    PLANTED,
    Fault,
    Launch,
    LiveRun,
    as_srun,
    local,
    plant,
    to_rank,
    torchrun,
)

_PLACE = r"(?m)^error: rank {} \(.*, {}\) "
_AXES = {
    "pp": ParallelConfig(pp=2),
    "dp_replicate": ParallelConfig(dp_replicate=2),
    "dp_shard": ParallelConfig(dp_shard=2),
    "tp": ParallelConfig(tp=2),
}
_FOUR = ParallelConfig(pp=2, tp=2)


def _with_a_plant(recipe: Recipe) -> Recipe:
    return replace(recipe, model=PLANTED)


def _place(parallel: ParallelConfig, rank: int) -> str:
    return _PLACE.format(rank, parallel.coordinates(rank))


def _write_shards(folder: Path) -> None:
    """Writes a folder of more shards than a run keeps open."""
    draw = np.random.default_rng(0)
    tokenizer = ShardTokenizer(kind="bytes")
    with FolderWriter(
        folder / "tokens", vocab_size=257, end_of_text=256, tokenizer=tokenizer, shard_tokens=100
    ) as writer:
        for _ in range(200):
            writer.add("train", draw.integers(0, 256, 99))
        writer.add("validation", draw.integers(0, 256, 99))


def _with_shards(recipe: Recipe) -> Recipe:
    tokens = Path(recipe.data.path or "").with_name("tokens")
    return replace(recipe, data=replace(recipe.data, source="tokens", path=str(tokens)))


def _put_pipes_in_the_place_of_shards(run: LiveRun) -> None:
    pipe = run.folder / "pipe"
    for shard in (run.folder / "tokens").glob("train-?????.bin"):
        shard.with_suffix(".away").hardlink_to(shard)
        os.mkfifo(pipe)
        pipe.rename(shard)


def _put_shards_back(folder: Path) -> None:
    for shard in (folder / "tokens").glob("*.away"):
        shard.rename(shard.with_suffix(".bin"))


def _stopped(
    name: str, parallel: ParallelConfig, rank: int, launch: Launch = local, words: tuple[str, ...] = ()
) -> Fault:
    return Fault(
        name=name,
        act=to_rank(rank, signal.SIGSTOP),
        words=(_place(parallel, rank) + r"is stopped \(state T\)(, last seen)? in [a-z ]+ after step \d+", *words),
        within_s=5.0,
        parallel=parallel,
        launch=launch,
        has_peer=parallel == _AXES["dp_shard"],
    )


def _stuck(name: str, function: str, where: str, launch: Launch = local) -> Fault:
    return Fault(
        name=name,
        act=plant(2, function),
        words=(_place(_FOUR, 2) + rf"is stuck for \d+ s in [a-z ]+ after step \d+, .*planted.py:\d+ \({where}\)",),
        within_s=10.0,
        parallel=_FOUR,
        launch=launch,
        change=_with_a_plant,
    )


STANDSTILL: tuple[Fault, ...] = (
    *(_stopped(f"SIGSTOP of rank 1, {axis} 2", parallel, 1) for axis, parallel in _AXES.items()),
    *(_stopped(f"SIGSTOP of rank {rank}, pp 2 x tp 2", _FOUR, rank) for rank in range(4)),
    *(_stopped(f"SIGSTOP of rank {rank}, torchrun", _FOUR, rank, torchrun) for rank in (0, 3)),
    *(
        _stopped(
            f"SIGSTOP of rank {rank}, srun's variables",
            _FOUR,
            rank,
            as_srun,
            tuple(rf"(?m)^task {other}: exited with exit code 70$" for other in range(4) if other != rank),
        )
        for rank in (0, 2)
    ),
    _stuck("an endless loop, pp 2 x tp 2", "loop_for_ever", "loop_for_ever"),
    _stuck("an endless loop, torchrun", "loop_for_ever", "loop_for_ever", torchrun),
    _stuck("a read that never returns, pp 2 x tp 2", "read_for_ever", "read_for_ever"),
    Fault(
        name="pipes in the place of shards, in mid-run",
        act=_put_pipes_in_the_place_of_shards,
        words=(
            r"(?m)^error: (rank \d \(.*\): )?.*/tokens/train-\d+\.bin: cannot be read \(it is not a regular file\)",
        ),
        within_s=10.0,
        status=65,
        change=_with_shards,
        prepare=_write_shards,
        mend=_put_shards_back,
    ),
)
