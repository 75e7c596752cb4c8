"""What a training framework does that time and memory depend on, beside the layout.

Published runs do not differ by the names of their frameworks but by their kernels. So the planner
knows five typical stacks:

    eager       PyTorch, operator by operator, with FlashAttention-2
    fused       Megatron-Core, Transformer Engine: fused kernels, traffic beside the compute
    compiled    torch.compile over a block
    jax         XLA
    softmax     before FlashAttention: matmuls around a fused softmax, dropout

A framework is one of them, with the axes that it has. Figures without a source in their comment
were set on the runs of tools/cases, all sources together (docs/explanation/planner.md, "Stacks").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """Kernels, overlap and bytes of a training framework."""

    name: str
    # kernels
    quality: float = 1.04  # seconds of a step over those of the mechanisms (score.stack_quality)
    attention: Literal["flash", "softmax"] = "flash"
    # memory traffic of norms, activations, residuals and rope: 1 is a kernel for each group
    elementwise: float = 3.0
    dropout: bool = False
    # communication
    action_s: float = 0.0  # between two actions of a pipeline rank
    # layouts
    axes: tuple[str, ...] = ()  # that it has beside tp, pp and the data ranks: "cp", "ep"
    splits_optimizer_alone: bool = False  # ZeRO-1 is what it does by itself
    # bytes per parameter, before sharding
    weight_bytes: float = 2.0  # of the copy that computes
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0  # float32 weights and two moments
    state_bytes: float = 8.0  # of these the optimizer's states, which are made in its first step
    reduce_bytes: float = 2.0  # of a gradient on the wire
    # bytes of activations
    fused_mlp: bool = False  # silu(gate) of SwiGLU is not kept beside gate, up and their product
    logit_bytes: float = 6.0  # kept or at once alive per logit at the loss
    # memory outside the model
    cache_bytes: float = 3e9  # cuBLAS workspaces, freed blocks of other sizes
    context_bytes: float = 1.5e9  # CUDA context, cuBLAS and NCCL buffers: outside the allocator
    fragmentation: float = 0.15  # of the allocated bytes: reserved and not allocated

    @property
    def is_parallel3d(self) -> bool:
        """Whether this project's own framework is meant, whose layouts and memory are known
        exactly."""
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
# This project: layers/ for what its operators keep, sharding/ for the data dimension. Its kernels
# are PyTorch's, as those of the eager stack; it was never measured on a GPU.
PARALLEL3D = replace(
    EAGER,
    name="parallel3d",
    action_s=1e-4,  # Python between them
    weight_bytes=4.0,  # FSDP2 keeps float32 and computes with a gathered 16-bit copy
    optimizer_bytes=8.0,
    reduce_bytes=4.0,
    cache_bytes=0.3e9,
    context_bytes=1.2e9,
    fragmentation=0.04,
)
# The same compiled block by block (`train.compile`).
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
    """Returns the framework with the bytes of a precision: in pure bf16 weights, gradients and
    states have 16 bits; there, and in float32, the weights have no copy."""
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
