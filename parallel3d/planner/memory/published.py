"""The memory of published programs, which are not parallel3d: what each keeps, by products of a few numbers.

Activations are what the backward needs of the forward.
Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), taken apart so that it holds for a tiled attention, SwiGLU,
grouped keys and values, and norms that keep float32 copies. Per block, t tokens of a microbatch, 16-bit activations:

    outside tp     2 norms' inputs, 2 linear inputs (q/k/v; gate and up), 2 dropout masks         t h (8 + 2), / tp with
                                                                                                   sequence parallelism
    inside tp      q, k, v; the output projection's input; the activation's input(s) and output   t (...) / tp
    softmax        its output, dropout's mask and output: 5 bytes a score                          5 a s t / tp
"""

from __future__ import annotations

from dataclasses import replace

from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.schedules.build import live_microbatches


def published_memory(run: PlannedRun, rank: int) -> RankMemory:
    layout, program = run.layout, run.program
    part = run.ranks[rank]
    parameters = rank_parameters(run, part)
    activations = _activations(run, rank)
    logits = program.logit_bytes * run.tokens * run.loss_vocab if part.head else 0.0
    one_block = whole_block_bytes(run) if layout.recompute in ("full", "every_n", "op") else 0.0
    buffers = _buffers(run, part, parameters)
    # A block under recompute and the logits are not alive at once, nor is the optimizer's step beside either.
    step = program.step_bytes * parameters / layout.optimizer_shards
    temporary = max(one_block - logits, step - activations - logits, 0.0)
    held = RankMemory(
        rank=rank,
        parameters=program.weight_bytes * parameters / layout.parameter_shards,
        gradients=program.gradient_bytes * parameters / layout.gradient_shards,
        optimizer=program.optimizer_bytes * parameters / layout.optimizer_shards,
        activations=activations,
        logits=logits,
        buffers=buffers,
        temporary=temporary,
        fragmentation=program.fragmentation * (activations + logits + buffers + temporary) + program.cache_bytes,
        context=program.context_bytes,
    )
    # What the allocator keeps for nothing it gives back before it runs out.
    cached = program.step_cached_bytes * parameters / layout.optimizer_shards
    room = max(0.0, run.cluster.device.memory_bytes - held.total)
    return replace(held, fragmentation=held.fragmentation + min(cached, room))


def rank_parameters(run: PlannedRun, stage: StageSlice) -> int:
    """Parameters of a slice of the model on one device, the token table padded as the program pads it."""
    shape = run.shape
    count = stage.layers * run.block_parameters
    table = run.rank_vocab * shape.hidden
    if stage.embedding:
        count += table + (shape.position_rows * shape.hidden if shape.positions == "learned" else 0)
        count += shape.norm_parameters if shape.embedding_norm else 0
    if stage.head:
        count += shape.norm_parameters
        if not (shape.tied_embeddings and stage.embedding):
            count += table
    return count


def live_on(run: PlannedRun, rank: int) -> int:
    """Microbatches, counted for each of a rank's stages, whose activations are alive at once on a pipeline rank."""
    layout = run.layout
    # zb-2p: as many again, so that the bubble goes (Qi et al. 2023, arXiv 2401.10241, table 1)
    zero_bubble = {"zb-1p": layout.pp, "zb-2p": 2 * layout.pp - 1}
    if layout.schedule in zero_bubble:
        return min(zero_bubble[layout.schedule], layout.microbatches)
    return live_microbatches(
        layout.schedule,
        pp=layout.pp,
        rank=rank,
        microbatches=layout.microbatches,
        virtual_stages=layout.virtual_stages,
    )


def _activations(run: PlannedRun, rank: int) -> float:
    layout, part = run.layout, run.ranks[rank]
    live = live_on(run, rank)
    stages = layout.virtual_stages
    bytes_ = live * part.layers / stages * block_bytes(run)
    outside = run.tokens * run.shape.hidden / (layout.tp if layout.sequence_parallel else 1)
    if part.embedding:  # its output under dropout keeps a mask; ids are 8 bytes
        bytes_ += live / stages * (outside * (1.0 if run.program.dropout else 0.0) + 8.0 * run.tokens)
    if part.head:  # the last norm's input and output
        bytes_ += 4.0 * outside
    return bytes_


def _buffers(run: PlannedRun, part: StageSlice, parameters: int) -> float:
    """Counts what FSDP gathers and reduces: the block in use and the next one gathered, one block's gradients before
    and after their reduction, the embedding and head gathered throughout. A pipeline adds an activation and a gradient
    that are being received."""
    layout, program, shape = run.layout, run.program, run.shape
    bytes_ = 0.0
    if layout.parameter_shards > 1 or program.always_sharded:
        block = min(run.block_parameters, program.gathered_parameters / 2)
        if run.gathers_each_microbatch:
            ends = parameters - part.layers * run.block_parameters
            bytes_ += block * (2 * program.gather_bytes + 2 * program.reduce_bytes)
            bytes_ += ends * (program.gather_bytes + program.reduce_bytes)
        else:  # gathered once a step, and the gradients whole until the last backward
            bytes_ += parameters * (program.gather_bytes + program.reduce_bytes)
    if layout.pp > 1:
        outside = run.tokens * shape.hidden / (layout.tp if layout.sequence_parallel else 1)
        bytes_ += 4 * run.item_bytes * outside
    return bytes_


def block_bytes(run: PlannedRun) -> float:
    """Returns what one block keeps of a microbatch, with the layout's recompute."""
    return _block_bytes(run) * run.item_bytes / 2


def _block_bytes(run: PlannedRun) -> float:
    recompute: str = run.layout.recompute
    if recompute == "op":
        return _kept_operators_bytes(run)
    if recompute in ("full", "every_n"):
        share = 1.0 if recompute == "full" else 1 / run.layout.recompute_every
        return share * _input_bytes(run) + (1 - share) * _whole_bytes(run)
    return _whole_bytes(run)


def whole_block_bytes(run: PlannedRun) -> float:
    """Returns what one block keeps where no block is recomputed: also what is alive while one is."""
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
    return (5.0 if program.dropout else 2.0) * rows * run.seq_len


def _kept_operators_bytes(run: PlannedRun) -> float:
    """Counts what torchtitan's per-operator recompute keeps: the block's input, attention's output, and every second
    matmul's output (Liang et al. 2024, arXiv 2410.06511; torchtitan/parallelisms/parallelize_llama.py)."""
    shape, tp = run.shape, run.layout.tp
    # Every second one of wq, wk, wv, wo, w1, w3, w2 is kept: k, the projection's output, one of the MLP's inputs.
    kept = 2.0 * (shape.kv_hidden + shape.ffn_hidden) / tp
    return _input_bytes(run) * 2.0 + run.tokens * (kept + 2.0 * shape.hidden / tp) + 4.0 * shape.heads / tp * run.tokens
