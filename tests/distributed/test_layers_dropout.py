"""Dropout over tp drops the elements that one process drops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh, get_rank, get_world_size

from parallel3d.layers.attention import AttentionOptions, ParallelAttention
from parallel3d.layers.dropout import Dropout, dropout_key
from parallel3d.layers.parameter import ParallelContext
from tests.distributed.layer_cases import F64, draw_weights, load, tp_mesh

B, S, D = 3, 8, 16
KEY = dropout_key(5, 7, torch.tensor([40, 2, 13]))


def check_masks() -> None:
    tp = tp_mesh()
    n = get_world_size()
    rank = get_rank()
    x = torch.ones(B, S, D)
    whole = Dropout(0.3, name="a")(x, KEY)
    for dim in (1, 2, -1):
        mine = Dropout(0.3, name="a", tp=tp, split_dim=dim)(x.chunk(n, dim)[rank], KEY)
        assert torch.equal(mine, whole.chunk(n, dim)[rank])
    assert torch.equal(Dropout(0.3, name="a", tp=tp)(x, KEY), whole)


def attention(
    tp: DeviceMesh | None,
    sp: bool,
    recompute: bool,
) -> nn.Module:
    module = ParallelAttention(
        D,
        8,
        2,
        tp=ParallelContext(tp, sp, dtype=F64),
        options=AttentionOptions(
            dropout=0.4,
            recompute=recompute,
            name="layers.3",
        ),
    )
    load(module, draw_weights(module, 0.3, F64))
    return module


def check_attention() -> None:
    """Split over heads: each head's probabilities are dropped as one process drops them."""
    tp = tp_mesh()
    n = get_world_size()
    rank = get_rank()
    x = torch.randn(B, S, D, dtype=F64, generator=torch.Generator().manual_seed(0))
    alone = x.clone().requires_grad_()
    y = attention(None, False, False)(alone, key=KEY)
    y.square().sum().backward()
    for sp, recompute in ((False, False), (True, True)):
        own = (x.chunk(n, 1)[rank] if sp else x).clone().requires_grad_()
        ours = attention(tp, sp, recompute)(own, key=KEY)
        ours.square().sum().backward()
        expected, gradient = (t.chunk(n, 1)[rank] if sp else t for t in (y, alone.grad))
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(own.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1, 4])
def test_dropout_knows_what_is_split(world: Callable, size: int) -> None:
    pool = world(size)
    pool.run(check_masks)
    pool.run(check_attention)
