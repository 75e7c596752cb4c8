"""Seconds of one transformer block, of the embedding and of the head, on one rank and for one
microbatch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import NamedTuple

from parallel3d.config.flops import attended_keys
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.time.roofline import Kernels, flash_attention_s, matmul_s

# Bytes moved per element of [tokens, hidden] by what stands outside the tp region: two norms, two
# residual additions.
_NORM_FORWARD, _NORM_BACKWARD = 8.0, 16.0  # both
_OUTSIDE_FORWARD, _OUTSIDE_BACKWARD = 12.0, 16.0  # both
_ROPE = 8.0  # per element of q and k, each way
_GELU_FORWARD, _GELU_BACKWARD = 4.0, 6.0  # per element of [tokens, ffn]
_SWIGLU_FORWARD = 6.0
_SWIGLU_BACKWARD = 10.0
# Per element of [heads, seq, seq] of an attention that is not one kernel: scores written, softmax
# read and written, dropout, read for the product with v (Korthikanti et al. 2022, arXiv 2205.05198,
# section 4.1).
_SOFTMAX_FORWARD = 10.0
_SOFTMAX_BACKWARD = 14.0
# Per element of [tokens x experts of a token, hidden], each way: rows put in the order of their
# experts, and back.
_PERMUTE = 10.0
# Speed of batched matmuls around a softmax, of the best; with heads that are no multiple of 8 the
# tensor cores get no 16-byte loads.
_BATCHED, _BATCHED_UNALIGNED = 0.5, 0.25
# Share of adding a weight's gradient to that of earlier microbatches that the matmul does not hide,
# and the two speeds above: set on the runs of tools/cases.
_ACCUMULATE = 0.4
_LAUNCHES = 60  # kernels of one block's forward pass
_EXPERT_LAUNCHES = 60  # more of them in an MoE layer: router, order of the experts, all-to-all
_LOSS_PASSES = 10.0  # bytes read and written per logit, forward and backward
# each expert's rows begin a tile of their own, where all experts of a rank are one product
_TILE_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds of a block, never less than the host takes to launch it."""

    forward_s: float
    backward_s: float
    again_s: float  # the part of the forward that recompute repeats beside the backward
    weight_s: float  # the part of backward_s that only weights' gradients need


@dataclass(frozen=True, kw_only=True)
class TimeParts:
    """Seconds by cause: of a block and one microbatch in both directions, or of a step on the
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
    """Seconds of one microbatch: of a block, and forward and backward of the model's two ends."""

    block: TimeParts
    forward_s: float  # of the block
    weight_s: float  # the part of its backward that only weights' gradients need
    head_s: tuple[float, float]
    embedding_s: tuple[float, float]

    @property
    def backward_s(self) -> float:
        return self.block.total - self.forward_s

    @property
    def ends_s(self) -> float:
        return sum(self.head_s) + sum(self.embedding_s)


class Product(NamedTuple):
    """A matrix product of a block's forward: [rows, inputs] x [inputs, outputs], or as many such as
    there are `experts` on a rank, which divide the rows evenly and are computed at once."""

    rows: int
    outputs: int
    inputs: int
    experts: int = 1

    def forward_s(self, kernels: Kernels, *, turned: bool = False) -> float:
        """Returns the seconds of the product, or of the input's gradient, which is the same one
        `turned`."""
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
        """Returns the seconds of the weights' gradients."""
        rows = max(1, self.rows // self.experts)
        return matmul_s(kernels, self.experts * self.outputs, self.inputs, rows)

    @property
    def weights(self) -> int:
        return self.experts * self.outputs * self.inputs


def products(run: PlannedRun) -> list[Product]:
    """Returns the products of a block; of a mixture those of a layer with experts."""
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
    if experts is None:
        return [
            *found,
            Product(t, inputs * shape.ffn_hidden // tp, h),
            Product(t, h, shape.ffn_hidden // tp),
        ]
    if shared := experts.shared_hidden // tp:
        found += [Product(t, inputs * shared, h), Product(t, h, shared)]
    found.append(Product(local, experts.count, h))
    rows = int(run.routed_rows)
    each = experts.hidden // layout.expert_tp
    here = max(1, experts.count // layout.ep)
    return [*found, Product(rows, inputs * each, h, here), Product(rows, h, each, here)]


def block_times(run: PlannedRun, kernels: Kernels) -> BlockTimes:
    """Returns the seconds of a block. Of a mixture all layers count as those with experts: its
    first layers without have as many operations by design."""
    # back: of the inputs' gradients; weight: of the weights'
    products_s = products_back_s = weight_s = 0.0
    for product in products(run):
        products_s += product.forward_s(kernels)
        products_back_s += product.forward_s(kernels, turned=True)
        weight_s += product.weight_s(kernels) + _accumulate_s(run, kernels, product.weights)
    attention_s, attention_back_s = _attention(run, kernels)
    moved, moved_back = elementwise_bytes(run)
    if kernels.process is None:
        moved *= run.framework.elementwise
        moved_back *= run.framework.elementwise
    rest_s = moved / kernels.memory_rate
    rest_back_s = moved_back / kernels.memory_rate
    forward = products_s + attention_s + rest_s
    backward = products_back_s + weight_s + attention_back_s + rest_back_s
    layout = run.layout
    again = {
        "full": forward,
        "every_n": forward / layout.recompute_every,
        # torchtitan keeps attention and every second matmul (Liang et al. 2024, arXiv 2410.06511)
        "op": 0.5 * products_s + rest_s,
        "selective": attention_s,
    }.get(layout.recompute, 0.0)
    launches = 0.0
    if kernels.process is None:
        count = _LAUNCHES
        if run.shape.experts is not None:
            count += _EXPERT_LAUNCHES
        launches = count * kernels.device.launch_s
    return BlockTimes(
        forward_s=max(forward, launches),
        backward_s=max(backward, 2 * launches - again),
        again_s=again,
        weight_s=weight_s,
    )


def _accumulate_s(run: PlannedRun, kernels: Kernels, weights: int) -> float:
    """Returns the seconds to add a microbatch's gradient to that of earlier ones."""
    if kernels.process is not None:
        return weights * kernels.process.gradient_s
    return weights * 2 * run.framework.gradient_bytes * _ACCUMULATE / kernels.memory_rate


def _attention(run: PlannedRun, kernels: Kernels) -> tuple[float, float]:
    """Returns the seconds of a block's attention, forward and backward; where only some layers have
    a window, the mean of all."""
    shape = run.shape
    layout = run.layout
    framework = run.framework
    d = shape.attention_hidden // shape.heads
    queries = run.seq_len // layout.cp
    batch_heads = layout.microbatch_size * shape.heads / layout.tp
    if framework.attention == "flash":
        flash_s = partial(
            flash_attention_s, kernels, batch_heads=batch_heads, queries=queries, head_dim=d
        )
        windowed = shape.windowed_layers / shape.layers
        window_keys = attended_keys(run.seq_len, shape.window)

        def seconds(backward: bool) -> float:
            full_s = flash_s(keys=run.seq_len, backward=backward)
            window_s = flash_s(keys=window_keys, backward=backward)
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
    """Bytes that norms, residuals, activations, rope and the order of experts move, forward and
    backward."""
    shape = run.shape
    layout = run.layout
    t = run.tokens
    outside: float = t * shape.hidden
    if layout.sequence_parallel:
        outside /= layout.tp
    norms = shape.block_norms / 2
    forward = outside * (_NORM_FORWARD * norms + _OUTSIDE_FORWARD)
    backward = outside * (_NORM_BACKWARD * norms + _OUTSIDE_BACKWARD)
    inner = t * shape.ffn_hidden / layout.tp
    if (experts := shape.experts) is not None:
        rows = run.routed_rows
        inner = t * experts.shared_hidden / layout.tp + rows * experts.hidden / layout.expert_tp
        forward += _PERMUTE * rows * shape.hidden
        backward += _PERMUTE * rows * shape.hidden
    if shape.is_gated:
        forward += inner * _SWIGLU_FORWARD
        backward += inner * _SWIGLU_BACKWARD
    else:
        forward += inner * _GELU_FORWARD
        backward += inner * _GELU_BACKWARD
    if shape.positions == "rope":
        rotated = t * (shape.query_hidden + shape.kv_hidden) / layout.tp
        forward += rotated * _ROPE
        backward += rotated * _ROPE
    scale = run.item_bytes / 2
    return forward * scale, backward * scale


def head_times(run: PlannedRun, kernels: Kernels) -> tuple[float, float]:
    """Returns the seconds that the last norm, the output table and the loss take, forward and
    backward."""
    kernels = replace(kernels, precision=kernels.half)
    t = run.tokens
    h = run.shape.hidden
    vocab = run.rank_vocab
    product = matmul_s(kernels, t, vocab, h)
    weight = matmul_s(kernels, vocab, h, t)
    weight += _accumulate_s(run, kernels, vocab * h)
    back = matmul_s(kernels, t, h, vocab)
    loss = 0.0  # which a calibrated host has measured apart
    if kernels.process is None:
        loss = t * run.rank_vocab * _LOSS_PASSES / 2 / kernels.memory_rate
    return product + loss, back + weight + loss


def embedding_times(run: PlannedRun, kernels: Kernels) -> tuple[float, float]:
    """Returns the look-up's seconds: forward it reads and writes rows, backward it adds gradients
    into float32."""
    rows = run.tokens * run.shape.hidden
    forward = rows * 6.0 / kernels.memory_rate
    backward = rows * 12.0 / kernels.memory_rate
    return forward, backward
