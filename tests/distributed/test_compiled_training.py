"""Compiled blocks train the model that eager ones train, to the rounding of sums in another order.

One layout stands for all: collectives of tp and dropout in the graph, recompute around it. Compiling takes the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from parallel3d.config.recipe import ParallelConfig
from parallel3d.errors import ConfigError
from parallel3d.launch.run_dir import check_compiler
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import SCHEDULES
from tests.distributed.training_cases import GROUPED, make_loader, make_recipe, make_trainer, train

PRELOAD = ("torch._inductor.compile_fx",)
PARALLEL = ParallelConfig(tp=2, sequence_parallel=True, recompute="full", microbatch_size=2)


def curve(compile: bool) -> tuple[list[tuple[float, float]], float, list[str]]:
    """Losses and norms of three steps, the loss of evaluating the first batch, and the parameters' names."""
    trainer = make_trainer(make_recipe(replace(GROUPED, layers=2, dropout=0.1), PARALLEL, compile=compile))
    steps = train(trainer, 3)
    evaluated = trainer.evaluate(make_loader(trainer.recipe, dist.get_rank()).batch(0))
    return steps, evaluated, [name for name, _ in trainer.stages[0].module.named_parameters()]


def test_compiled_blocks_train_as_eager_ones_do(world: Callable) -> None:
    eager, compiled = (world(2).run(curve, compile) for compile in (False, True))
    for (steps, evaluated, names), (own_steps, own_evaluated, own_names) in zip(eager, compiled, strict=True):
        assert own_names == names
        assert own_evaluated == pytest.approx(evaluated, rel=1e-5)
        for pair, own in zip(steps, own_steps, strict=True):
            assert own == pytest.approx(pair, rel=1e-5)
    assert [steps for steps, _, _ in compiled] != [steps for steps, _, _ in eager], "nothing was compiled"


def test_the_schedules_that_are_refused_with_compile_are_those_that_split_the_backward() -> None:
    for name, traits in SCHEDULES.items():
        schedule = build_schedule(name, pp=2, microbatches=4, virtual_stages=traits.stages.usual)
        assert schedule.splits == traits.splits_backward
        assert traits.whole_backward is None or not SCHEDULES[traits.whole_backward].splits_backward


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=re.escape("there is no no-such-compiler on PATH; install it")):
        check_compiler()
