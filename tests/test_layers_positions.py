"""Positions, their scalings and masks, against transformers and by hand."""

from __future__ import annotations

import torch

from parallel3d.config.recipe import RopeScaling
from parallel3d.layers.positions import PackedDocuments, RotaryEmbedding
from parallel3d.layers.sequence import visible


def turned_exactly(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Computes the rotation of x [batch, seq, heads, head_dim] in float64."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half).double() / half)
    angles = torch.outer(torch.arange(x.shape[1]).double(), frequencies)
    cos = angles.cos().unsqueeze(1)
    sin = angles.sin().unsqueeze(1)
    first, second = x.double().split(half, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def test_bf16_queries_are_turned_in_float32_and_rounded_once() -> None:
    """A number of a pair of length r is then wrong by at most 2^-8 of r, the half of bf16's last
    place. With angles and products in bf16 the worst is 2.4 times as much."""
    torch.manual_seed(0)
    x = torch.randn(1, 4096, 2, 64).bfloat16().requires_grad_()
    gradient = torch.randn(x.shape).bfloat16()
    rotary = RotaryEmbedding(64, theta=10_000.0)
    y = rotary(x)
    y.backward(gradient)
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    wide = x.detach().double().requires_grad_()
    wanted = turned_exactly(wide, 10_000.0)
    wanted.backward(gradient.double())
    assert wide.grad is not None
    for found, exact in ((y.detach(), wanted.detach()), (x.grad, wide.grad)):
        length = exact.unflatten(-1, (2, 32)).norm(dim=-2).repeat(1, 1, 1, 2)
        assert ((found.double() - exact) / length).abs().max() < 1.001 * 2.0**-8


def test_the_backward_of_a_rotation_is_its_gradient() -> None:
    yarn = RopeScaling(type="yarn", factor=4.0, original_max_positions=4096)
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    rotary = RotaryEmbedding(6, theta=100.0, scaling=yarn)
    positions = torch.tensor([[0, 1, 0], [2, 0, 1]])
    assert torch.autograd.gradcheck(lambda value: rotary(value, positions), (x,))


def test_an_end_of_text_belongs_to_the_document_that_it_ends() -> None:
    packed = PackedDocuments.ended_by(9, torch.tensor([[1, 9, 9, 2, 3], [9, 1, 2, 3, 9]]))
    assert packed.lengths == (2, 1, 2, 1, 4)
    assert packed.starts.tolist() == [0, 2, 3, 5, 6, 10]
    assert packed.positions.tolist() == [[0, 1, 0, 0, 1], [0, 0, 1, 2, 3]]


def test_a_window_counts_the_query_itself() -> None:
    mask = visible(range(4), range(4), True, 2, torch.device("cpu"))
    assert mask.int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
