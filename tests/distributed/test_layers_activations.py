"""What the blocks of a model keep for their backward, counted by autograd's hooks, is what the
formula says, within the bars of the memory model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import get_world_size

from parallel3d.config.attention_kernels import AttentionCall, AttentionDevice, attention_kernel
from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.recipe import ModelConfig
from parallel3d.layers.dropout import dropout_key
from parallel3d.layers.parameter import set_fused_gradients
from parallel3d.layers.positions import PackedDocuments, RotaryEmbedding
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.models import model_class
from parallel3d.planner.memory.activations import BlockActivations
from parallel3d.planner.model.shapes import from_config
from tests.distributed.layer_cases import tp_mesh

B, S = 2, 32
LLAMA = ModelConfig(
    layers=1,
    hidden=64,
    heads=4,
    kv_heads=4,
    ffn_hidden=96,
    vocab=16,
)
GPT = replace(LLAMA, architecture="gpt", max_positions=S)
MODELS = {
    "llama": LLAMA,
    "grouped": replace(LLAMA, kv_heads=2),
    "dropped": replace(LLAMA, kv_heads=2, dropout=0.1, attention_dropout=0.1),
    "qwen3": replace(LLAMA, kv_heads=2, head_dim=24, qk_norm=True),
    "gpt": GPT,
    "experts": replace(LLAMA, experts=ExpertsConfig(count=4, per_token=2, hidden=64)),
    "shared": replace(
        LLAMA,
        experts=ExpertsConfig(
            count=4, per_token=1, hidden=64, shared_hidden=64, shared_gate=True, score="sigmoid"
        ),
    ),
}


PACKED = PackedDocuments.ended_by(8, torch.arange(B * S).view(B, S) % 9)


def kept_bytes(
    model: nn.Module,
    x: Tensor,
    documents: PackedDocuments | None,
) -> int:
    """Counts the bytes of every storage that the blocks' forward saves, but for parameters, rotary
    table, places in documents and key."""
    key = dropout_key(0, 0, torch.arange(B))

    def blocks(x: Tensor) -> Tensor:
        assert isinstance(model.layers, nn.ModuleDict)
        for block in model.layers.values():
            x = block(x, key, documents)
        return x

    blocks(x)  # makes the table
    tables = [part._table for part in model.modules() if isinstance(part, RotaryEmbedding)]
    with torch.no_grad():
        others = [local_tensor(p) for p in model.parameters()] + [
            t for table in tables if table for t in table
        ]
    places = [] if documents is None else [documents.positions]
    known = {tensor.untyped_storage().data_ptr() for tensor in [*others, key, *places]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in known:
            kept[pointer] = tensor.detach()  # held, so that its address stays its own
        return tensor.detach()  # the tensor itself would keep its graph alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = blocks(x)
    assert y.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def compare(config: ModelConfig, documents: PackedDocuments | None = None) -> None:
    tp = tp_mesh()
    for recompute, sp, (dtype, fused) in product(
        ("none", "selective", "full"),
        (False, True),
        ((torch.float32, False), (torch.bfloat16, True)),
    ):
        torch.set_default_dtype(dtype)
        try:
            build = model_class(config.architecture)
            model = build(
                config,
                tp=tp,
                sequence_parallel=sp,
                recompute=recompute,  # type: ignore[arg-type]
                recompute_every=1,
                device=None,
            )
        finally:
            torch.set_default_dtype(torch.float32)
        set_fused_gradients(model, fused)
        n = get_world_size()
        rows = 0
        if config.experts is not None:
            rows = B * S * config.experts.per_token
        x = torch.randn(B, S // n if sp else S, config.hidden, dtype=dtype, requires_grad=True)
        block = BlockActivations(
            shape=from_config(config),
            batch=B,
            seq=S,
            item_bytes=dtype.itemsize,
            tp=n,
            sequence_parallel=sp,
            rows=rows,
            fused_norm=False,
            dropout=config.dropout > 0,
            attention=attention_kernel(
                AttentionCall(
                    item_bytes=dtype.itemsize,
                    head_dim=config.head_size,
                    is_grouped=config.key_value_heads != config.heads,
                    has_documents=documents is not None,
                    has_dropout=config.attention_dropout > 0,
                ),
                AttentionDevice("cpu"),
            ),
        )
        expected = block.bytes(recompute)  # type: ignore[arg-type]
        kept = kept_bytes(model, x, documents)
        if recompute == "full":
            kept += 8 * rows  # The saved choices are not those of autograd.
        assert 0.97 < expected / kept < 1.08, (
            f"{kept}, not {expected}: {recompute}, sequence_parallel {sp}, {dtype}, fused {fused}"
        )


@pytest.mark.parametrize(
    "size, model",
    [
        *((2, model) for model in MODELS if MODELS[model].experts is None),
        (1, "dropped"),
        (4, "grouped"),
        (1, "experts"),
        (1, "shared"),
    ],
)
def test_activation_bytes_are_what_autograd_keeps(
    world: Callable,
    size: int,
    model: str,
) -> None:
    world(size).run(compare, MODELS[model])


def test_documents_attended_to_one_by_one_are_kept_twice(world: Callable) -> None:
    world(2).run(compare, MODELS["grouped"], PACKED)
