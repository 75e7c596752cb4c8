"""Weights that a class of the user's shares between its modules train as in one process, or are
refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe
from parallel3d.errors import ConfigError
from parallel3d.layers.parameter import normal
from parallel3d.models.llama import Llama
from tests.distributed.training_cases import (
    DEEP,
    Curve,
    assert_follows,
    make_recipe,
    make_trainer,
    train,
)


@dataclass(frozen=True)
class TieOptions:
    """`ties` are pairs of parameters such as "head.weight=embed.weight"."""

    ties: list[str] = field(default_factory=list)


class Tied(Llama):
    """A Llama some of whose parameters are one."""

    Options = TieOptions

    def __init__(self, config: ModelConfig, **settings: Any) -> None:
        super().__init__(config, **settings)
        options = TieOptions(**config.options)
        for tie in options.ties:
            name, original = tie.split("=")
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, self.get_parameter(original))
        # of two initial values of a shared weight the first module's counts
        self.head.specs["weight"] = replace(self.head.specs["weight"], init=normal(0.5))


MODEL = replace(DEEP, layers=4, architecture=f"{__name__}:Tied")
ENDS = ["head.weight=embed.weight"]
# The first block has gate A and up B, the last block has gate B and up A.
CROSSED = [
    "layers.3.mlp.gate.weight=layers.0.mlp.up.weight",
    "layers.3.mlp.up.weight=layers.0.mlp.gate.weight",
]
INSIDE = ["layers.1.mlp.up.weight=layers.0.mlp.up.weight"]
INSIDE_LAST = ["layers.3.attention.q.weight=layers.2.attention.q.weight"]
# One parameter twice on the first stage and twice on the last.
FOUR = [
    "layers.0.mlp_norm.weight=layers.0.attention_norm.weight",
    "layers.3.mlp_norm.weight=layers.0.attention_norm.weight",
    "norm.weight=layers.0.attention_norm.weight",
]
V_SHAPED = {"pp": 2, "virtual_stages": 2, "schedule": "zb_v"}

Cases = list[tuple[list[str], dict[str, Any]]]
CASES: dict[int, Cases] = {
    2: [
        (CROSSED, {"pp": 2}),
        ([*ENDS, *INSIDE, *FOUR, *INSIDE_LAST], {"pp": 2}),
        ([*ENDS, *CROSSED, *FOUR], V_SHAPED),
        ([*ENDS, *INSIDE, *FOUR], {"dp_shard": 2}),
        (
            [*ENDS, *INSIDE, *FOUR],
            {"dp_shard": 2, "sharding": "SHARD_OPTIMIZER", "bucket_mib": 0.01},
        ),
    ],
    4: [
        ([*ENDS, *CROSSED, *INSIDE_LAST], {"pp": 2, "dp_shard": 2}),
        ([*INSIDE, *FOUR], {"pp": 2, "tp": 2, "sequence_parallel": True}),
    ],
}


def recipe_of(
    ties: list[str],
    settings: dict[str, Any],
) -> Recipe:
    model = replace(MODEL, options={"ties": ties})
    return make_recipe(model, ParallelConfig(**{"microbatch_size": 2, **settings}))


def curves(cases: Cases) -> list[Curve]:
    return [train(make_trainer(recipe_of(ties, settings)), 2) for ties, settings in cases]


@pytest.mark.parametrize("size", CASES)
def test_shared_weights_are_summed_by_name_and_only_across_the_ends(
    world: Callable, size: int
) -> None:
    alone = world(1).run(curves, [(ties, {}) for ties, _ in CASES[size]])[0]
    for found in world(size).run(curves, CASES[size]):
        for curve, reference in zip(found, alone, strict=True):
            assert_follows(curve, reference)


def refused(cases: Cases) -> list[str]:
    messages = []
    for ties, settings in cases:
        with pytest.raises(ConfigError) as error:
            make_trainer(recipe_of(ties, settings))
        messages.append(str(error.value))
    return messages


def test_weights_shared_by_other_stages_than_the_ends_are_refused_on_every_rank(
    world: Callable,
) -> None:
    cases = [(INSIDE, {"pp": 4}), ([*ENDS, *INSIDE], {"pp": 4})]
    (first, *others) = world(4).run(refused, cases)
    for messages in others:
        assert messages == first
    for message in first:
        assert "layers.0.mlp.up.weight and layers.1.mlp.up.weight" in message
        assert "stages 0 and 1" in message
        assert "parallel.pp=1" in message
        assert "\n" not in message
