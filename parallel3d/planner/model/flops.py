"""Floating-point operations of a step, by the definitions that papers and frameworks report with."""

from __future__ import annotations

from typing import Literal

from parallel3d.config.flops_and_peaks import training_flops_per_token
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import ModelShape

FlopsDefinition = Literal["model", "palm", "megatron_recompute", "blocks_recompute", "causal"]


def model_flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """Returns the operations that the `mfu` of a plan and of the trainer's metrics counts."""
    return training_flops_per_token(
        layers=shape.layers,
        hidden=shape.hidden,
        weights_per_block=shape.block_weights,
        vocab=shape.vocab,
        seq_len=seq_len,
    )


def hardware_flops_per_token(shape: ModelShape, seq_len: int, recompute: str, every: int = 1) -> float:
    """Returns the operations of the model and of the forward that recompute repeats: of the blocks (of one of
    `every` for "every_n", half of their matrices for "op"), or of attention's products alone (Chowdhery et al. 2022,
    arXiv 2204.02311, appendix B: hardware FLOPs utilisation)."""
    matrices = 2 * shape.layers * shape.block_weights
    attention = 4 * shape.layers * shape.hidden * seq_len
    whole = matrices + attention
    again = {"full": whole, "every_n": whole / every, "op": matrices / 2, "selective": attention}
    return model_flops_per_token(shape, seq_len) + again.get(recompute, 0.0)


def reported_flops_per_token(shape: ModelShape, seq_len: int, definition: FlopsDefinition) -> float:
    """Returns the operations per token by another definition than the plan's own."""
    attention = 12 * shape.layers * shape.hidden * seq_len
    blocks, head = shape.layers * shape.block_weights, shape.vocab * shape.hidden
    return {
        "model": model_flops_per_token(shape, seq_len),
        "palm": 6 * total_parameters(shape) + attention,  # every parameter, look-up tables too
        "megatron_recompute": 8 * blocks + 6 * head + attention * 4 / 3,  # SC21 equation 3: the blocks' forward twice
        "blocks_recompute": 8 * blocks,
        "causal": 6 * (blocks + head) + attention / 2,
    }[definition]
