"""The rows of numbers that go wrong: a gradient that is not finite, and a flipped bit in a replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.tools.bench.faults.fault import PLANTED, Fault, plant

_WHERE = r"rank 1 \(.*, pp 0, dp_replicate {}, dp_shard 0, tp {}\)"


def _planted(**train: object) -> Callable[[Recipe], Recipe]:
    """Changes a run so that a fault can be planted in its model, and other keys of `train`."""
    return lambda recipe: replace(recipe, model=PLANTED, train=replace(recipe.train, **train))  # type: ignore[arg-type]


NUMBERS_GONE_WRONG: tuple[Fault, ...] = (
    Fault(
        name="NaN in a gradient of rank 1",
        act=plant(1, "spoil_a_gradient"),
        words=(
            r"(?m)^error: .*step \d+: loss [\d.]+, gradient norm nan; the first gradient of the backward that is not "
            rf"finite is that of layers\.1\.mlp\.up\.weight on {_WHERE.format(0, 1)}; weights are those of step \d+",
        ),
        within_s=2.0,
        status=71,
        parallel=ParallelConfig(tp=2),
        change=_planted(),
    ),
    Fault(
        name="NaN in a gradient of rank 1, left out",
        act=plant(1, "spoil_a_gradient"),
        words=(rf"(?m)^warning: step \d+: .* {_WHERE.format(0, 1)}; the step is left out, 1 in a row of 10 at most$",),
        within_s=2.0,
        goes_on=True,
        parallel=ParallelConfig(tp=2),
        change=_planted(on_nonfinite="skip"),
    ),
    Fault(
        name="a flipped bit in a weight of rank 1 of 2",
        act=plant(1, "flip_a_bit"),
        words=(r"(?m)^error: .*step \d+: layers\.1\.mlp\.up\.weight is not the same on ranks 0 and 1 \(rank 0: ",),
        within_s=3.0,
        parallel=ParallelConfig(dp_replicate=2, sharding="NO_SHARD"),
        change=_planted(compare_replicas_every=5),
    ),
    Fault(
        name="a flipped bit in a weight of rank 1 of 4",
        act=plant(1, "flip_a_bit"),
        words=(
            r"(?m)^error: .*step \d+: layers\.1\.mlp\.up\.weight on rank 1 \(rank 1: .*, pp 0, dp_replicate 1, "
            r"dp_shard 0, tp 0\) is not what it is on ranks 0, 2 and 3; go on from a checkpoint",
        ),
        within_s=3.0,
        parallel=ParallelConfig(dp_replicate=4, sharding="NO_SHARD"),
        change=_planted(compare_replicas_every=5),
    ),
)
