"""Whole models with sizes that tp does not divide: trained as plain torch does, built shard by shard, and any sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.layers.parameter import initial_weights, initialize, named_specs, normal, set_initializers
from parallel3d.models.llama import Llama
from tests.distributed.layer_cases import F64, check, tp_mesh
from tests.distributed.test_layers_attention import attention
from tests.distributed.test_layers_linear import mlp
from tests.distributed.test_layers_vocabulary import compare
from tests.distributed.test_parity import run_layout
from tests.distributed.training_cases import MANY_HEADS, assert_follows, make_recipe, plain_curve

ODD = replace(MANY_HEADS, kv_heads=2, vocab=131)  # 131 is prime; 2 key-value heads on 4 ranks
ODD_1005 = replace(ODD, vocab=1005)


def built_shard_by_shard(model: ModelConfig) -> None:
    """Compares a model from the meta device, one initialiser changed, with the tensors of one process."""
    tp = tp_mesh()
    llama = Llama(replace(model, tied_embeddings=True), tp=tp, device="meta")
    set_initializers(llama, {"layers.*.mlp.down.weight": normal(3.0)})
    initialize(llama, 7, "cpu")
    assert llama.head is not None and llama.embed is not None and llama.head.weight is llama.embed.weight
    expected = initial_weights(llama, 7)
    assert expected["layers.1.mlp.down.weight"].std() > 2
    for name, _ in named_specs(llama):
        parameter = llama.get_parameter(name)
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), expected[name]), name
    llama(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="'layers.9.*' matches none"):
        set_initializers(llama, {"layers.9.*": normal(1.0)})


def check_drawn(kv_heads: int, window: int | None, bias: bool, qk_norm: bool, sp: bool, fused: bool) -> None:
    case = attention("drawn", kv_heads, window=window, bias=bias, qk_norm=qk_norm)
    check(case, tp_mesh(), F64, sp, fused)
    check(mlp("geglu" if bias else "gelu", qk_norm), tp_mesh(), F64, sp, fused)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=4, microbatch_size=8),
        ParallelConfig(tp=4, microbatch_size=4, sequence_parallel=True, recompute="selective"),
        ParallelConfig(tp=2, dp_shard=2, microbatch_size=2, sequence_parallel=True),
    ],
    ids=["tp4", "tp4_sequence_parallel", "tp2_dp_shard2"],
)
def test_few_kv_heads_and_a_prime_vocabulary_train_as_plain_torch(world: Callable, parallel: ParallelConfig) -> None:
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
        assert all(torch.equal(model.get_parameter(n), w) for n, w in initial_weights(model, 7).items())


_QUIET = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@_QUIET
@given(
    size=st.sampled_from([2, 4]),
    vocab=st.integers(4, 200),
    sp=st.booleans(),
    fused=st.booleans(),
    tied=st.booleans(),
    chunked=st.booleans(),
    extras=st.booleans(),
)
def test_any_vocabulary(
    world: Callable, size: int, vocab: int, sp: bool, fused: bool, tied: bool, chunked: bool, extras: bool
) -> None:
    assume((size - 1) * -(-vocab // size) < vocab)
    world(size).run(compare, vocab, F64, sp, fused, tied, chunked, extras)


@_QUIET
@given(
    size=st.sampled_from([2, 4]),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    window=st.none() | st.integers(1, 8),
    bias=st.booleans(),
    qk_norm=st.booleans(),
    sp=st.booleans(),
    fused=st.booleans(),
)
def test_any_attention(
    world: Callable, size: int, kv_heads: int, window: int | None, bias: bool, qk_norm: bool, sp: bool, fused: bool
) -> None:
    world(size).run(check_drawn, kv_heads, window, bias, qk_norm, sp, fused)
