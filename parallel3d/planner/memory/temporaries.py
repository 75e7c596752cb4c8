"""Memory of one microbatch on a tp rank: activations that a block and the head save, and
temporaries of the largest operators."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from parallel3d.config.attention_kernels import (
    AttentionCall,
    AttentionDevice,
    attention_kernel,
)
from parallel3d.config.recipe import Recompute
from parallel3d.config.sharding_strategies import REPLICATED
from parallel3d.planner.memory.activations import BlockActivations
from parallel3d.planner.memory.foreign import ForeignBlock
from parallel3d.planner.model.parameters import block_tables, expert_tables, vocabulary_rows
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.training.loss_chunks import tokens_at_a_time


class MicrobatchBytes:
    """Bytes of one microbatch. `chunk` is the number of tokens per chunk of logits, or None if the
    logits are not chunked. `adds_in_place` is True if weight gradients of experts are added to
    those of earlier microbatches one by one."""

    def __init__(
        self,
        block: BlockActivations,
        recompute: Recompute,
        chunk: int | None,
        *,
        adds_in_place: bool,
    ) -> None:
        shape = block.shape
        item = block.item_bytes
        tp = block.tp
        tokens = block.tokens
        full = item * tokens * shape.hidden
        ffn = item * tokens * shape.ffn_hidden // tp
        inputs = shape.feed_forward_inputs
        if shape.saved:  # A GELU of separate operators needs as much as another input.
            inputs = max(shape.saved.ffn // 2, 1)
        experts = shape.experts if block.rows else None
        scores = tokens * block.keys * shape.heads // tp

        # A block saves `saved` bytes, or `kept` if it is recomputed. Its output has `hidden` bytes.
        # Between the halves of a split backward pass (`halved`), inputs and output gradients of
        # its matmuls stay alive.
        self.saved = block.bytes()
        self.kept = block.bytes("full" if recompute == "every_n" else recompute)
        self.hidden = item * block.outside * shape.hidden
        self.halved = block.bytes("selective") + 4 * (full - self.hidden) - (inputs - 1) * ffn
        # Input gradient of a column-parallel matmul. With sequence parallelism it is full until
        # its reduce-scatter, and the input is all-gathered again.
        input_gradient = self.hidden
        if block.sequence_parallel and tp > 1:
            input_gradient += 3 * full
        norm = block.outside * block.norm_bytes(shape.hidden)
        up, down = (item * table.numel for table in block_tables(shape, tp, dense=True)[3:5])
        attention = scores * block.attention.forward_bytes
        # Gathered keys and values, their gradients and a copy of these in the order of ranks. A
        # recomputed block gathers keys and values before the backward pass of its MLP.
        again = block.gathered * (recompute in ("full", "every_n"))
        attention += 3 * block.gathered
        self.backward = self.hidden + max(
            full + inputs * ffn + down + again,
            input_gradient + attention - inputs * ffn + up + down,
            16 * self.hidden * block.dropout,  # Temporaries of a dropout mask.
        )
        self.rest = self.backward  # Of the part of a block before its experts.
        self.forward = 0  # Results of experts on their way, beyond what the block saves.
        if experts is not None:
            up, down = (item * table.numel for table in expert_tables(shape, block.ep))
            if adds_in_place:
                up = max(up // inputs - down, 0)
            others = item * sum(table.numel for table in block_tables(shape, tp))
            rows = item * block.rows * shape.hidden
            results = item * block.choices * shape.hidden
            inner = item * block.rows * experts.hidden
            self.forward = rows if block.ep == 1 else 2 * rows + results
            shared = item * tokens * experts.shared_hidden // tp
            norms = self.hidden + block.outside * block.norm_bytes(shape.hidden)
            self.halved = norms + tokens * block.attention_bytes("selective")
            self.halved += 2 * (full - self.hidden) + 2 * rows + 3 * inner
            if shared:
                self.halved += 2 * full + 3 * shared
            self.rest = self.hidden + input_gradient + attention - results - inputs * inner + others
            of_experts = max(
                2 * results + again,
                rows + 3 * inner + down - results + again,
                3 * rows - inputs * inner + up + down - results,
            )
            self.backward = max(self.rest, self.hidden + of_experts)
        # The last norm and the head save their inputs and the logits.
        rows = vocabulary_rows(shape, tp)
        saved = shape.saved
        if saved and shape.vocab % tp:
            rows = shape.vocab  # The logits are all-gathered.
        logits = (chunk or tokens) * rows
        table = item * rows * shape.hidden
        self.logits = 0 if chunk else item * logits
        self.embedding = 5 * full + table  # Gradients of table rows are summed in float32.
        # The softmax is float32. With chunks, so are the logits and the head's weight gradient.
        self.loss = max(4 * logits, input_gradient + table)
        if chunk:
            self.loss = max(full + 6 * logits, input_gradient) + 4 * rows * shape.hidden
        if saved:  # The head computes all logits. The loss casts them, and has a gradient for them.
            self.logits = item * tokens * rows
            cast = 4 * logits if item < 4 else 0
            self.loss = max(self.logits + cast, input_gradient + table)
            self.logits *= saved.logits
        self.saved_by_head = norm + full + self.logits


# Compute capability, keyed by the family of a device. Other families use that of the A100, because
# attention saves the same tensors on later GPUs.
_CAPABILITIES = {"volta": (7, 0), "hopper": (9, 0)}


def microbatch_bytes(run: PlannedRun, *, dense: bool = False) -> MicrobatchBytes:
    """Returns the memory of one microbatch of a planned run. Windowed attention counts as full
    attention. `dense` selects the blocks without experts of an MoE model."""
    layout = run.layout
    shape = run.shape
    device = run.cluster.device
    call = AttentionCall(
        item_bytes=int(run.item_bytes),
        is_bf16=run.precision.startswith("bf16"),
        head_dim=shape.head_dim,
        is_grouped=max(shape.kv_heads // layout.tp, 1) != shape.heads // layout.tp,
        has_documents=run.optimizer.has_documents,
        has_dropout=run.optimizer.has_attention_dropout,
        has_chunks=layout.cp > 1,
    )
    on = AttentionDevice(
        "cpu" if run.on_cpu else "cuda",
        capability=_CAPABILITIES.get(device.family, (8, 0)),
    )
    kind_of_block = ForeignBlock if shape.saved else BlockActivations
    kernel = shape.saved.kernel if shape.saved else attention_kernel(call, on)
    block = kind_of_block(
        shape=shape,
        batch=layout.microbatch_size,
        seq=run.seq_len,
        item_bytes=int(run.item_bytes),
        cp=layout.cp,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        fused_norm=not run.on_cpu,
        dropout=run.optimizer.has_dropout,
        attention=kernel,
        ep=layout.ep,
        rows=0 if dense else ceil(run.fullest_rows),
    )
    chunk = tokens_at_a_time(
        run.optimizer.loss_chunk_tokens,
        tokens=run.tokens,
        vocab=shape.vocab,
        tp=layout.tp,
        gpu_bytes=device.gpu_bytes,
    )
    return _microbatch_bytes(
        block,
        layout.recompute,
        chunk,
        adds_in_place=layout.strategy in REPLICATED,
    )


_microbatch_bytes = lru_cache(maxsize=4096)(MicrobatchBytes)
