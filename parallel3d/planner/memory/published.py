"""The memory of published frameworks, which are not parallel3d: what each keeps, by products of a few
numbers.

Activations are what the backward needs of the forward. Korthikanti et al. 2022 (arXiv 2205.05198,
section 4.1), taken apart so that it holds for a tiled attention, SwiGLU, grouped keys and values,
and norms that keep float32 copies. Per block, t tokens of a microbatch, 16-bit activations:

    outside tp     2 norms' inputs, 2 linear inputs (q/k/v; gate and up), 2 dropout masks         t h (8 + 2), / tp with
                                                                                                   sequence parallelism
    inside tp      q, k, v; the output projection's input; the activation's input(s) and output   t (...) / tp
    softmax        its output, dropout's mask and output: 5 bytes a score                          5 a s t / tp
"""  # noqa: E501

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.parameters import rank_numel
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.schedules.build import live_microbatches

# Set on the runs of tools/cases:
_NORM_COPIES = 4.0  # bytes of float32 copies of norms, per element of [tokens, hidden]
_ROPE_COPIES = 1.0  # rotated q and k that are kept beside what was rotated
_STEP_BYTES = 2.0  # temporaries of the optimizer's step, per parameter of its shard


def published_memory(run: PlannedRun, rank: int) -> RankMemory:
    """Returns what a pipeline rank of a published framework holds."""
    layout = run.layout
    framework = run.framework
    part = run.ranks[rank]
    parameters = _rank_parameters(run.shape, part, layout.tp, run.rank_vocab)
    experts = run.stage_experts(part)

    def split(shards: int) -> float:
        """Returns the numbers that a rank has if so many ranks share what they have in common."""
        return parameters / shards + experts / layout.expert_shards(shards)

    own = split(layout.optimizer_shards)
    activations = _activations(run, rank)
    logits = 0.0
    if part.head:
        logits = framework.logit_bytes * run.tokens * run.rank_vocab
    buffers = _buffers(run, part, parameters)
    one_block = 0.0
    if layout.recompute in ("full", "every_n", "op"):
        one_block = _whole_block_bytes(run, is_selective=False) - logits
    # A block under recompute and the logits are not alive at once, nor is the optimizer's step
    # beside either. Beside the latter there are no buffers either: they are free, in pieces that
    # the allocator keeps.
    step = _STEP_BYTES * own - activations - logits
    temporary = max(one_block, step - buffers, 0.0)
    at_most = max(one_block, step, 0.0)
    reserved = framework.fragmentation * (activations + logits + buffers + at_most)
    return RankMemory(
        rank=rank,
        parameters=framework.weight_bytes * split(layout.parameter_shards),
        gradients=framework.gradient_bytes * split(layout.gradient_shards),
        optimizer=framework.optimizer_bytes * own,
        activations=activations,
        logits=logits,
        buffers=buffers,
        temporary=temporary,
        fragmentation=reserved + framework.cache_bytes + at_most - temporary,
        context=framework.context_bytes,
    )


def _activations(run: PlannedRun, rank: int) -> float:
    part = run.ranks[rank]
    live = _live_on(run, rank) / run.layout.virtual_stages
    bytes_ = live * part.layers * _kept_bytes(run)
    if part.embedding:  # its output under dropout keeps a mask; ids are 8 bytes
        kept = 8.0 * run.tokens
        if run.framework.dropout:
            kept += _outside(run)
        bytes_ += live * kept
    if part.head:  # the last norm's input and output
        bytes_ += 4.0 * _outside(run)
    return bytes_


@lru_cache(maxsize=4096)
def _rank_parameters(shape: ModelShape, part: StageSlice, tp: int, vocabulary_rows: int) -> int:
    """Counts the parameters of a slice of the model on one device, experts not among them, the
    token table padded as the framework pads it."""
    padded = replace(shape, vocab=vocabulary_rows * tp)
    return rank_numel(padded, (part,), tp, repeats_kv_heads=True)


def _live_on(run: PlannedRun, rank: int) -> int:
    """Microbatches, counted for each of a rank's stages, whose activations are alive at once on a
    pipeline rank."""
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


def _buffers(run: PlannedRun, part: StageSlice, parameters: int) -> float:
    """Counts what FSDP gathers and reduces: the block in use and the next one gathered, one block's
    gradients before and after their reduction, the embedding and head gathered throughout. A
    pipeline adds an activation and a gradient that are being received."""
    layout = run.layout
    framework = run.framework
    bytes_ = 0.0
    if layout.parameter_shards > 1:
        block = run.block_parameters
        ends = parameters - run.stage_parameters(replace(part, embedding=False, head=False))
        # else no rank has another's experts at any time
        if layout.expert_shards(layout.parameter_shards) > 1:
            block += run.stage_experts(StageSlice(layers=1, embedding=False, head=False))
            parameters += run.stage_experts(part)
        # gathered once a step, and the gradients whole until the last backward
        at_once = float(parameters)
        if run.gathers_each_microbatch:
            at_once = 2 * block + ends
        bytes_ = at_once * (run.item_bytes + framework.gradient_bytes)
    if layout.pp > 1:
        bytes_ += 4 * run.item_bytes * _outside(run)
    return bytes_


def _kept_bytes(run: PlannedRun) -> float:
    """Returns what a block keeps of a microbatch until its backward pass, by recompute. The first
    layers of a mixture, which have no experts, count like the others."""
    layout = run.layout
    shape = run.shape
    inputs = _outside(run) * run.item_bytes
    whole = _whole_block_bytes(run, is_selective=layout.recompute == "selective")
    if layout.recompute in ("full", "every_n"):
        share = 1.0
        if layout.recompute != "full":
            share = 1 / layout.recompute_every
        return share * inputs + (1 - share) * whole
    if str(layout.recompute) == "op":
        # What torchtitan's per-operator recompute keeps (Liang et al. 2024, arXiv 2410.06511,
        # and its parallelisms/parallelize_llama.py): the block's input, attention's output, and
        # of wq, wk, wv, wo, w1, w3, w2 every second one's output: k, the projection's output,
        # one of the MLP's inputs.
        kept = run.tokens * (shape.kv_hidden + shape.hidden + 2.0 * shape.heads) / layout.tp
        return 2.0 * inputs + (kept + _inner(run)) * run.item_bytes
    return whole


def _whole_block_bytes(run: PlannedRun, *, is_selective: bool) -> float:
    shape = run.shape
    layout = run.layout
    framework = run.framework
    # Input of each norm, and its output, which is the linear layers' input; RMS norms of a
    # framework's own operators keep float32 copies, where layer norm is one kernel of every
    # framework.
    copies = 0.0 if shape.layer_norm else _NORM_COPIES
    masks = 2.0 if framework.dropout else 0.0
    norms = (8.0 + copies) * shape.block_norms / 2
    bytes_ = _outside(run) * (norms + masks)
    # q, k, v and the output projection's input; q and k once more where rotation does not happen in
    # place.
    kv = max(shape.kv_hidden, shape.head_dim * layout.tp)
    rotated = 0.0
    if shape.positions == "rope":
        rotated = (shape.query_hidden + kv) * _ROPE_COPIES
    features = 2.0 * shape.query_hidden + 2.0 * kv + rotated
    if (latent := shape.latent) is not None:
        narrow = latent.key_value_rank + latent.turned + (latent.query_rank or 0)
        features = 2.0 * shape.query_hidden + 2.0 * shape.heads * latent.value + rotated
        bytes_ += 4.0 * narrow * _outside(run) / shape.hidden  # before and after their norms
    # The activation's inputs and output; an unfused SwiGLU keeps silu(gate) too.
    tensors = shape.feed_forward_inputs + 1
    if shape.is_gated and not framework.fused_mlp:
        tensors += 1
    inner = tensors * _inner(run)
    if shape.experts is not None:  # what was sent to the experts, and in their order
        inner += 2.0 * run.routed_rows * shape.hidden
    # A tiled attention keeps a float32 per row; another keeps the scores, unless they are
    # recomputed.
    score = 4.0
    if framework.attention != "flash" and not is_selective:
        score = run.seq_len * (5.0 if framework.dropout else 2.0)
    attention = run.tokens * (2.0 * features + score * shape.heads) / layout.tp
    bytes_ += attention + 2.0 * inner
    return bytes_ * run.item_bytes / 2


def _inner(run: PlannedRun) -> float:
    """Elements of the feed-forward part's features of a microbatch on a rank, of experts those of
    the rows that they compute."""
    shape = run.shape
    layout = run.layout
    experts = shape.experts
    if experts is None:
        return run.tokens * shape.ffn_hidden / layout.tp
    shared = run.tokens * experts.shared_hidden / layout.tp
    routed = run.routed_rows * experts.hidden / layout.expert_tp
    return shared + routed


def _outside(run: PlannedRun) -> float:
    """Elements of [tokens, hidden] where tp does not divide the features."""
    elements = run.tokens * run.shape.hidden
    if run.layout.sequence_parallel:
        return elements / run.layout.tp
    return float(elements)
