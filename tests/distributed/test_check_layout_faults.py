"""check-layout finds faults of the trainer that trained another model in silence, each put in again
by a patch.

The models are in `custom_models.py`. Without the patch each of them is the same model, or the
layout is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn
from torch.distributed import get_rank

from parallel3d import build_engine, engine
from parallel3d.config.recipe import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.errors import Parallel3dError
from parallel3d.layers import loss as layers_loss
from parallel3d.layers.parameter import ParameterSpec, normal
from parallel3d.models import check_model, custom
from parallel3d.pipeline.execution import StageError
from parallel3d.tools.check_layout.compare import compare
from parallel3d.tools.check_layout.data import TrainingRecord
from parallel3d.tools.check_layout.plain import record_plain
from parallel3d.tools.check_layout.record import record_recipe
from parallel3d.tools.check_layout.shrink import shrink
from parallel3d.training import loss as training_loss

CUT = build_engine.cut
INITIAL = build_engine.initial_part
TOKEN_LOSSES = layers_loss.token_losses
COMPLETE = engine.Engine.finish_gradients


def overwrite_all(*args: Any, overwrite_logits: bool) -> Tensor:
    return TOKEN_LOSSES(*args, overwrite_logits=True)


def into_a_copy(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    logits, labels, lse = ctx.saved_tensors
    for part in ctx.terms.chunks(logits.flatten(0, -2), labels.flatten(), lse, grad.flatten()):
        ctx.terms.backward(*part, overwrite=True)
    return logits, None, None, None


def sum_crosswise(self: engine.Engine, observe: Any = None) -> None:
    tied = self._tied
    self._tied = tied[::-1] if get_rank() == 0 else tied
    COMPLETE(self, observe)
    self._tied = tied


def forget_frozen(module: nn.Module, *args: Any) -> nn.Module:
    return CUT(module, *args).requires_grad_(True)


def draw_each_end(spec: ParameterSpec, name: str, *args: Any) -> Tensor:
    is_second = get_rank() == 1 and name == "embed.weight"
    return INITIAL(replace(spec, init=normal(0.5)) if is_second else spec, name, *args)


@dataclass(frozen=True)
class Fault:
    """A model, the layout that trained it wrong, and the patches that plant the fault."""

    model: str
    layout: dict[str, int] = field(default_factory=dict)
    patches: tuple[tuple[object, str, object], ...] = ()
    is_refused: bool = False  # without the fault

    @property
    def recipe(self) -> Recipe:
        layers = max(2, self.layout.get("pp", 1))
        architecture = f"tests.distributed.custom_models:{self.model}"
        sizes = ModelConfig(
            architecture=architecture,
            layers=layers,
            hidden=32,
            heads=4,
            ffn_hidden=32,
            vocab=264,
        )
        parallel = ParallelConfig(microbatch_size=2, **self.layout)  # type: ignore[arg-type]
        train = TrainConfig(steps=2, global_batch_size=16, seq_len=16)
        recipe = Recipe(
            model=sizes,
            train=train,
            parallel=parallel,
            optimizer=OptimizerConfig(weight_decay=0.1),
        )
        return shrink(recipe, layers=layers, hidden=32, steps=2)


OVERWRITE = (training_loss, "token_losses", overwrite_all)
FAULTS = {
    "work after the head is done before it": Fault(
        "SoftCap", patches=((training_loss, "head_at_end", lambda model: model.head),)
    ),
    "the gradient of transposed logits is written into a copy": Fault(
        "SequenceFirst",
        patches=(OVERWRITE, (layers_loss._CrossEntropy, "backward", staticmethod(into_a_copy))),
    ),
    "logits that the last operation saved are overwritten": Fault(
        "Saturated", patches=(OVERWRITE,)
    ),
    "two tied weights are summed crosswise": Fault(
        "TwoTies",
        {"pp": 2},
        ((engine.Engine, "finish_gradients", sum_crosswise),),
    ),
    "a weight that two of four stages share is not summed": Fault(
        "SharedNorms",
        {"pp": 4},
        ((build_engine, "shared_by_ends", lambda *args: ()),),
        is_refused=True,
    ),
    "frozen parameters move": Fault("Frozen", {"tp": 2}, ((build_engine, "cut", forget_frozen),)),
    "a parameter that no forward pass uses decays": Fault(
        "Unused",
        {"dp_shard": 2, "zero_stage": 1},
        ((custom, "_unused", lambda model: []),),
        is_refused=True,
    ),
    "gathered logits are taken for split ones": Fault(
        "Gathered", {"tp": 2}, ((training_loss.MeanLoss, "_is_split", lambda *args: True),)
    ),
    "each end of a pipeline draws its own initial value": Fault(
        "TwoStarts",
        {"pp": 2},
        ((build_engine, "initial_part", draw_each_end),),
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as patches:
        for owner, attribute, fault in FAULTS[name].patches:
            patches.enter_context(mock.patch.object(owner, attribute, fault, create=True))
        yield


def record(name: str, is_planted: bool) -> TrainingRecord | str:
    """Returns the record of a layout, or the error that refuses it."""
    with planted(name) if is_planted else ExitStack():
        try:
            check_model(FAULTS[name].recipe.model)
            return record_recipe(FAULTS[name].recipe)
        except (Parallel3dError, StageError) as error:
            return str(error)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_is_put_in_again_is_found(world: Callable, name: str) -> None:
    fault = FAULTS[name]
    ranks = world(fault.recipe.parallel.world_size)
    faulty, right = (ranks.run(record, name, is_planted)[0] for is_planted in (True, False))
    reference = world(1).run(partial(record_plain, fault.recipe))[0]
    assert isinstance(faulty, str) or compare(reference, faulty).first is not None
    if fault.is_refused:
        assert isinstance(right, str), "it is the same model"
    else:
        assert isinstance(right, TrainingRecord), right
        assert compare(reference, right).first is None, compare(reference, right).first
