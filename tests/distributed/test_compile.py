"""Whole models under torch.compile, embedding to loss and every option with them: one graph without
a break, the same numbers as without it, and no second graph for another step's dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import DeviceMesh, get_rank, get_world_size

from parallel3d.config.recipe import ModelConfig
from parallel3d.layers.dropout import dropout_key
from parallel3d.layers.gradients import local_tensor
from parallel3d.layers.loss import vocab_parallel_cross_entropy
from parallel3d.layers.parameter import initialize, named_specs
from parallel3d.layers.vocabulary import VocabParallelHead, head_cross_entropy
from parallel3d.models import model_class
from tests.distributed.layer_cases import tp_mesh

PRELOAD = ("torch._functorch.aot_autograd",)
B, S = 2, 8
LLAMA = ModelConfig(
    layers=1, hidden=32, heads=4, kv_heads=1, ffn_hidden=48, vocab=67, qkv_bias=True, qk_norm=True
)
MODELS = {
    "llama": replace(LLAMA, dropout=0.2, attention_dropout=0.2, window=5),
    "gpt": ModelConfig(
        architecture="gpt",
        layers=1,
        hidden=32,
        heads=4,
        ffn_hidden=64,
        vocab=67,
        max_positions=16,
        dropout=0.2,
        tied_embeddings=True,
    ),
}


class WithLoss(nn.Module):
    """ids [B, S], x [B, S, D] (or its part of the sequence), which is added to what the embedding
    gives -> the mean loss, by a head in chunks or of all logits at once."""

    def __init__(self, model: nn.Module, tp: DeviceMesh, *, chunked: bool) -> None:
        super().__init__()
        self.model, self.tp, self.chunked = model, tp, chunked

    def forward(self, ids: Tensor, x: Tensor, labels: Tensor, key: Tensor) -> Tensor:
        model = self.model
        x = model.dropout(model.embed(ids), key) + x  # type: ignore[operator]
        for block in model.layers.values():  # type: ignore[union-attr, operator]
            x = block(x, key)
        x, head = model.norm(x), model.head  # type: ignore[operator]
        assert isinstance(head, VocabParallelHead)
        if self.chunked:
            return head_cross_entropy(
                x, labels, head, chunk_tokens=5, label_smoothing=0.1, z_loss=1e-2
            ).mean()
        losses = vocab_parallel_cross_entropy(
            head(x), labels, self.tp, vocab=67, label_smoothing=0.1, z_loss=1e-2
        )
        return losses.mean()


def compare(name: str, sp: bool, chunked: bool) -> None:
    tp, config = tp_mesh(), MODELS[name]
    build = model_class(config.architecture)
    model = build(
        config, tp=tp, sequence_parallel=sp, recompute="none", recompute_every=1, device="meta"
    )
    initialize(model, 0, "cpu")
    eager = WithLoss(model, tp, chunked=chunked)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        ids, labels = torch.randint(67, (2, B, S), generator=generator)
        whole = torch.randn(B, S, config.hidden, generator=generator)
        key = dropout_key(0, step, torch.arange(B))
        results = []
        for run in (eager, compiled):
            x = (
                (whole.chunk(get_world_size(), 1)[get_rank()] if sp else whole)
                .clone()
                .requires_grad_()
            )
            loss = run(ids, x, labels, key)
            loss.backward()
            assert x.grad is not None
            gradients = {
                name: local_tensor(model.get_parameter(name).grad) for name, _ in named_specs(model)
            }
            results.append((loss.detach(), x.grad, gradients))
            model.zero_grad()
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("size", "name", "sp", "chunked"),
    [
        (1, "llama", False, False),
        (1, "gpt", False, True),
        (2, "llama", True, True),
        pytest.param(2, "gpt", False, False, marks=pytest.mark.long),
    ],
)
def test_a_whole_model_compiles_to_one_graph(
    world: Callable, size: int, name: str, sp: bool, chunked: bool
) -> None:
    world(size).run(compare, name, sp, chunked)
