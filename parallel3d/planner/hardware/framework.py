"""What a training framework does that time and memory depend on, beside the layout: its kernels,
what it overlaps, and how many bytes it keeps for a parameter. The planner's own is `PARALLEL3D`;
the others describe, mechanism by mechanism, the frameworks whose published runs the planner is
scored on (`planner/published/frameworks.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class FrameworkProfile:
    """Kernels, overlap and bytes of a training framework."""

    name: str
    is_measured: bool = False  # published runs of it were looked at while its figures were set
    # kernels
    # one tiled kernel; matmuls around a fused softmax
    attention: Literal["flash", "softmax"] = "flash"
    attention_speed: float = 1.0  # of the device's figure, which is of the best kernel
    # on Hopper, whose best kernel is not every framework's: FlashAttention-2 0.62
    hopper_attention: float = 1.0
    # speed of batched products whose heads are no multiple of 8, of the best
    unaligned_attention: float = 0.05
    # share of adding up a weight's gradient that a fused kernel's product does not hide
    accumulate: float = 0.15
    norm_passes: float = 1.0  # traffic of the norms over that of a fused kernel
    # memory traffic of norms, activations, residuals, rope: 1 is a kernel for each group
    elementwise: float = 1.0
    launches: int = 30  # kernels of one block's forward
    # more of them in a mixture's layer: router, order of the experts, their exchange
    expert_launches: int = 60
    dropout: bool = False
    pads_vocab: bool = True
    loss_passes: float = 8.0  # bytes read and written per logit, forward and backward
    fused_weight_gradient: bool = True  # the matmul adds into the gradient buffer
    # communication
    tp_hidden: float = 0.0  # share of tp traffic that runs beside matmuls
    gradients_hidden: float = 0.0  # share of the gradient reduction beside the backward
    # whole parameters' gradients, in buckets beside the step's last backward
    sends_in_last_backward: bool = False
    gathers_hidden: float = 0.0  # ZeRO-1: share of the parameter gather beside the forward
    p2p_hidden: float = 0.0
    # share of a hidden collective's time at the node's speed that kernels beside it lose
    contention: float = 0.45
    tp_speed: float = 1.0  # of tp collectives: copies around them, no fusion
    axes: tuple[str, ...] = ()  # that it has beside tp, pp and the data ranks: "cp", "ep"
    # a token goes to a node once, however many of its experts lie there (DeepEP)
    sends_once_a_node: bool = False
    expert_hidden: float = 0.0  # share of the experts' exchange that runs beside something else
    # data ranks share the optimizer's states (ZeRO-1), and no parameters
    splits_optimizer_alone: bool = False
    reduces_each_microbatch: bool = True  # FSDP: gathers and reduces for every microbatch
    # computes with a gathered 16-bit copy of float32 parameters, on one data rank too
    always_sharded: bool = False
    action_s: float = 0.0  # between two actions of a pipeline rank
    # bytes per parameter, before sharding
    weight_bytes: float = 2.0  # of the copy that computes
    gradient_bytes: float = 4.0
    fp16_gradient_bytes: float | None = None  # where fp16 and bf16 differ
    optimizer_bytes: float = 12.0  # float32 weights and two moments
    state_bytes: float = 8.0  # of these the optimizer's states, which are made in its first step
    reduce_bytes: float = 4.0  # of a gradient on the wire
    fp16_reduce_bytes: float | None = None  # where fp16 and bf16 differ
    gather_bytes: float = 2.0  # of a parameter on the wire
    # activations
    fused_mlp: bool = False  # silu(gate) of SwiGLU is not kept beside gate, up and their product
    cuts_by_cost: bool = False  # stages get as many layers as make them equally dear, head included
    gathers_logits: bool = False  # the loss is computed on the whole vocabulary by every tp rank
    logit_bytes: float = 8.0  # kept or at once alive per logit at the loss
    # memory outside the model
    # per element of [tokens, hidden]: float32 copies of unfused norms
    norm_extra_bytes: float = 0.0
    rope_copies: float = 0.0  # rotated q and k kept beside what was rotated
    step_bytes: float = 0.0  # temporaries of the optimizer's step, per parameter of its shard
    # reserved for nothing: cuBLAS workspaces, freed blocks of other sizes
    cache_bytes: float = 0.3e9
    context_bytes: float = 1.2e9  # CUDA context, cuBLAS and NCCL buffers: outside the allocator
    fragmentation: float = 0.04  # of the allocated bytes: reserved and not allocated
    # share of what is reserved for nothing that the allocator frees where memory is short
    gives_way: float = 0.0
    # what it does where a run does not say
    default_schedule: str = "1f1b"
    default_recompute: str = "none"
    default_sequence_parallel: bool = False

    @property
    def is_parallel3d(self) -> bool:
        """Whether this project's own framework is meant, whose layouts and memory are known
        exactly."""
        return self.name == "parallel3d"


# This project: layers/ for what its operators keep, sharding/ for the data dimension,
# layers/loss.py. It was never measured on a GPU: its kernels take as long as torchtitan's, which
# are PyTorch's operators too, its tp collectives as those of a typical framework; what it hides are
# the shares that Megatron-Core's runs show for the same mechanism.
PARALLEL3D = FrameworkProfile(
    name="parallel3d",
    hopper_attention=0.62,  # scaled_dot_product_attention: FlashAttention-2
    elementwise=3.1,
    launches=60,
    pads_vocab=False,
    reduces_each_microbatch=False,
    always_sharded=True,
    cuts_by_cost=True,
    sends_in_last_backward=True,  # sharding/bucket.py
    action_s=1e-4,  # Python between them
    tp_speed=0.7,
    p2p_hidden=0.5,  # pipeline/transport.py sends and receives ahead
    weight_bytes=4.0,  # FSDP2 keeps float32 and computes with a gathered 16-bit copy
    optimizer_bytes=8.0,
    loss_passes=34.0,
    logit_bytes=12.0,
)
# The same compiled block by block (`train.compile`), as torchtitan's.
COMPILED_PARALLEL3D = replace(PARALLEL3D, elementwise=1.2)
# The same without what it assumes of kernels, for a host where they were measured.
MEASURED_PARALLEL3D = replace(
    PARALLEL3D, elementwise=1.0, launches=0, loss_passes=0.0, tp_speed=1.0
)
