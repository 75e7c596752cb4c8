"""Bytes that the backward needs of the forward, by the layers' own formulas.

Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), taken apart so that it holds for a tiled attention, SwiGLU,
grouped keys and values, and norms that keep float32 copies. Per block, t tokens of a microbatch, 16-bit activations:

    outside tp     2 norms' inputs, 2 linear inputs (q/k/v; gate and up), 2 dropout masks         t h (8 + 2), / tp with
                                                                                                   sequence parallelism
    inside tp      q, k, v; the output projection's input; the activation's input(s) and output   t (...) / tp
    softmax        its output, dropout's mask and output: 5 bytes a score                          5 a s t / tp
"""

from __future__ import annotations

from parallel3d.planner.model.planned_run import PlannedRun


def block_bytes(run: PlannedRun) -> float:
    """Of one block and one microbatch, with the layout's recompute."""
    return _block_bytes(run) * run.item_bytes / 2


def _block_bytes(run: PlannedRun) -> float:
    layout = run.layout
    if layout.recompute == "full":
        return _input_bytes(run)
    if layout.recompute == "layer":
        share = layout.recompute_share
        return share * _input_bytes(run) + (1 - share) * _whole_bytes(run)
    if layout.recompute == "op":
        return _kept_operators_bytes(run)
    return _whole_bytes(run)


def whole_block_bytes(run: PlannedRun) -> float:
    """Of one block without recompute of whole blocks: also what is alive while one is recomputed."""
    return _whole_bytes(run) * run.item_bytes / 2


def _whole_bytes(run: PlannedRun) -> float:
    outside = _outside(run)
    program, tp = run.program, run.layout.tp
    masks = 2.0 if program.dropout else 0.0
    # Input of each norm, and its output, which is the linear layers' input; norms of a framework's own operators keep
    # float32 copies.
    bytes_ = outside * (8.0 + masks + program.norm_extra_bytes)
    bytes_ += run.tokens * (_attention_features(run) * 2.0 + _mlp_bytes(run)) / tp
    return bytes_ + _score_bytes(run)


def _outside(run: PlannedRun) -> float:
    """Elements of [tokens, hidden] where tp does not divide the features."""
    return run.tokens * run.shape.hidden / (run.layout.tp if run.layout.sequence_parallel else 1)


def _input_bytes(run: PlannedRun) -> float:
    return 2.0 * _outside(run)


def _attention_features(run: PlannedRun) -> float:
    """q, k, v and the output projection's input; q and k once more where rotation does not happen in place."""
    shape, program = run.shape, run.program
    kv = max(shape.kv_hidden, shape.head_dim * run.layout.tp)
    rotated = (shape.hidden + kv) * program.rope_copies if shape.positions == "rope" else 0.0
    return 2.0 * shape.hidden + 2.0 * kv + rotated


def _mlp_bytes(run: PlannedRun) -> float:
    """The activation's inputs and output; an unfused SwiGLU keeps silu(gate) too."""
    shape = run.shape
    kept = 2.0 * (shape.feed_forward_inputs + 1)
    if shape.feed_forward == "swiglu" and not run.program.fused_mlp:
        kept += 2.0
    return kept * shape.ffn_hidden


def _score_bytes(run: PlannedRun) -> float:
    """What a tiled attention keeps is a float32 per row; another keeps the scores, unless they are recomputed."""
    shape, layout, program = run.shape, run.layout, run.program
    rows = shape.heads / layout.tp * run.tokens
    if program.attention == "flash" or layout.recompute == "selective":
        return 4.0 * rows
    each = 5.0 if program.dropout else 2.0
    if program.attention == "unfused":
        each += 6.0  # scaled and masked scores in float32, read by the softmax's backward
    return each * rows * run.seq_len


def _kept_operators_bytes(run: PlannedRun) -> float:
    """torchtitan's per-operator recompute: the block's input, attention's output, and every second matmul's output
    (Liang et al. 2024, arXiv 2410.06511; torchtitan/parallelisms/parallelize_llama.py)."""
    shape, tp = run.shape, run.layout.tp
    # Of wq, wk, wv, wo, w1, w3, w2 every second: k, the projection's output, one of the MLP's inputs.
    kept = 2.0 * (shape.kv_hidden + shape.ffn_hidden) / tp
    return _input_bytes(run) * 2.0 + run.tokens * (kept + 2.0 * shape.hidden / tp) + 4.0 * shape.heads / tp * run.tokens
