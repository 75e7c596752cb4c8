"""Seconds of a transformer block, the embedding and the head, per rank and microbatch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from parallel3d.config.flops import attended_keys
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.time.roofline import Kernels, flash_attention_s, matmul_s

# Bytes moved per element of [tokens, hidden] outside the tp region by two norms and two residual
# additions.
_NORM_FORWARD, _NORM_BACKWARD = 8.0, 16.0  # Of both norms together.
_OUTSIDE_FORWARD, _OUTSIDE_BACKWARD = 12.0, 16.0  # Of both additions together.
_ROPE = 8.0  # Bytes per element of q and k, in each direction.
_GELU_FORWARD, _GELU_BACKWARD = 4.0, 6.0  # Bytes per element of [tokens, ffn].
_SWIGLU_FORWARD = 6.0
_SWIGLU_BACKWARD = 10.0
# Bytes per element of [heads, seq, seq] of unfused attention: write scores, read and write softmax,
# dropout, read for the matmul with v (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1).
_SOFTMAX_FORWARD = 10.0
_SOFTMAX_BACKWARD = 14.0
# Memory traffic per element of [tokens x experts per token, hidden] to permute rows into expert
# order and back, in bytes, for each of the forward and backward pass.
_PERMUTE = 10.0
# Relative speed of the matmuls in unfused attention. The second value applies if the head dimension
# is not a multiple of 8, so tensor cores cannot use 16-byte loads.
_BATCHED, _BATCHED_UNALIGNED = 0.5, 0.25
# Exposed fraction of the time to accumulate a weight gradient. This and the speeds above are fitted
# on the runs of tools/cases.
_ACCUMULATE = 0.4
# Number of kernels in the forward pass of a block. An MoE layer has twice as many, for router,
# permutation and all-to-all.
_LAUNCHES = 60
_LOSS_PASSES = 10.0  # Bytes read and written per logit, in the forward and backward pass together.
# Rows of a tile. In a grouped matmul, each expert's rows start a new tile.
_TILE_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds of a block and microbatch, at least the time to launch the kernels."""

    forward_s: float
    backward_s: float
    again_s: float  # Time of the recomputed part of the forward pass.
    weight_s: float  # Part of `backward_s` that computes weight gradients.


@dataclass(frozen=True, kw_only=True)
class TimeParts:
    """Seconds by cause, of one microbatch in a block, forward and backward, or of a step on the
    busiest rank."""

    compute: float
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    pp_bubble: float = 0.0
    pp_p2p: float = 0.0
    dp: float = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    def scaled(self, factor: float) -> TimeParts:
        return TimeParts(**{cause: factor * seconds for cause, seconds in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class MicrobatchTimes:
    """Seconds of one microbatch in a block, the head and the embedding."""

    block: TimeParts
    forward_s: float  # Seconds of the block's forward pass.
    weight_s: float  # Seconds of the weight gradients, a part of the block's backward pass.
    head_s: tuple[float, float]  # forward, backward
    embedding_s: tuple[float, float]  # forward, backward

    @property
    def backward_s(self) -> float:
        return self.block.total - self.forward_s

    @property
    def ends_s(self) -> float:
        return sum(self.head_s) + sum(self.embedding_s)


class Product(NamedTuple):
    """A matmul [rows, inputs] x [inputs, outputs] of a block's forward pass.

    With several `experts`, it is a grouped matmul with the same number of rows for each.
    """

    rows: int
    outputs: int
    inputs: int
    experts: int = 1

    def forward_s(self, kernels: Kernels, *, turned: bool = False) -> float:
        """Returns the seconds of the matmul, or of that for the input gradient if `turned`."""
        outputs = self.outputs
        inputs = self.inputs
        if turned:
            outputs, inputs = inputs, outputs
        if self.experts == 1:
            return matmul_s(kernels, self.rows, outputs, inputs)
        tiles = ceil(ceil(self.rows / self.experts) / _TILE_ROWS)
        rows = tiles * _TILE_ROWS * self.experts
        read_s = 2.0 * self.weights / kernels.memory_rate
        return max(matmul_s(kernels, rows, outputs, inputs), read_s)

    def weight_s(self, kernels: Kernels) -> float:
        """Returns the seconds of the matmul for the weight gradient."""
        rows = max(1, self.rows // self.experts)
        return matmul_s(kernels, self.experts * self.outputs, self.inputs, rows)

    @property
    def weights(self) -> int:
        return self.experts * self.outputs * self.inputs


def products(run: PlannedRun) -> list[Product]:
    """Returns the matmuls with weights in a block's forward pass, on one rank."""
    shape = run.shape
    layout = run.layout
    tp = layout.tp
    t = run.tokens
    h = shape.hidden
    local = t // tp if layout.sequence_parallel else t
    kv = max(shape.kv_hidden // tp, shape.head_dim)
    found = [
        Product(t, shape.query_hidden // tp + 2 * kv, h),
        Product(t, h, shape.query_hidden // tp),
    ]
    if (latent := shape.latent) is not None:
        heads = shape.heads // tp
        queries = Product(t, shape.query_hidden // tp, latent.query_rank or h)
        narrow = latent.key_value_rank + latent.turned + (latent.query_rank or 0)
        values = Product(t, heads * (latent.plain + latent.value), latent.key_value_rank)
        out = Product(t, h, heads * latent.value)
        found = [Product(local, narrow, h), queries, values, out]
    inputs = shape.feed_forward_inputs
    experts = shape.experts
    shared = shape.ffn_hidden if experts is None else experts.shared_hidden
    if shared:
        found += [Product(t, inputs * shared // tp, h), Product(t, h, shared // tp)]
    if experts is None:
        return found
    found.append(Product(local, experts.count, h))
    rows = int(run.routed_rows)
    each = experts.hidden // layout.expert_tp
    here = max(1, experts.count // layout.ep)
    return [*found, Product(rows, inputs * each, h, here), Product(rows, h, each, here)]


def block_times(run: PlannedRun, kernels: Kernels) -> BlockTimes:
    """Returns the times of a block for one microbatch.

    Dense layers of an MoE model count as MoE layers, which have as many FLOPs by design.
    """
    # `products_back_s` is the time of input gradients, `weight_s` that of weight gradients.
    products_s = products_back_s = weight_s = 0.0
    for product in products(run):
        products_s += product.forward_s(kernels)
        products_back_s += product.forward_s(kernels, turned=True)
        weight_s += product.weight_s(kernels) + _accumulate_s(run, kernels, product.weights)
    attention_s, attention_back_s = _attention(run, kernels)
    moved, moved_back = elementwise_bytes(run)
    launches = 0.0
    if kernels.process is None:
        moved *= run.framework.elementwise
        moved_back *= run.framework.elementwise
        launches = _LAUNCHES * kernels.device.launch_s
        if run.shape.experts is not None:
            launches *= 2
    rest_s = moved / kernels.memory_rate
    rest_back_s = moved_back / kernels.memory_rate
    forward = products_s + attention_s + rest_s
    backward = products_back_s + weight_s + attention_back_s + rest_back_s
    layout = run.layout
    again = {
        "full": forward,
        "every_n": forward / layout.recompute_every,
        # torchtitan saves attention and every second matmul (Liang et al. 2024, arXiv 2410.06511).
        "op": 0.5 * products_s + rest_s,
        "selective": attention_s,
    }.get(layout.recompute, 0.0)
    return BlockTimes(
        forward_s=max(forward, launches),
        backward_s=max(backward, 2 * launches - again),
        again_s=again,
        weight_s=weight_s,
    )


def _accumulate_s(run: PlannedRun, kernels: Kernels, weights: int) -> float:
    """Returns the seconds to add a microbatch's weight gradient to the accumulated one."""
    if kernels.process is not None:
        return weights * kernels.process.gradient_s
    return weights * 2 * run.framework.gradient_bytes * _ACCUMULATE / kernels.memory_rate


def _attention(run: PlannedRun, kernels: Kernels) -> tuple[float, float]:
    """Returns the seconds of attention, forward and backward. Flash attention uses the mean over
    layers with and without a window."""
    shape = run.shape
    layout = run.layout
    framework = run.framework
    d = shape.attention_hidden // shape.heads
    queries = run.seq_len // layout.cp
    batch_heads = layout.microbatch_size * shape.heads / layout.tp
    if framework.attention == "flash":
        windowed = shape.windowed_layers / shape.layers
        window_keys = attended_keys(run.seq_len, shape.window)

        def seconds(backward: bool) -> float:
            full_s, window_s = (
                flash_attention_s(
                    kernels,
                    batch_heads=batch_heads,
                    queries=queries,
                    keys=keys,
                    head_dim=d,
                    backward=backward,
                )
                for keys in (run.seq_len, window_keys)
            )
            return (1 - windowed) * full_s + windowed * window_s

        return seconds(False), seconds(True)
    speed = _BATCHED if d % 8 == 0 else _BATCHED_UNALIGNED
    scores = batch_heads * queries * run.seq_len
    rate = kernels.device.peak(kernels.half) * kernels.device.matmul_efficiency * speed
    product_s = 4.0 * scores * d / rate
    traffic = scores / kernels.memory_rate
    dropout = 3.0 if framework.dropout else 0.0
    forward = _SOFTMAX_FORWARD + dropout
    backward = _SOFTMAX_BACKWARD + dropout
    return product_s + traffic * forward, 2 * product_s + traffic * backward


def elementwise_bytes(run: PlannedRun) -> tuple[float, float]:
    """Returns the bytes moved by norms, elementwise operations and expert permutation, forward and
    backward."""
    shape = run.shape
    norms = shape.block_norms / 2
    forward = run.outside * (_NORM_FORWARD * norms + _OUTSIDE_FORWARD)
    backward = run.outside * (_NORM_BACKWARD * norms + _OUTSIDE_BACKWARD)
    inner = run.inner(run.routed_rows)
    if shape.is_gated:
        forward += inner * _SWIGLU_FORWARD
        backward += inner * _SWIGLU_BACKWARD
    else:
        forward += inner * _GELU_FORWARD
        backward += inner * _GELU_BACKWARD
    both = _PERMUTE * run.routed_rows * shape.hidden
    if shape.positions == "rope":
        both += _ROPE * run.tokens * (shape.query_hidden + shape.kv_hidden) / run.layout.tp
    scale = run.item_bytes / 2
    return (forward + both) * scale, (backward + both) * scale


def head_times(run: PlannedRun, kernels: Kernels) -> tuple[float, float]:
    """Returns the seconds of the head and the loss, forward and backward."""
    kernels = replace(kernels, precision=kernels.half)
    product = Product(run.tokens, run.rank_vocab, run.shape.hidden)
    weight = product.weight_s(kernels) + _accumulate_s(run, kernels, product.weights)
    back = product.forward_s(kernels, turned=True)
    loss = 0.0  # `CalibratedHost` adds the measured loss.
    if kernels.process is None:
        loss = run.tokens * run.rank_vocab * _LOSS_PASSES / 2 / kernels.memory_rate
    return product.forward_s(kernels) + loss, back + weight + loss


def embedding_times(run: PlannedRun, kernels: Kernels) -> tuple[float, float]:
    """Returns the seconds of the embedding, forward and backward (float32 accumulation)."""
    forward = run.tokens * run.shape.hidden * 6.0 / kernels.memory_rate
    return forward, 2 * forward
