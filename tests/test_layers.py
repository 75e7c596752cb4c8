"""The layers without tp: what plain torch computes, for a user who imports them as they are."""

from __future__ import annotations

import weakref
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from parallel3d.config.recipe import ModelConfig
from parallel3d.layers import collectives
from parallel3d.layers.attention import ParallelAttention
from parallel3d.layers.loss import TokenLoss, token_losses, vocab_parallel_cross_entropy
from parallel3d.layers.mlp import ParallelMLP
from parallel3d.layers.parameter import (
    Initializer,
    ParallelContext,
    ParameterSpec,
    initial_part,
    initial_weights,
    initialize,
    normal,
    set_fused_gradients,
    zeros,
)
from parallel3d.layers.positions import LearnedPositions
from parallel3d.layers.vocabulary import VocabParallelEmbedding
from parallel3d.mesh import ONE_RANK, Axis
from parallel3d.models.llama import Llama
from parallel3d.tools.bench.plain_torch.llama import PlainLlama

MODEL = ModelConfig(
    layers=3,
    hidden=16,
    heads=4,
    kv_heads=2,
    ffn_hidden=24,
    vocab=32,
)


@pytest.mark.parametrize("fused", [False, True])
def test_llama_has_the_gradients_of_plain_torch(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over two microbatches, so that the second is added to the first."""
    monkeypatch.setattr("parallel3d.layers.linear.FUSED_FROM_ELEMENTS", 0)  # small weights too
    torch.manual_seed(0)
    model = Llama(MODEL, device="meta")
    plain = PlainLlama(MODEL)
    initialize(model, 0, "cpu")
    plain.load(initial_weights(model, 0))
    set_fused_gradients(model, fused)
    for _ in range(2):
        ids, labels = torch.randint(0, 32, (2, 3, 10))
        F.cross_entropy(plain(ids).flatten(0, 1), labels.flatten(), reduction="sum").backward()
        vocab_parallel_cross_entropy(model(ids), labels).sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(
            parameter.grad,
            plain.get_parameter(name).grad,
            rtol=1e-5,
            atol=1e-6,
        )


def of_whole_shape(tensor: Tensor, generator: torch.Generator | None) -> object:
    return tensor.uniform_(0, len(tensor.shape), generator=generator)


@pytest.mark.parametrize("shape", [(1300, 700), (70_000,), (300, 4, 200)])
@pytest.mark.parametrize("init", [normal(0.5), of_whole_shape])
def test_a_rank_draws_its_part_of_the_tensor_that_all_draw_together(
    shape: tuple[int, ...], init: Initializer
) -> None:
    """Over tp along each dim, and along rows over data ranks, some of whom have none."""
    for dim in (None, 0, 1)[: 1 + len(shape)]:
        spec = ParameterSpec(shape, dim, init, uneven=True)
        whole = initial_part(spec, "some.weight", 5, ONE_RANK)
        assert whole.shape == shape
        assert whole.unique().numel() > 0.95 * min(whole.numel(), 2**19)
        for tp in (Axis(4, 0, None), Axis(4, 2, None)):
            of_tp = tp.part(whole, dim)
            assert torch.equal(initial_part(spec, "some.weight", 5, tp), of_tp)
            each = -(-len(of_tp) // 5)
            for rank in range(5):
                part = initial_part(spec, "some.weight", 5, tp, Axis(5, rank, None))
                assert torch.equal(part, of_tp[rank * each : (rank + 1) * each])


def test_the_weights_of_a_seed_stay_what_they_are() -> None:
    """Whoever changes the tiles or their seeds gives every recipe another model."""
    weight = initial_part(
        ParameterSpec((600, 600), None, normal(1.0)),
        "layers.3.mlp.up.weight",
        7,
        ONE_RANK,
    )
    rows = [0, 127, 128, 127, 599]
    columns = [0, 511, 511, 512, 599]
    corners = weight[rows, columns]
    expected = [0.6309854984, 0.1834932566, -1.0255668163, 1.2421560288, 0.8680661917]
    assert_close(corners, torch.tensor(expected), rtol=1e-6, atol=1e-7)
    assert abs(weight.mean().item()) < 0.01
    assert weight.std().item() == pytest.approx(1.0, abs=0.01)


GRADIENTS = ("by autograd", "added to a bf16 total", "added to a float32 total")


@pytest.mark.parametrize("kept", GRADIENTS)
def test_a_frequent_token_keeps_all_its_gradients_in_bf16(kept: str) -> None:
    """A bf16 number that 4,000 gradients near 1 are added to one by one ends below 512."""
    embedding = VocabParallelEmbedding(7, 16, tp=ParallelContext(dtype=torch.bfloat16, init=zeros))
    weight = embedding.weight
    set_fused_gradients(embedding, kept != "by autograd")
    if kept == "added to a bf16 total":
        weight.grad = torch.zeros_like(weight)
    if kept == "added to a float32 total":
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    ids = torch.full((2, 2001), 3)
    gradients = torch.rand(2, 2001, 16).add(0.5).bfloat16()
    ids[:, 7] = torch.tensor([5, 0])
    embedding(ids).backward(gradients)
    found = getattr(weight, "main_grad", weight.grad)
    assert found is not None
    exact = torch.zeros(7, 16, dtype=torch.float64).index_add_(
        0,
        ids.flatten(),
        gradients.flatten(0, 1).double(),
    )
    assert found[[1, 2, 4, 6]].eq(0).all()
    assert torch.equal(found[5], gradients[0, 7].to(found.dtype))
    assert_close(found.double(), exact, rtol=2.0**-8, atol=0.0)


def test_equal_positions_of_packed_documents_keep_all_their_gradients_in_bf16() -> None:
    positions = LearnedPositions(4, 8, tp=ParallelContext(dtype=torch.bfloat16))
    places = torch.arange(4).repeat(1, 1000)
    gradients = torch.rand(1, 4000, 8).add(0.5).bfloat16()
    positions.num_embeddings = 4000
    x = torch.zeros(1, 4000, 8, dtype=torch.bfloat16)
    assert torch.equal(positions(x, places)[0, :4], positions.weight)
    positions(x, places).backward(gradients)
    exact = gradients.double().view(1000, 4, 8).sum(0)
    assert positions.weight.grad is not None
    assert_close(positions.weight.grad.double(), exact, rtol=2.0**-8, atol=0.0)


def test_gradient_that_overwrites_a_copy_of_the_logits_is_returned() -> None:
    drawn = torch.randn(5, 3, 7)
    labels = torch.randint(0, 7, (3, 5))
    ours, plain = (drawn.clone().requires_grad_() for _ in range(2))
    logits = ours.transpose(0, 1) * 1.0  # [3, 5, 7], not contiguous
    terms = TokenLoss(ONE_RANK, 7, z_loss=0.01)
    token_losses(logits, labels, terms, overwrite_logits=True).sum().backward()
    flat = plain.transpose(0, 1).flatten(0, 1)
    z_loss = 0.01 * flat.logsumexp(-1).square().sum()
    (F.cross_entropy(flat, labels.flatten(), reduction="sum") + z_loss).backward()
    assert not logits.is_contiguous()
    assert_close(ours.grad, plain.grad)


class Reading:
    """A collective that reads what it sends when it is waited for, as a GPU does."""

    def __init__(self, received: Tensor, sent: Tensor) -> None:
        self.received = received
        self.sent = weakref.ref(sent)

    def wait(self) -> None:
        sent = self.sent()
        assert sent is not None, "the tensor is freed while it is sent"
        self.received.copy_(torch.cat([sent, sent]))


def test_gather_keeps_its_input_until_it_has_arrived() -> None:
    def start(received: Tensor, sent: Tensor, **options: object) -> Reading:
        return Reading(received, sent)

    with (
        patch.object(collectives, "all_gather_single", start),
        patch.object(collectives, "_start_exchange", lambda x, axis: None),
    ):
        # what is sent is a copy
        wait = collectives.start_gather(torch.ones(3, 2).t(), Axis(2, 0, None), dim=0)
        assert wait().shape == (4, 3)


def test_an_empty_batch_has_an_empty_result() -> None:
    x = torch.zeros(0, 8, 64)
    for layer in (ParallelAttention(64, 4, 2), ParallelMLP(64, 128)):
        assert layer(x).shape == x.shape
