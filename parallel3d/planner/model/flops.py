"""Floating-point operations of a step, by the definitions that papers and frameworks report with."""

from __future__ import annotations

from typing import Literal

from parallel3d.config.flops_and_peaks import training_flops_per_token
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import ModelShape, layer_matrix_parameters, parameters_of_matmuls

FlopsDefinition = Literal["model", "palm", "megatron_recompute", "blocks_recompute", "causal"]


def model_flops_per_token(shape: ModelShape, seq_len: int) -> float:
    """Returns the operations that the `mfu` of a plan and of the trainer's metrics counts."""
    return training_flops_per_token(
        layers=shape.layers,
        hidden=shape.hidden,
        weights_per_block=layer_matrix_parameters(shape),
        vocab=shape.vocab,
        seq_len=seq_len,
    )


def hardware_flops_per_token(shape: ModelShape, seq_len: int, recompute: str, every: int = 1) -> float:
    """Returns the operations of the model and of the forward that recompute repeats: of the blocks (of one of
    `every` for "every_n", half of their matrices for "op"), or of attention's products alone (Chowdhery et al. 2022,
    arXiv 2204.02311, appendix B: hardware FLOPs utilisation)."""
    matrices = 2 * shape.layers * layer_matrix_parameters(shape)
    attention = 4 * shape.layers * shape.hidden * seq_len
    again = {
        "full": matrices + attention,
        "every_n": (matrices + attention) / every,
        "op": matrices / 2,
        "selective": attention,
    }.get(recompute, 0.0)
    return model_flops_per_token(shape, seq_len) + again


def reported_flops_per_token(shape: ModelShape, seq_len: int, definition: FlopsDefinition) -> float:
    """Returns the operations per token by another definition than the plan's own."""
    attention = 12 * shape.layers * shape.hidden * seq_len
    if definition == "palm":  # every parameter, look-up tables too
        return 6 * total_parameters(shape) + attention
    if definition == "megatron_recompute":  # SC21 equation 3: the blocks' forward twice, the head's once
        return 8 * shape.layers * layer_matrix_parameters(shape) + 6 * shape.vocab * shape.hidden + attention * 4 / 3
    if definition == "blocks_recompute":
        return 8 * shape.layers * layer_matrix_parameters(shape)
    if definition == "causal":
        return 6 * parameters_of_matmuls(shape) + attention / 2
    return model_flops_per_token(shape, seq_len)
