"""Seconds of one transformer block, of the embedding and of the head, on one rank and for one microbatch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, partial

from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.time.roofline import Kernels, flash_attention_s, matmul_s, memory_bound_s

# Bytes moved per element of [tokens, hidden] by what stands outside the tp region: two norms, two residual additions.
_NORM_FORWARD, _NORM_BACKWARD = 8.0, 16.0  # both
_OUTSIDE_FORWARD, _OUTSIDE_BACKWARD = 12.0, 16.0  # both
_DROPOUT_FORWARD, _DROPOUT_BACKWARD = 6.0, 6.0  # masks and a second pass, for both residuals
_ROPE = 8.0  # per element of q and k, each way
_GELU_FORWARD, _GELU_BACKWARD = 4.0, 6.0  # per element of [tokens, ffn]
_SWIGLU_FORWARD, _SWIGLU_BACKWARD = 6.0, 10.0
# Per element of [heads, seq, seq] of an attention that is not one kernel: scores written, softmax read and written,
# dropout, read for the product with v (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1).
_SOFTMAX_FORWARD, _SOFTMAX_BACKWARD = 10.0, 14.0


@dataclass(frozen=True, kw_only=True)
class BlockTimes:
    """Seconds of a block, never less than the host takes to launch it."""

    forward_s: float
    backward_s: float
    again_s: float  # the part of the forward that recompute repeats beside the backward
    weight_s: float  # the part of backward_s that only weights' gradients need


@dataclass(frozen=True, kw_only=True)
class BlockParts:
    """Seconds of one block and one microbatch, by cause: in one direction, or in both."""

    compute: float
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    dp: float = 0.0
    overhead: float = 0.0

    @cached_property
    def total(self) -> float:
        return self.compute + self.recompute + self.tp + self.cp + self.dp + self.overhead


@dataclass(frozen=True, kw_only=True)
class MicrobatchTimes:
    """Seconds of one microbatch, forward and backward: of a block, and of the model's two ends."""

    forward: BlockParts
    backward: BlockParts
    weight_s: float  # the part of a block's backward that only weights' gradients need
    head_s: tuple[float, float]
    embedding_s: tuple[float, float]
    again_s: float = 0.0  # what a recomputed block repeats, where others repeat nothing
    end_overhead_s: float = 0.0  # what the host adds to each end, included there

    @cached_property
    def block(self) -> BlockParts:
        """A block's seconds in both directions."""
        ways = (self.forward, self.backward)
        return BlockParts(**{part.name: sum(getattr(way, part.name) for way in ways) for part in fields(BlockParts)})


def block_times(run: PlannedRun, kernels: Kernels) -> BlockTimes:
    shape, tp, t = run.shape, run.layout.tp, run.tokens
    kv = max(shape.kv_hidden // tp, shape.head_dim)
    sizes = [
        (shape.query_hidden // tp + 2 * kv, shape.hidden),
        (shape.hidden, shape.query_hidden // tp),
        (shape.feed_forward_inputs * shape.ffn_hidden // tp, shape.hidden),
        (shape.hidden, shape.ffn_hidden // tp),
    ]
    products_s = products_back_s = weight_s = 0.0  # back: of the inputs' gradients; weight: of the weights'
    for outputs, inputs in sizes:
        products_s += matmul_s(kernels, t, outputs, inputs)
        products_back_s += matmul_s(kernels, t, inputs, outputs)
        weight_s += matmul_s(kernels, outputs, inputs, t) + _accumulate_s(run, kernels, outputs * inputs)
    attention_s, attention_back_s = _attention(run, kernels)
    moved, moved_back = elementwise_bytes(run)
    rest_s, rest_back_s = (memory_bound_s(kernels, b, launches=n) for b, n in ((moved, 8), (moved_back, 12)))
    forward, backward = products_s + attention_s + rest_s, products_back_s + weight_s + attention_back_s + rest_back_s
    program, recompute = run.program, run.layout.recompute
    again = {
        "full": forward,
        "every_n": forward / run.layout.recompute_every,
        # torchtitan keeps attention and every second matmul (Liang et al. 2024, arXiv 2410.06511)
        "op": 0.5 * products_s + rest_s,
        "selective": attention_s,
    }.get(recompute, 0.0)
    launches = program.launches * kernels.device.launch_s
    if program.blocking:
        forward, backward = forward + launches, backward + 2 * launches
        again += launches if recompute == "full" else 0.0
    return BlockTimes(
        forward_s=max(forward, launches),
        backward_s=max(backward, 2 * launches - again),
        again_s=again,
        weight_s=weight_s,
    )


def _accumulate_s(run: PlannedRun, kernels: Kernels, weights: int) -> float:
    """Returns the seconds to add a microbatch's gradient to that of earlier ones."""
    program = run.program
    if run.layout.microbatches == 1 and not program.fused_weight_gradient:
        return 0.0
    if kernels.process is not None:
        return weights * kernels.process.gradient_s
    passes = 2 * program.gradient_bytes * (program.accumulate if program.fused_weight_gradient else 1.0)
    return weights * passes / kernels.memory_rate


def _attention(run: PlannedRun, kernels: Kernels) -> tuple[float, float]:
    """Returns the seconds of a block's attention, forward and backward."""
    shape, layout, program, d = run.shape, run.layout, run.program, run.shape.head_dim
    queries, batch_heads = run.seq_len // layout.cp, layout.microbatch_size * shape.heads / layout.tp
    if program.attention == "flash":
        flash_s = partial(
            flash_attention_s, kernels, batch_heads=batch_heads, queries=queries, keys=run.seq_len, head_dim=d
        )
        return flash_s(backward=False), flash_s(backward=True)
    speed = 0.5 if d % 8 == 0 else program.unaligned_attention  # batched products of few columns; without tensor cores
    scores = batch_heads * queries * run.seq_len
    product_s = 4.0 * scores * d / (kernels.device.peak(kernels.half) * kernels.device.matmul_efficiency * speed)
    traffic = scores / kernels.memory_rate
    dropout = 3.0 if program.dropout else 0.0
    forward, backward = _SOFTMAX_FORWARD + dropout, _SOFTMAX_BACKWARD + dropout
    return product_s + traffic * forward, 2 * product_s + traffic * backward


def elementwise_bytes(run: PlannedRun) -> tuple[float, float]:
    """Bytes that norms, residuals, activations and rope move, forward and backward."""
    shape, layout, program, t = run.shape, run.layout, run.program, run.tokens
    outside = t * shape.hidden / (layout.tp if layout.sequence_parallel else 1)
    dropped = 1.0 if program.dropout else 0.0
    norms = program.norm_passes
    forward = outside * (_NORM_FORWARD * norms + _OUTSIDE_FORWARD + dropped * _DROPOUT_FORWARD)
    backward = outside * (_NORM_BACKWARD * norms + _OUTSIDE_BACKWARD + dropped * _DROPOUT_BACKWARD)
    inner = t * shape.ffn_hidden / layout.tp
    swiglu = shape.feed_forward == "swiglu"
    forward += inner * (_SWIGLU_FORWARD if swiglu else _GELU_FORWARD)
    backward += inner * (_SWIGLU_BACKWARD if swiglu else _GELU_BACKWARD)
    if shape.positions == "rope":
        rotated = t * (shape.query_hidden + shape.kv_hidden) / layout.tp
        forward += rotated * _ROPE
        backward += rotated * _ROPE
    scale = program.elementwise * run.item_bytes / 2
    return forward * scale, backward * scale


def head_times(run: PlannedRun, kernels: Kernels) -> tuple[float, float]:
    """Returns the seconds that the last norm, the output table and the loss take, forward and backward."""
    shape, t = run.shape, run.tokens
    vocab = run.rank_vocab
    product = matmul_s(kernels, t, vocab, shape.hidden, precision=kernels.half)
    weight = matmul_s(kernels, vocab, shape.hidden, t, precision=kernels.half)
    weight += _accumulate_s(run, kernels, vocab * shape.hidden)
    back = matmul_s(kernels, t, shape.hidden, vocab, precision=kernels.half)
    loss = memory_bound_s(kernels, t * run.loss_vocab * run.program.loss_passes / 2, launches=4)
    return product + loss, back + weight + loss


def embedding_times(run: PlannedRun, kernels: Kernels) -> tuple[float, float]:
    """Returns the look-up's seconds: forward it reads and writes rows, backward it adds gradients into float32."""
    rows = run.tokens * run.shape.hidden
    return memory_bound_s(kernels, rows * 6.0, launches=3), memory_bound_s(kernels, rows * 12.0, launches=4)
