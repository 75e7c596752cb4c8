"""What a block of Llama keeps for its backward, counted by autograd's hooks, is the formula's to the byte."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import get_world_size

from parallel3d.config import ModelConfig
from parallel3d.layers.activations import activation_bytes
from parallel3d.layers.parameter import local_tensor, set_fused_gradients
from parallel3d.layers.rotary import RotaryEmbedding
from parallel3d.models.decoder import Block, Placed
from parallel3d.models.llama import llama_block
from tests.distributed.layer_cases import tp_mesh

B, S = 2, 32


def kept_bytes(block: Block, rotary: RotaryEmbedding, x: Tensor) -> int:
    """Of every storage that the forward saves, once, but for parameters and the rotary table."""
    block(x)  # makes the table
    assert rotary._table is not None
    with torch.no_grad():
        others = [local_tensor(p) for p in block.parameters()] + list(rotary._table)
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in known:
            kept[pointer] = tensor  # held, so that its address stays its own
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x)
    assert y.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def compare(model: ModelConfig) -> None:
    tp = tp_mesh()
    for recompute, sp, dtype, fused in product(
        ("none", "selective", "full"), (False, True), (torch.float32, torch.bfloat16), (False, True)
    ):
        rotary = RotaryEmbedding(model.head_dim)
        torch.set_default_dtype(dtype)
        try:
            placed = Placed(tp=tp, sequence_parallel=sp, device=None)
            block = llama_block(model, 0, rotary, placed, recompute)  # type: ignore[arg-type]
        finally:
            torch.set_default_dtype(torch.float32)
        set_fused_gradients(block, fused)
        n = get_world_size()
        x = torch.randn(B, S // n if sp else S, model.hidden, dtype=dtype, requires_grad=True)
        expected = activation_bytes(
            batch=B,
            seq=S,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.key_value_heads,
            ffn_hidden=model.ffn_hidden,
            item_bytes=dtype.itemsize,
            tp=n,
            sequence_parallel=sp,
            recompute=recompute,  # type: ignore[arg-type]
            fused_norm=False,
        )
        assert kept_bytes(block, rotary, x) == expected, f"{recompute}, sequence_parallel {sp}, {dtype}, fused {fused}"


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_activation_bytes_are_what_autograd_keeps(world: Callable, size: int, kv_heads: int) -> None:
    world(size).run(compare, ModelConfig(layers=1, hidden=64, heads=4, kv_heads=kv_heads, ffn_hidden=96, vocab=16))
