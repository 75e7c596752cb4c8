"""Whole models with sizes that tp does not divide are built shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from parallel3d.config.recipe import ModelConfig
from parallel3d.layers.parameter import (
    initial_weights,
    initialize,
    named_specs,
)
from parallel3d.models.llama import Llama
from tests.distributed.layer_cases import tp_mesh
from tests.distributed.training_cases import MANY_HEADS

ODD = replace(MANY_HEADS, kv_heads=2, vocab=131)  # 131 is prime; 2 key-value heads on 4 ranks
ODD_1005 = replace(ODD, vocab=1005)


def built_shard_by_shard(model: ModelConfig) -> None:
    """Compares a model from the meta device with the tensors of one process."""
    tp = tp_mesh()
    llama = Llama(replace(model, tied_embeddings=True), tp=tp, device="meta")
    initialize(llama, 7, "cpu")
    assert llama.head is not None
    assert llama.embed is not None
    assert llama.head.weight is llama.embed.weight
    expected = initial_weights(llama, 7)
    for name, _ in named_specs(llama):
        parameter = llama.get_parameter(name)
        assert isinstance(parameter, DTensor) == (tp.size() > 1)
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(whole, expected[name]), name
    llama(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_model_is_built_from_the_meta_device(world: Callable, size: int) -> None:
    world(size).run(built_shard_by_shard, ODD)
