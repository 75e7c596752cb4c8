"""Every optimizer trains bf16 parameters, whatever the dtype of its states and however it rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from parallel3d.config.recipe import OptimizerConfig, OptimizerName, ParallelConfig
from tests.distributed.training_cases import GROUPED, make_recipe, make_trainer, train

STEPS = 8
RATES: dict[OptimizerName, float] = {"adamw": 1e-2, "sgd": 0.1, "muon": 1e-2, "adafactor": 1e-2}


def last_losses(name: OptimizerName) -> dict[tuple[bool, str | None], float]:
    """Returns the last loss for each pair of stochastic rounding and dtype of the states."""
    pure = make_recipe(GROUPED, ParallelConfig(microbatch_size=8), precision="bf16_pure")
    losses = {}
    for rounding in (False, True):
        for dtype in (None, "fp32") if name != "adafactor" else (None,):
            config = OptimizerConfig(
                name=name, lr=RATES[name], min_lr_ratio=1.0, stochastic_rounding=rounding, state_dtype=dtype
            )
            trainer = make_trainer(replace(pure, optimizer=config))
            losses[rounding, dtype] = train(trainer, STEPS)[-1][0]
            assert {p.local.dtype for p in trainer.parameters} == {torch.bfloat16}
            states = [s for state in trainer.optimizer.state.values() for key, s in state.items() if key != "step"]
            assert {s.dtype for s in states} == {torch.float32 if dtype or name == "adafactor" else torch.bfloat16}
    return losses


@pytest.mark.parametrize("name", RATES)
def test_bf16_parameters_train_alike_however_their_states_are_kept(world: Callable, name: OptimizerName) -> None:
    losses = world(1).run(last_losses, name)[0]
    assert all(loss == pytest.approx(losses[False, None], rel=5e-3) for loss in losses.values())
    assert losses[False, None] < 4.8
