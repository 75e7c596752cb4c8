"""Compiled training is eager training, to the rounding of sums in another order: whole blocks on
one tp rank, and with tp or a split backward the pieces between the products, so that products still
hide collectives and are still put off.

Compilation is slow, so three layouts stand for all, and the one with cp is a long test.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest

from parallel3d.config.recipe import ParallelConfig
from parallel3d.errors import ConfigError
from parallel3d.launch.run_dir import check_compiler
from parallel3d.pipeline.execution import ScheduleExecutor
from parallel3d.schedules.schedule import Action
from tests.distributed.training_cases import GROUPED, make_recipe, make_trainer, own_batch, train

PRELOAD = ("torch._inductor.compile_fx",)
LAYOUTS = [
    ParallelConfig(dp_shard=2, recompute="full", microbatch_size=2),
    ParallelConfig(
        tp=2,
        cp=2,
        sequence_parallel=True,
        recompute="full",
        microbatch_size=2,
    ),
    ParallelConfig(
        tp=2,
        pp=2,
        schedule="zb_h1",
        recompute="selective",
        microbatch_size=2,
    ),
]


def curve(
    parallel: ParallelConfig, compile: bool
) -> tuple[list[tuple[float, float]], float, list[str], Counter[int]]:
    """Losses and norms of three steps, the loss of evaluating the first batch, the parameters'
    names, and how many second halves of backwards had how many products to make."""
    trainer = make_trainer(
        make_recipe(replace(GROUPED, layers=parallel.pp, dropout=0.1), parallel, compile=compile)
    )
    products: Counter[int] = Counter()
    do_weights = ScheduleExecutor._backward_weights

    def count(execution: ScheduleExecutor, action: Action) -> None:
        products[len(execution._weights[action.stage, action.microbatch])] += 1
        do_weights(execution, action)

    with mock.patch.object(ScheduleExecutor, "_backward_weights", count):
        steps = train(trainer, 3)
    evaluated = trainer.evaluate([own_batch(trainer.recipe, 0)])
    return (
        steps,
        evaluated,
        [name for name, _ in trainer.stages[0].module.named_parameters()],
        products,
    )


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(LAYOUTS[0], id="blocks"),
        pytest.param(LAYOUTS[1], id="pieces-tp-cp", marks=pytest.mark.long),
        pytest.param(LAYOUTS[2], id="pieces-zb_h1"),
    ],
)
def test_what_is_compiled_trains_as_what_is_not(world: Callable, parallel: ParallelConfig) -> None:
    eager, compiled = (
        world(parallel.world_size).run(curve, parallel, compile) for compile in (False, True)
    )
    for (steps, evaluated, names, products), (*own, own_names, own_products) in zip(
        eager, compiled, strict=True
    ):
        assert own_names == names
        assert own_products == products
        assert (max(products, default=0) > 0) == (parallel.pp == 2)
        assert own[1] == pytest.approx(evaluated, rel=1e-5)
        for pair, own_pair in zip(steps, own[0], strict=True):
            assert own_pair == pytest.approx(pair, rel=1e-5)
    assert [steps for steps, *_ in compiled] != [steps for steps, *_ in eager], (
        "nothing was compiled"
    )


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError,
        match=re.escape("requires a C++ compiler, but no-such-compiler is not on PATH; install it"),
    ):
        check_compiler()
