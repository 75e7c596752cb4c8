"""The rows of runs that stand still: a rank that is stopped, that loops, or that waits for a file."""

from __future__ import annotations

import signal
from dataclasses import replace

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.tools.bench.faults.fault import PLANTED, Fault, Launch, local, plant, to_rank, torchrun

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


def _stopped(name: str, parallel: ParallelConfig, rank: int, launch: Launch = local) -> Fault:
    return Fault(
        name=name,
        act=to_rank(rank, signal.SIGSTOP),
        words=(_place(parallel, rank) + r"is stopped \(state T\) in [a-z ]+ after step \d+",),
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
    _stuck("an endless loop, pp 2 x tp 2", "loop_for_ever", "loop_for_ever"),
    _stuck("an endless loop, torchrun", "loop_for_ever", "loop_for_ever", torchrun),
    _stuck("a read that never returns, pp 2 x tp 2", "read_for_ever", "read_for_ever"),
)
