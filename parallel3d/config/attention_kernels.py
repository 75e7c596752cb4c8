"""Selection of the attention kernel for a device, and the memory that the kernel needs for scores.

The layers, the rules of a recipe and the planner all use this module. It does not import torch.

`scaled_dot_product_attention` uses the first of its kernels that accepts a call. The last one,
`math`, accepts every call and materializes the scores: S^2 numbers per head. All others need a few
numbers per token. The conditions are those in the sources of torch 2.11 to 2.15
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h,
torch/nn/attention/varlen.py). On CUDA:

                accepts                                     rejects
    flash       16 bits; grouped heads; compute             masks; head_dim above 256, and 193 to 224 in training on
                capability 8.0 and later                    8.6 to 8.9 and 12.x
    cudnn       16 bits; grouped heads; masks. It is tried  head_dim above 128 or not a multiple of 8
                first on 9.x and 10.x with cuDNN > 9.15.0
    efficient   float32 and fp16, from 8.0 on bf16; masks   grouped heads (until 2.13); heads that are not a multiple
                                                            of 16 bytes; float64
    varlen      as flash, from torch 2.12 on: documents of  masks; head_dim not a multiple of 8; AMD GPUs
                any lengths, and windows
    math        everything                                  nothing

Two measures avoid `math`. If `efficient` may be used, the layers repeat keys and values for the
query heads that share them (`repeats_heads`). Without `varlen` they compute documents one by one
(`in_pieces`), and a window becomes a mask of S^2 numbers. CPUs have one fused kernel for all dtypes,
grouped heads and masks.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from parallel3d.config.recipe import Recipe

# cpu: the fused kernel of CPUs. scores: attention with dropout, which the layer computes itself.
KernelName = Literal["cpu", "flash", "cudnn", "efficient", "varlen", "math", "scores"]

# Maximum memory for the attention scores of one block and microbatch on a GPU: a tenth of an 80 GB
# device. 32 heads reach it at 4,730 tokens with `math`, and at 2,896 with dropout.
MOST_SCORE_BYTES = 8 * 2**30

_HASH_BYTES = 24  # Bytes per element for the random numbers of dropout: three int64.


@dataclass(frozen=True)
class AttentionDevice:
    """Properties of a device and its software that select the kernel. The defaults describe an A100
    with torch 2.13."""

    type: str  # type of the torch.device
    capability: tuple[int, int] = (8, 0)  # CUDA compute capability; not used on other devices
    torch: tuple[int, int] = (2, 13)
    cudnn: int = 0  # cuDNN version, 91501 for 9.15.1. 0: unknown, so cuDNN is not preferred
    is_rocm: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """Properties of an attention call that select the kernel."""

    item_bytes: int  # bytes of an element: 8, 4 or 2
    is_bf16: bool = False
    head_dim: int
    is_grouped: bool = False  # fewer key-value heads than query heads
    has_mask: bool = False  # the caller passes a mask of S^2 numbers
    has_window: bool = False
    has_documents: bool = False
    has_dropout: bool = False
    has_chunks: bool = False  # the queries are chunks of the sequence (context parallelism)
    trains: bool = True


@dataclass(frozen=True)
class AttentionKernel:
    """Kernel selected for a call, and the memory that grows with the square of `seq_len`.

    Score bytes are per query, key and head. Mask bytes are per query and key. All are 0 for a
    kernel with linear memory."""

    name: KernelName
    repeats_heads: bool = False  # keys and values are repeated for each query head
    in_pieces: bool = False  # one call per document
    kept_bytes: int = 0  # per score, saved for the backward pass
    forward_bytes: int = 0  # per score, in addition, at the peak of the forward pass
    backward_bytes: int = 0  # the same for the backward pass
    mask_bytes: int = 0

    @property
    def score_bytes(self) -> int:
        """Peak bytes per score."""
        return self.kept_bytes + max(self.forward_bytes, self.backward_bytes)


def attention_kernel(call: AttentionCall, device: AttentionDevice) -> AttentionKernel:
    """Returns the kernel that computes a call on a device."""
    item = call.item_bytes
    # The layer computes dropout itself, because the dropout masks of torch's kernels depend on the
    # parallel layout.
    if call.has_dropout:
        wide = max(item, 4)
        # Saved for the backward pass: softmax, mask (1 byte) and probabilities after dropout. The
        # forward pass peaks while the mask is drawn, when the last two do not exist yet. But the
        # random numbers, the scores and the softmax cast to the dtype of the values do.
        casted = item if item < wide else 0
        return AttentionKernel(
            "scores",
            repeats_heads=call.is_grouped,
            kept_bytes=wide + 1 + item,
            forward_bytes=_HASH_BYTES - 1 + casted,
            backward_bytes=wide,
        )
    if device.type != "cuda":
        return AttentionKernel("cpu", in_pieces=call.has_documents)
    # SDPA receives a window as a mask, and under context parallelism one for each block of queries.
    has_mask = call.has_mask or call.has_window or call.has_chunks
    is_cut = call.has_documents or call.has_window or call.has_chunks
    if is_cut and not call.has_mask and _has_varlen(call, device):
        return AttentionKernel("varlen")
    name = _fused(call, device, has_mask=has_mask)
    takes_groups = name == "flash" or (name == "cudnn" and not has_mask)
    kernel = AttentionKernel(
        name,
        repeats_heads=call.is_grouped and not takes_groups,
        in_pieces=call.has_documents,
        mask_bytes=item + 2 if has_mask and not call.has_chunks else 0,
    )
    if name != "math":
        return kernel
    # Saved: the softmax in float32. At the peaks also the scores, and the softmax without NaN rows.
    return replace(kernel, kept_bytes=4, forward_bytes=8, backward_bytes=8)


def _fused(call: AttentionCall, device: AttentionDevice, *, has_mask: bool) -> KernelName:
    """Returns the kernel that `scaled_dot_product_attention` uses on CUDA, with repeated heads if
    that kernel needs them."""
    is_half = call.item_bytes == 2
    is_ampere = device.capability >= (8, 0)
    head = call.head_dim
    prefers_cudnn = device.capability[0] in (9, 10) and device.cudnn > 91500 and not device.is_rocm
    if is_half and prefers_cudnn and head <= 128 and head % 8 == 0:
        return "cudnn"
    if is_half and not has_mask and _has_flash(call, device):
        return "flash"
    if is_half:
        is_taken = head % 8 == 0 and (is_ampere or not call.is_bf16)
    else:
        is_taken = call.item_bytes == 4 and (not is_ampere or head % 4 == 0)
    return "efficient" if is_taken else "math"


def _has_flash(call: AttentionCall, device: AttentionDevice) -> bool:
    capability = device.capability
    head = call.head_dim
    is_small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    is_refused = is_small and call.trains and 192 < head <= 224
    return capability >= (8, 0) and head <= 256 and not is_refused


def _has_varlen(call: AttentionCall, device: AttentionDevice) -> bool:
    is_there = device.torch >= (2, 12) and not device.is_rocm
    return is_there and call.item_bytes == 2 and call.head_dim % 8 == 0 and _has_flash(call, device)


def kernel_of_recipe(recipe: Recipe, device: AttentionDevice) -> AttentionKernel:
    """Returns the kernel that the attention of every block uses in training."""
    model = recipe.model
    train = recipe.train
    tp = recipe.parallel.tp
    if train.deterministic:  # the cuDNN kernel is not deterministic
        device = replace(device, cudnn=0)
    call = AttentionCall(
        item_bytes=4 if train.precision == "fp32" else 2,
        is_bf16=train.precision in ("bf16", "bf16_pure"),
        head_dim=model.head_size,
        is_grouped=max(model.key_value_heads // tp, 1) != model.heads // tp,
        has_window=model.has_window(train.seq_len),
        has_documents=recipe.data.documents == "mask",
        has_dropout=model.attention_dropout > 0,
        has_chunks=recipe.parallel.sequence_chunks > 1,
    )
    return attention_kernel(call, device)


def attention_errors(recipe: Recipe, device: AttentionDevice) -> list[str]:
    """Returns an error line if attention scores and masks of a block need more than
    `MOST_SCORE_BYTES` for a microbatch on `device`. CPUs have no limit."""
    kernel = kernel_of_recipe(recipe, device)
    train = recipe.train
    parallel = recipe.parallel
    scores = parallel.microbatch_size * (recipe.model.heads // parallel.tp)
    per_score = scores * kernel.score_bytes + kernel.mask_bytes
    quadratic_bytes = train.seq_len * recipe.own_seq_len * per_score
    if device.type != "cuda" or quadratic_bytes <= MOST_SCORE_BYTES:
        return []
    key = "train.precision"
    tries = "fp16"
    if train.precision == "fp32" and device.capability >= (8, 0):
        tries = "bf16"
    why = "without a varlen kernel, model.window needs a mask of seq_len^2 numbers"
    if kernel.name == "scores":
        key = "model.attention_dropout"
        tries = "0"
        why = "attention dropout materializes seq_len^2 probabilities per head"
    elif kernel.score_bytes:
        why = "no fused kernel supports these heads, so seq_len^2 scores per head are stored"
    return [
        f"{key} = {attrgetter(key)(recipe)}: {why}, {quadratic_bytes / 2**30:.1f} GiB per block "
        f"and microbatch, but at most {MOST_SCORE_BYTES / 2**30:.0f} GiB are allowed on a GPU; "
        f"try {key}={tries}, or a smaller parallel.microbatch_size"
    ]
