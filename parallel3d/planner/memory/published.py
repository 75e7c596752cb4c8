"""Estimates the peak memory of frameworks other than parallel3d with a simple formula.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), extended to tiled
attention, SwiGLU, grouped-query attention, and norms that save float32 copies. Bytes per block for
the t tokens of a microbatch with 16-bit activations:

    outside tp     inputs of 2 norms, 2 linear inputs (q/k/v; gate and up), 2 dropout masks       t h (8 + 2), / tp with
                                                                                                  sequence parallelism
    inside tp      q, k, v, input of the output projection, inputs and output of the activation   t (...) / tp
    softmax        its output, dropout mask and dropped output: 5 bytes per score                 5 a s t / tp
"""  # noqa: E501

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.model.parameters import rank_numel
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import ModelShape, StageSlice
from parallel3d.schedules.build import live_microbatches

_BLOCK = StageSlice(layers=1)
# These are fitted on the runs of tools/cases.
_NORM_COPIES = 4.0  # Bytes of float32 copies in norms, per element of [tokens, hidden].
_ROPE_COPIES = 1.0  # Number of copies of q and k that RoPE saves, in addition to the originals.
_STEP_BYTES = 2.0  # Bytes of temporaries in the optimizer step, per parameter of a shard.


def published_memory(run: PlannedRun, rank: int) -> RankMemory:
    """Estimates the memory of a pipeline rank that runs a framework other than parallel3d."""
    layout = run.layout
    framework = run.framework
    part = run.ranks[rank]
    parameters = _rank_parameters(run.shape, part, layout.tp, run.rank_vocab)
    experts = run.stage_experts(part)

    def split(shards: int) -> float:
        """Returns the number of parameters per rank if they are split into `shards`."""
        return parameters / shards + experts / layout.expert_shards(shards)

    own = split(layout.optimizer_shards)
    activations = _activations(run, rank)
    logits = 0.0
    if part.head:
        logits = framework.logit_bytes * run.tokens * run.rank_vocab
    buffers = _buffers(run, part, parameters)
    one_block = 0.0
    if layout.recompute in ("full", "every_n", "op"):
        one_block = _whole_block_bytes(run) - logits
    # A recomputed block, the logits and the optimizer step's temporaries are never alive together.
    # During the optimizer step, all-gather buffers are free but too fragmented to reuse.
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
    if part.embedding:  # int64 token ids, and a dropout mask
        kept = 8.0 * run.tokens
        if run.framework.dropout:
            kept += run.outside
        bytes_ += live * kept
    if part.head:  # Input and output of the last norm.
        bytes_ += 4.0 * run.outside
    return bytes_


@lru_cache(maxsize=4096)
def _rank_parameters(shape: ModelShape, part: StageSlice, tp: int, vocabulary_rows: int) -> int:
    """Counts the parameters of a slice on a tp rank, without experts. The vocabulary is padded."""
    padded = replace(shape, vocab=vocabulary_rows * tp)
    return rank_numel(padded, (part,), tp, repeats_kv_heads=True)


def _live_on(run: PlannedRun, rank: int) -> int:
    """Returns the peak number of live (stage, microbatch) pairs on a rank."""
    layout = run.layout
    # zb-2p keeps almost twice as many to remove the bubble (arXiv 2401.10241, table 1).
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
    """Returns the bytes of all-gathered parameters, their gradients, and pipeline messages.

    If each microbatch gathers parameters, only the current and next block, the embedding and the
    head are unsharded.
    """
    layout = run.layout
    framework = run.framework
    bytes_ = 0.0
    if layout.parameter_shards > 1:
        block = run.stage_parameters(_BLOCK)
        ends = parameters - run.stage_parameters(part._replace(embedding=False, head=False))
        # Experts are all-gathered only if they are sharded.
        if layout.expert_shards(layout.parameter_shards) > 1:
            block += run.stage_experts(_BLOCK)
            parameters += run.stage_experts(part)
        # All-gathered once per step: gradients are unsharded until the last backward pass.
        at_once = float(parameters)
        if run.gathers_each_microbatch:
            at_once = 2 * block + ends
        bytes_ = at_once * (run.item_bytes + framework.gradient_bytes)
    if layout.pp > 1:
        bytes_ += 4 * run.item_bytes * run.outside
    return bytes_


def _kept_bytes(run: PlannedRun) -> float:
    """Returns the activation bytes that a block saves per microbatch by recompute mode.

    Dense first layers of an MoE model are counted like MoE layers.
    """
    layout = run.layout
    shape = run.shape
    inputs = run.outside * run.item_bytes
    whole = _whole_block_bytes(run)
    if layout.recompute in ("full", "every_n"):
        share = 1.0
        if layout.recompute != "full":
            share = 1 / layout.recompute_every
        return share * inputs + (1 - share) * whole
    if str(layout.recompute) == "op":
        # Saved tensors of torchtitan's per-operator recompute (Liang et al. 2024, arXiv 2410.06511,
        # parallelisms/parallelize_llama.py): the block's input, the attention output, and the
        # output of every second matmul.
        kept = run.tokens * (shape.kv_hidden + shape.hidden + 2.0 * shape.heads) / layout.tp
        return 2.0 * inputs + (kept + run.inner(run.fullest_rows)) * run.item_bytes
    return whole


def _whole_block_bytes(run: PlannedRun) -> float:
    shape = run.shape
    layout = run.layout
    framework = run.framework
    # Each norm saves its input, and its output as the input of a linear layer. An RMSNorm of
    # separate operators also saves float32 copies. LayerNorm is one kernel in all frameworks.
    copies = 0.0 if shape.layer_norm else _NORM_COPIES
    masks = 2.0 if framework.dropout else 0.0
    norms = (8.0 + copies) * shape.block_norms / 2
    bytes_ = run.outside * (norms + masks)
    # q, k, v and the input of the output projection. q and k count twice unless RoPE is applied in
    # place.
    kv = max(shape.kv_hidden, shape.head_dim * layout.tp)
    values = kv
    rotated = 0.0
    if shape.positions == "rope":
        rotated = (shape.query_hidden + kv) * _ROPE_COPIES
    if (latent := shape.latent) is not None:
        narrow = latent.key_value_rank + latent.turned + (latent.query_rank or 0)
        values = shape.heads * latent.value
        # inputs and outputs of the latent norms
        bytes_ += 4.0 * narrow * run.outside / shape.hidden
    features = 2.0 * shape.query_hidden + 2.0 * values + rotated
    # Inputs and output of the activation. An unfused SwiGLU also saves silu(gate).
    tensors = shape.feed_forward_inputs + 1
    if shape.is_gated and not framework.fused_mlp:
        tensors += 1
    inner = tensors * run.inner(run.fullest_rows)
    if shape.experts is not None:  # Tokens that the experts received, before and after sorting.
        inner += 2.0 * run.fullest_rows * shape.hidden
    # A tiled kernel saves one float32 per query and head. Others save the scores, or recompute.
    score = 4.0
    if framework.attention != "flash" and layout.recompute != "selective":
        score = run.seq_len * (5.0 if framework.dropout else 2.0)
    attention = run.tokens * (2.0 * features + score * shape.heads) / layout.tp
    bytes_ += attention + 2.0 * inner
    return bytes_ * run.item_bytes / 2
