"""Whole models with sizes that tp does not divide: trained as plain torch does, built shard by
shard, and any sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.layers.parameter import (
    initial_weights,
    initialize,
    named_specs,
)
from parallel3d.models.llama import Llama
from tests.distributed.layer_cases import tp_mesh
from tests.distributed.test_parity import run_layout
from tests.distributed.training_cases import MANY_HEADS, assert_follows, make_recipe, plain_curve

ODD = replace(MANY_HEADS, kv_heads=2, vocab=131)  # 131 is prime; 2 key-value heads on 4 ranks
ODD_1005 = replace(ODD, vocab=1005)


def built_shard_by_shard(model: ModelConfig) -> None:
    """Compares a model from the meta device with the tensors of one process."""
    tp = tp_mesh()
    llama = Llama(replace(model, tied_embeddings=True), tp=tp, device="meta")
    initialize(llama, 7, "cpu")
    assert (
        llama.head is not None
        and llama.embed is not None
        and llama.head.weight is llama.embed.weight
    )
    expected = initial_weights(llama, 7)
    for name, _ in named_specs(llama):
        parameter = llama.get_parameter(name)
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    llama(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=4, microbatch_size=8),
        ParallelConfig(tp=4, microbatch_size=4, sequence_parallel=True, recompute="selective"),
        ParallelConfig(tp=2, dp_shard=2, microbatch_size=2, sequence_parallel=True),
    ],
    ids=["tp4", "tp4_sequence_parallel", "tp2_dp_shard2"],
)
def test_few_kv_heads_and_a_prime_vocabulary_train_as_plain_torch(
    world: Callable, parallel: ParallelConfig
) -> None:
    curves = world(4).run(run_layout, ODD, parallel)
    assert all(curve == curves[0] for curve in curves)
    assert_follows(curves[0], plain_curve(make_recipe(ODD, ParallelConfig())))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_model_is_built_from_the_meta_device(world: Callable, size: int) -> None:
    if size > 1:
        world(size).run(built_shard_by_shard, ODD)
    else:
        model = Llama(ODD, device="meta")
        initialize(model, 7, "cpu")
        assert all(
            torch.equal(model.get_parameter(n), w) for n, w in initial_weights(model, 7).items()
        )
