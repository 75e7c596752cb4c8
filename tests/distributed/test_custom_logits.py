"""A model may do anything with the output of its head, or gather it: in every layout it trains as
in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.build_engine import align_logits
from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe
from parallel3d.errors import ConfigError
from parallel3d.layers.linear import ColumnParallelLinear
from parallel3d.layers.parameter import ParallelContext
from parallel3d.layers.regions import gather_from_region
from parallel3d.layers.vocabulary import VocabParallelHead
from parallel3d.models.llama import Llama
from parallel3d.tools.bench.plain_torch import llama
from tests.distributed.training_cases import (
    DEEP_TIED,
    GROUPED,
    TIED,
    Curve,
    assert_follows,
    make_recipe,
    make_trainer,
    own_batch,
    plain_stack,
    train,
    whole_batch,
)

STEPS = 3
CHUNK = 7


def divided_in_place(logits: Tensor) -> Tensor:
    logits.div_(3.0)
    return logits


def read_beside(logits: Tensor) -> Tensor:
    with torch.no_grad():
        assert logits.exp().sum() > 0
    return logits


AFTER_HEAD: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda logits: logits,
    "capped": lambda logits: 0.1 * torch.tanh(logits / 0.1),
    "in place": divided_in_place,
    "read": read_beside,
    "flat": lambda logits: logits.flatten(0, 1),
    "transposed": lambda logits: logits.transpose(0, 1).contiguous().transpose(0, 1),
    "tanh": torch.tanh,
    "gathered by hand": lambda logits: logits,
}


@dataclass(frozen=True)
class CustomOptions:
    after_head: str = "nothing"


class Custom(Llama):
    """A Llama whose forward does something with the output of the head."""

    Options = CustomOptions

    def __init__(self, config: ModelConfig, **settings: object) -> None:
        super().__init__(config, **settings)  # type: ignore[arg-type]
        self.name = CustomOptions(**config.options).after_head
        self.tp = settings["tp"]

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        y = super().forward(*args, **kwargs)  # type: ignore[arg-type]
        if self.head is None:
            return y
        if self.name == "gathered by hand":
            return gather_from_region(y, self.tp)  # type: ignore[arg-type]
        return AFTER_HEAD[self.name](y)


class Gathering(Llama):
    """A Llama whose head gives every tp rank all logits."""

    def __init__(self, config: ModelConfig, **settings: object) -> None:
        super().__init__(config, **settings)  # type: ignore[arg-type]
        context = ParallelContext(settings["tp"], settings["sequence_parallel"], settings["device"])  # type: ignore[arg-type]
        self.head = ColumnParallelLinear(
            config.hidden,
            config.vocab,
            tp=context,
            gather_output=True,
        )


class Narrow(Llama):
    """A Llama with a head for half of the vocabulary."""

    def __init__(self, config: ModelConfig, **settings: object) -> None:
        super().__init__(config, **settings)  # type: ignore[arg-type]
        self.head = VocabParallelHead(
            config.hidden,
            config.vocab // 2,
            tp=ParallelContext(settings["tp"]),
        )  # type: ignore[arg-type]


def loss_with_z(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns what training minimises with a z-loss of 0.01, in plain torch."""
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, labels.flatten()) + 0.01 * flat.logsumexp(dim=-1).square().mean()


Case = tuple[str, ModelConfig, ParallelConfig, int | None]


def recipe_of(case: Case, model_class: type[Llama] = Custom) -> Recipe:
    after_head, model, parallel, chunk = case
    options = {} if model_class is not Custom else {"after_head": after_head}
    model = replace(model, architecture=f"{__name__}:{model_class.__name__}", options=options)
    return make_recipe(model, parallel, z_loss=0.01, loss_chunk_tokens=chunk)


def train_all(cases: list[Case], model_class: type[Llama]) -> list[tuple[float, Curve]]:
    """Returns the loss of the first batch before training, without z-loss, and the
    curve."""
    found = []
    for case in cases:
        trainer = make_trainer(recipe_of(case, model_class))
        for stage in trainer.stages:
            align_logits(stage.module)  # as on a GPU
        evaluated = trainer.evaluate([own_batch(trainer.recipe, 0)])
        found.append((evaluated, train(trainer, STEPS)))
    return found


def check(
    world: Callable,
    size: int,
    cases: list[Case],
    model_class: type[Llama] = Custom,
) -> None:
    for case, (evaluated, curve) in zip(
        cases, world(size).run(train_all, cases, model_class)[0], strict=True
    ):
        change = AFTER_HEAD[case[0]]
        recipe = replace(recipe_of(case, model_class), parallel=ParallelConfig())
        with patch.object(
            llama,
            "token_loss",
            lambda y, labels, change=change: loss_with_z(changed(change, y), labels),
        ):
            stack = plain_stack(recipe)
            batch = whole_batch(recipe, 0)
            with torch.no_grad():
                logits = changed(change, stack.model(batch.inputs.flatten(0, 1)))
            plain = F.cross_entropy(logits.flatten(0, -2), batch.labels.flatten()).item()
            expected = [stack.train_step(whole_batch(recipe, step)) for step in range(STEPS)]
        assert evaluated == pytest.approx(plain, rel=1e-6), case
        assert_follows(curve, expected)


def changed(
    change: Callable[[Tensor], Tensor],
    logits: Tensor,
) -> Tensor:
    y = change(logits.clone())
    return y.view_as(logits) if y.ndim < logits.ndim else y


V_SHAPED = {"schedule": "zb_v", "virtual_stages": 2}
CASES: dict[int, list[Case]] = {
    1: [
        ("capped", replace(TIED, vocab=130), ParallelConfig(microbatch_size=4), CHUNK),
        ("in place", GROUPED, ParallelConfig(microbatch_size=4), CHUNK),
        ("read", GROUPED, ParallelConfig(recompute="full", microbatch_size=4), CHUNK),
        ("flat", GROUPED, ParallelConfig(microbatch_size=4), CHUNK),
        ("transposed", GROUPED, ParallelConfig(microbatch_size=4), CHUNK),
    ],
    2: [
        (
            "capped",
            replace(GROUPED, vocab=129),
            ParallelConfig(tp=2, sequence_parallel=True, microbatch_size=4),
            CHUNK,
        ),
        ("capped", TIED, ParallelConfig(dp_shard=2, sharding="NO_SHARD", microbatch_size=4), CHUNK),
        ("capped", DEEP_TIED, ParallelConfig(pp=2, microbatch_size=2, **V_SHAPED), CHUNK),
        ("in place", GROUPED, ParallelConfig(tp=2, microbatch_size=4), CHUNK),
        ("gathered by hand", GROUPED, ParallelConfig(tp=2, microbatch_size=4), None),
        # The gradient of transposed logits reaches the logits.
        ("transposed", GROUPED, ParallelConfig(tp=2, microbatch_size=4), None),
        # The loss spares the output that the last operation has saved.
        ("tanh", GROUPED, ParallelConfig(tp=2, microbatch_size=4), None),
    ],
}


@pytest.mark.parametrize("size", CASES)
def test_work_after_the_head_stays_where_it_is(world: Callable, size: int) -> None:
    check(world, size, CASES[size])


def test_head_that_gathers_its_output_trains_the_same_model(world: Callable) -> None:
    layout = ParallelConfig(tp=2, sequence_parallel=True, microbatch_size=4)
    check(world, 2, [("nothing", GROUPED, layout, None)], Gathering)


def refused_width(parallel: ParallelConfig) -> str:
    trainer = make_trainer(recipe_of(("nothing", GROUPED, parallel, None), Narrow))
    with pytest.raises(ConfigError) as error:
        train(trainer, 1)
    return str(error.value)


def test_logits_for_half_of_the_vocabulary_are_refused(world: Callable) -> None:
    for message in world(2).run(refused_width, ParallelConfig(tp=2)):
        assert "returns 32 logits" in message
        assert "model.vocab = 128" in message
