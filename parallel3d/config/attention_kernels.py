"""Which kernel computes an attention on which device, and the bytes that it makes for scores. The
layers choose by this table, the rules of a recipe refuse by it, and the planner counts with it. No
torch here.

`scaled_dot_product_attention` takes the first of its kernels that accepts a call, and the last of
them, `math`, accepts every call and writes the scores out: S^2 numbers a head, where all others
make a few numbers a token. What each one accepts was read in torch's sources of 2.11 to 2.15
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h,
torch/nn/attention/varlen.py). On CUDA:

                takes                                       refuses
    flash       16 bits; grouped heads; compute             masks; heads above 256, and of 193 to 224 in training on
                capability 8.0 and later                    8.6 to 8.9 and 12.x
    cudnn       16 bits; grouped heads; masks. It is asked  heads above 128 or no multiple of 8
                first on 9.x and 10.x with cuDNN > 9.15.0
    efficient   float32 and fp16, from 8.0 on bf16; masks   grouped heads (until 2.13); heads of other than multiples
                                                            of 16 bytes; float64
    varlen      as flash, from torch 2.12 on: documents of  masks; heads that are no multiple of 8; AMD's devices
                any lengths, and windows
    math        everything                                  nothing

So that nothing falls to `math` unasked, the layers repeat keys and values for the query heads that
share them wherever `efficient` may be taken (`repeats_heads`), and compute documents one by one
without `varlen` (`in_pieces`). Without it a window is a mask, which costs S^2 numbers. CPUs have
one fused kernel for all dtypes, grouped heads and masks.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from parallel3d.config.recipe import Recipe

KernelName = Literal["cpu", "flash", "cudnn", "efficient", "varlen", "math", "scores"]

# The most bytes of scores that one attention may write out on a GPU: a tenth of the memory of an 80
# GB device. 32 heads reach it with `math` at 4,730 tokens, with dropout at 2,896.
MOST_SCORE_BYTES = 8 * 2**30

_HASH_BYTES = 24  # what `exact` dropout draws a number from: three int64 at a time


@dataclass(frozen=True)
class AttentionDevice:
    """What the choice of a kernel depends on of a device and its software. The defaults are those
    of an A100."""

    type: str  # as torch names it
    capability: tuple[int, int] = (8, 0)  # of CUDA; any other device has none
    torch: tuple[int, int] = (2, 13)
    cudnn: int = 0  # 91501 is 9.15.1; 0 where it is unknown, and then not preferred
    is_rocm: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """What the choice of a kernel depends on of a call."""

    item_bytes: int  # 8, 4 or 2
    is_bf16: bool = False
    head_dim: int
    is_grouped: bool = False  # fewer key-value heads than query heads
    has_mask: bool = False  # a mask of S^2 numbers that the caller made
    has_window: bool = False
    has_documents: bool = False
    has_dropout: bool = False
    trains: bool = True


@dataclass(frozen=True)
class AttentionKernel:
    """How a call is computed, and its bytes that grow with the square of the sequence: those of
    each score (a query, a key and a head), and of each query and key of a mask. All are 0 where
    memory grows with the sequence alone."""

    name: KernelName
    repeats_heads: bool = False  # keys and values are repeated for every query head
    in_pieces: bool = False  # one call for each document
    kept_bytes: int = 0  # of a score, between forward and backward
    forward_bytes: int = 0  # of a score, beside those at the most
    backward_bytes: int = 0
    mask_bytes: int = 0

    @property
    def score_bytes(self) -> int:
        """The bytes of a score at the most."""
        return self.kept_bytes + max(self.forward_bytes, self.backward_bytes)


def attention_kernel(call: AttentionCall, device: AttentionDevice) -> AttentionKernel:
    """Returns the kernel of a call on a device."""
    item = call.item_bytes
    if call.has_dropout:  # by the layer: torch's kernels drop other elements in every layout
        wide = max(item, 4)
        # The softmax, a byte of the mask and the dropped probabilities are kept. While the mask is
        # drawn the latter two do not exist yet, but the scores do, and the softmax in the dtype of
        # the values.
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
    has_mask = call.has_mask or call.has_window  # which SDPA gets as numbers
    is_cut = call.has_documents or call.has_window
    if is_cut and not call.has_mask and _has_varlen(call, device):
        return AttentionKernel("varlen")
    name = _fused(call, device, has_mask=has_mask)
    takes_groups = name == "flash" or (name == "cudnn" and not has_mask)
    kernel = AttentionKernel(
        name,
        repeats_heads=call.is_grouped and not takes_groups,
        in_pieces=call.has_documents,
        mask_bytes=item + 2 if has_mask else 0,
    )
    if name != "math":
        return kernel
    # The softmax in float32; the scores, and the softmax of a row that may see nothing.
    return replace(kernel, kept_bytes=4, forward_bytes=8, backward_bytes=8)


def _fused(call: AttentionCall, device: AttentionDevice, *, has_mask: bool) -> KernelName:
    """Returns the kernel that `scaled_dot_product_attention` takes on CUDA, with repeated heads if
    it needs them."""
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
    """Returns the kernel of every block's attention in a recipe's training."""
    model = recipe.model
    train = recipe.train
    tp = recipe.parallel.tp
    if train.deterministic:  # cuDNN's kernel is not
        device = replace(device, cudnn=0)
    call = AttentionCall(
        item_bytes=4 if train.precision == "fp32" else 2,
        is_bf16=train.precision in ("bf16", "bf16_pure"),
        head_dim=model.head_size,
        is_grouped=max(model.key_value_heads // tp, 1) != model.heads // tp,
        has_window=model.has_window(train.seq_len),
        has_documents=recipe.data.documents == "mask",
        has_dropout=model.attention_dropout > 0,
    )
    return attention_kernel(call, device)


def attention_errors(recipe: Recipe, device: AttentionDevice) -> list[str]:
    """Returns a line if a block's attention would write out more than `MOST_SCORE_BYTES` on a GPU
    such as `device`."""
    kernel = kernel_of_recipe(recipe, device)
    train = recipe.train
    parallel = recipe.parallel
    scores = parallel.microbatch_size * (recipe.model.heads // parallel.tp)
    quadratic_bytes = train.seq_len**2 * (scores * kernel.score_bytes + kernel.mask_bytes)
    if device.type != "cuda" or quadratic_bytes <= MOST_SCORE_BYTES:
        return []
    key = "train.precision"
    tries = "fp16"
    if train.precision == "fp32" and device.capability >= (8, 0):
        tries = "bf16"
    why = "a window is a mask of S^2 numbers here"
    if kernel.name == "scores":
        key = "model.attention_dropout"
        tries = "0"
        why = "dropout needs the probabilities of attention, S^2 a head, written out"
    elif kernel.score_bytes:
        why = "no fused kernel takes these heads, so that S^2 scores a head are written out"
    return [
        f"{key} = {attrgetter(key)(recipe)}: {why}, which takes {quadratic_bytes / 2**30:.1f} GiB "
        f"a block and microbatch, and may take {MOST_SCORE_BYTES / 2**30:.0f} on a GPU; try "
        f"{key}={tries}, or a smaller parallel.microbatch_size"
    ]
