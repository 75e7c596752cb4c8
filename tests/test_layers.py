"""The layers without tp: what plain torch computes, for a user who imports them as they are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from parallel3d.config.recipe import ModelConfig
from parallel3d.layers.attention import ParallelAttention
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from parallel3d.layers.loss import vocab_parallel_cross_entropy
from parallel3d.layers.parameter import Placement, initial_weights, set_fused_gradients
from parallel3d.models.llama import Llama
from parallel3d.tools.bench.plain_llama import PlainLlama

MODEL = ModelConfig(layers=3, hidden=16, heads=4, kv_heads=2, ffn_hidden=24, vocab=32)


def llama(seed: int = 0) -> Llama:
    model = Llama(MODEL)
    weights = initial_weights(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


@pytest.mark.parametrize("fused", [False, True])
def test_llama_has_the_gradients_of_plain_torch(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two microbatches, so that the second is added to the first."""
    monkeypatch.setattr("parallel3d.layers.linear.FUSED_FROM_ELEMENTS", 0)  # small weights too
    torch.manual_seed(0)
    model, plain = llama(), PlainLlama(MODEL)
    plain.load(initial_weights(model, 0))
    set_fused_gradients(model, fused)
    for _ in range(2):
        ids, labels = torch.randint(0, 32, (2, 3, 10))
        F.cross_entropy(plain(ids).flatten(0, 1), labels.flatten(), reduction="sum").backward()
        vocab_parallel_cross_entropy(model(ids), labels).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-5, atol=1e-6)


def test_unfused_gradients_go_through_autograd() -> None:
    layer = ColumnParallelLinear(4, 6)
    x = torch.randn(2, 3, 4)
    (gradient,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    torch.testing.assert_close(gradient, x.sum(dim=(0, 1)).expand(6, 4))
    assert layer.weight.grad is None


def test_column_layers_that_share_an_input_are_as_many_alone() -> None:
    float64 = Placement(dtype=torch.float64)
    layers = [ColumnParallelLinear(4, 6, tp=float64), ColumnParallelLinear(4, 2, tp=float64)]
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    together = torch.cat(column_parallel(x, layers), dim=-1)
    apart = torch.cat([F.linear(x, layer.weight) for layer in layers], dim=-1)
    torch.testing.assert_close(together, apart)
    weights = [layer.weight for layer in layers]
    grad = torch.randn_like(apart)
    for ours, plain in zip(
        torch.autograd.grad(together, [x, *weights], grad), torch.autograd.grad(apart, [x, *weights], grad), strict=True
    ):
        torch.testing.assert_close(ours, plain)


def test_linear_gradients_are_right_to_second_order_of_finite_differences() -> None:
    layer = RowParallelLinear(3, 2, tp=Placement(dtype=torch.float64))
    x = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: layer(value), (x,))


def test_cross_entropy_is_torchs_in_float32_of_bf16_logits() -> None:
    logits = (torch.randn(2, 5, 11) * 4).bfloat16().requires_grad_()
    labels = torch.randint(0, 11, (2, 5))
    ours = vocab_parallel_cross_entropy(logits, labels)
    plain = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, plain)
    weights = torch.rand(2, 5)
    (ours_grad,) = torch.autograd.grad((ours * weights).sum(), logits)
    (plain_grad,) = torch.autograd.grad((plain * weights).sum(), logits)
    torch.testing.assert_close(ours_grad, plain_grad)


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    first, again, other = (initial_weights(Llama(MODEL, device="meta"), seed) for seed in (0, 0, 1))
    deeper = initial_weights(Llama(ModelConfig(**{**vars_of(MODEL), "layers": 5}), device="meta"), 0)
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert name.endswith("norm.weight") or not torch.equal(weight, other[name])
    name = "layers.2.attention.q.weight"
    assert torch.equal(first[name], deeper[name])
    assert not torch.equal(first[name], first["layers.1.attention.q.weight"])
    assert first[name].std().item() == pytest.approx(0.02, rel=0.2)


def vars_of(config: ModelConfig) -> dict[str, object]:
    return dict(config.__dict__)


def test_attention_refuses_heads_that_do_not_group() -> None:
    with pytest.raises(ValueError, match="kv_heads must divide heads"):
        ParallelAttention(16, 4, 3)
