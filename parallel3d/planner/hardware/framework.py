"""Profiles of training frameworks: their effect on time and memory in addition to the layout.

Speed and memory depend on the kernels, not on the name of the framework. The planner has five
typical stacks:

    eager       PyTorch, operator by operator, with FlashAttention-2
    fused       Megatron-Core, Transformer Engine: fused kernels, overlapped communication
    compiled    torch.compile over a block
    jax         XLA
    softmax     before FlashAttention: matmuls around a fused softmax, dropout

A framework is one of them plus the axes that it supports. parallel3d also has its own constants.
Constants without a source in their comment were fitted to all runs in tools/cases
(docs/explanation/planner.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """Kernels, overlap and memory of a training framework."""

    name: str
    # kernels
    quality: float = 1.04  # Factor on the step time, fitted by `score.stack_quality`.
    attention: Literal["flash", "softmax"] = "flash"
    # Factor on the memory traffic of norms, activations, residuals and RoPE. 1: fused kernels.
    elementwise: float = 3.0
    dropout: bool = False
    # communication
    action_s: float = 0.0  # Seconds between two actions of a pipeline rank.
    # layouts
    axes: tuple[str, ...] = ()  # Axes in addition to tp, pp and data parallelism: "cp", "ep".
    splits_optimizer_alone: bool = False  # True if the default sharding is ZeRO-1.
    # Bytes per parameter, before sharding:
    weight_bytes: float = 2.0  # Of the weights used in matmuls.
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0  # Of float32 weights and two Adam moments.
    state_bytes: float = 8.0  # Part of `optimizer_bytes` that the first optimizer step allocates.
    reduce_bytes: float = 2.0  # Per element of a gradient in a reduction.
    # Options that decide which activations are saved:
    fused_mlp: bool = False  # True if silu(gate) of SwiGLU is not saved.
    logit_bytes: float = 6.0  # Live bytes per logit at the loss.
    # Bytes outside the model:
    cache_bytes: float = 3e9  # cuBLAS workspaces, and cached blocks of other sizes.
    context_bytes: float = 1.5e9  # Memory outside the allocator: CUDA context, cuBLAS and NCCL.
    # Memory that is reserved but not allocated, as a fraction of the allocated bytes.
    fragmentation: float = 0.15

    @property
    def is_parallel3d(self) -> bool:
        """True for parallel3d, whose memory the planner derives from the code of this package."""
        return self.name == "parallel3d"


EAGER = FrameworkProfile(name="eager")
FUSED = replace(
    EAGER,
    name="fused",
    elementwise=1.0,
    quality=0.97,
    reduce_bytes=4.0,
    fused_mlp=True,  # megatron/core/fusions/fused_bias_swiglu.py
    context_bytes=2e9,
    fragmentation=0.05,
)
COMPILED = replace(EAGER, name="compiled", quality=1.0, elementwise=1.0)
JAX = replace(COMPILED, name="jax", quality=0.98)
SOFTMAX = replace(
    EAGER,
    name="softmax",
    quality=1.0,
    attention="softmax",
    elementwise=1.0,
    dropout=True,
    reduce_bytes=4.0,
    logit_bytes=4.0,
    cache_bytes=0.3e9,
    context_bytes=2e9,
    fragmentation=0.08,
)
STACKS = {stack.name: stack for stack in (EAGER, FUSED, COMPILED, JAX, SOFTMAX)}
# layers/ determines the saved activations, sharding/ the data-parallel memory. Kernels are those of
# eager PyTorch. This profile has not been validated on GPUs.
PARALLEL3D = replace(
    EAGER,
    name="parallel3d",
    action_s=1e-4,  # Overhead of Python.
    axes=("cp", "ep"),
    reduce_bytes=4.0,
    cache_bytes=0.3e9,
    context_bytes=1.2e9,
    fragmentation=0.04,
)
# parallel3d with blocks compiled by `train.compile`.
COMPILED_PARALLEL3D = replace(
    PARALLEL3D, elementwise=COMPILED.elementwise, quality=COMPILED.quality
)
MEGATRON_CORE = replace(FUSED, name="megatron-core", splits_optimizer_alone=True, axes=("cp", "ep"))
FRAMEWORKS = {
    **STACKS,
    "parallel3d": PARALLEL3D,
    "megatron-core": MEGATRON_CORE,
    "nemo": replace(MEGATRON_CORE, name="nemo"),
    "torchtitan": replace(EAGER, name="torchtitan", axes=("cp", "ep")),
}


def in_precision(framework: FrameworkProfile, precision: str) -> FrameworkProfile:
    """Returns the framework with the bytes per parameter of a precision.

    With bf16_pure, weights, gradients and states have 16 bits. With bf16_pure and fp32, there is no
    second copy of the weights.
    """
    states = framework.state_bytes
    if precision == "fp32":
        return replace(framework, weight_bytes=4.0, optimizer_bytes=states, reduce_bytes=4.0)
    if precision != "bf16_pure":
        return framework
    return replace(
        framework,
        weight_bytes=2.0,
        gradient_bytes=2.0,
        reduce_bytes=2.0,
        optimizer_bytes=4.0,
        state_bytes=4.0,
    )
