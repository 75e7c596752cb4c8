"""Weight gradients put off: nothing of them before, all of them after, and the inputs' at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from parallel3d.layers.linear import ColumnParallelLinear, delay_weight_gradients
from parallel3d.layers.parameter import set_fused_gradients


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.GELU(),
        nn.LayerNorm(6),
        nn.Linear(6, 4, bias=False),
        nn.MultiheadAttention(4, 2),
    )


def run(model: nn.Sequential, x: Tensor) -> Tensor:
    h = model[:4](x)
    attended, _ = model[4](h, h, h)
    loss: Tensor = attended.square().sum()
    return loss


def test_second_half_adds_what_the_first_left_out() -> None:
    plain = make_model()
    split = make_model()
    delayed = delay_weight_gradients(split)
    assert [name for name, _ in split.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    for _ in range(2):  # the second time the gradients add up
        x_plain = torch.randn(2, 3, 5, 4)[0].requires_grad_()
        x_split = None
        x_split = x_plain.detach().clone().requires_grad_()
        run(plain, x_plain).backward()
        before = copy.deepcopy(split[0].weight.grad)
        with delayed.collecting() as works:
            run(split, x_split).backward()
        assert len(works) == 2
        assert_close(x_split.grad, x_plain.grad)
        assert (before is None) == (split[0].weight.grad is None)
        with torch.no_grad():
            for work in works:
                work()
    for ours, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad)


def test_a_layer_delays_the_gradients_of_large_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel3d.layers.linear.FUSED_FROM_ELEMENTS", 0)
    layer = ColumnParallelLinear(4, 6)
    set_fused_gradients(layer, True)
    delayed = delay_weight_gradients(layer)
    with delayed.collecting() as works:
        layer(torch.ones(1, 2, 4, requires_grad=True)).sum().backward()
    assert len(works) == 1
    assert layer.weight.grad is None
    works[0]()
    assert_close(layer.weight.grad, torch.full((6, 4), 2.0))
