"""Memory of one microbatch on a tp rank: activations that a block and the head save, and
temporaries of the largest operators."""

from __future__ import annotations

from collections.abc import Sequence
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
from parallel3d.planner.model.experts import Experts
from parallel3d.planner.model.parameters import (
    Table,
    block_tables,
    expert_tables,
    vocabulary_rows,
)
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.training.loss_chunks import tokens_at_a_time


class MicrobatchBytes:
    """Bytes of one microbatch. `chunk` is the number of tokens per chunk of logits, or None if the
    logits are not chunked. `adds_each` is True if each weight gradient is added to those of earlier
    microbatches, which exist in full, before the next one is made.

    Pairs have a value for a pass that makes weight gradients, and one for a pass that delays them,
    so that inputs and output gradients of matmuls stay alive.
    """

    experts = (0, 0)  # Peaks of the operators of the experts, relative to `saved`.
    forward = 0  # Results of experts on their way, beyond what the block saves.

    def __init__(
        self,
        block: BlockActivations,
        recompute: Recompute,
        chunk: int | None,
        *,
        adds_each: bool,
    ) -> None:
        shape = block.shape
        item = block.item_bytes
        self.block = block
        self.adds_each = adds_each
        # Features of all tokens, and the output of a block.
        self.full = item * block.tokens * shape.hidden
        self.hidden = item * block.outside * shape.hidden
        # A block saves `saved` bytes, or `kept` if it is recomputed.
        self.saved = block.bytes()
        self.kept = block.bytes("full" if recompute == "every_n" else recompute)
        # Input gradient of a column-parallel matmul. With sequence parallelism it is full until
        # its reduce-scatter, and the input is all-gathered again.
        self.input_gradient = self.hidden
        if block.sequence_parallel and block.tp > 1:
            self.input_gradient += 3 * self.full
        # Gathered keys and values, their gradients and a copy of these in the order of ranks. A
        # recomputed block gathers keys and values before the backward pass of its MLP.
        scores = block.tokens * block.keys * shape.heads // block.tp
        self.attention = scores * block.attention.forward_bytes + 3 * block.gathered
        self.again = block.gathered * (recompute in ("full", "every_n"))
        if shape.experts and block.rows:
            self._add_experts(shape.experts)
        else:
            self._add_mlp()
        self._add_head(chunk)

    def _add_mlp(self) -> None:
        """Sets the bytes between the halves of a pass, and the peaks of a block with an MLP."""
        block = self.block
        shape = block.shape
        tp = block.tp
        ffn = block.item_bytes * block.tokens * shape.ffn_hidden // tp
        inputs = shape.feed_forward_inputs
        freed = 2 * inputs * ffn
        if shape.saved:  # A GELU of separate operators needs as much as another input.
            inputs = max(shape.saved.ffn // 2, 1)
            freed = inputs * ffn
        # Ranks of cp free their own keys and values after the pass.
        self.halved = block.gathered // block.cp + block.bytes("selective")
        self.halved += 4 * (self.full - self.hidden) - (inputs - 1) * ffn
        tables = block_tables(shape, tp, dense=True)
        up, down = self._gradients(tables[3:5])
        dropout = 16 * block.dropout * self.hidden  # Temporaries of a dropout mask.
        mlp = self.full + inputs * ffn + self.again
        gradients = self.input_gradient + up + down
        attention = self.input_gradient + self.attention
        made = max(
            mlp + down,
            gradients - inputs * ffn,
            gradients + self.attention - freed,
            self.hidden + self.input_gradient + sum(self._gradients(tables)) - self.saved,
            dropout,
        )
        delayed = max(mlp, attention - (inputs - 1) * ffn + self.full, dropout)
        self.operators = (self.hidden + made, self.hidden + delayed)

    def _add_experts(self, experts: Experts) -> None:
        """Sets the bytes between the halves of a pass, and the peaks of a block with experts."""
        block = self.block
        shape = block.shape
        item = block.item_bytes
        inputs = shape.feed_forward_inputs
        rows = item * block.rows * shape.hidden
        results = item * block.choices * shape.hidden
        inner = item * block.rows * experts.hidden
        shared = item * block.tokens * experts.shared_hidden // block.tp
        self.forward = rows if block.ep == 1 else 2 * rows + results
        self.halved = self.hidden + block.outside * block.norm_bytes(shape.hidden)
        self.halved += block.tokens * block.attention_bytes("selective")
        self.halved += 2 * (self.full - self.hidden) + 2 * rows + 3 * inner
        if shared:
            self.halved += 2 * self.full + 3 * shared
        others = sum(self._gradients(block_tables(shape, block.tp)))
        rest = self.hidden + self.input_gradient + self.attention - results
        self.operators = (rest - inputs * inner + others, rest + rows - inner + self.full)
        up, down = self._gradients(expert_tables(shape, block.ep))
        exchange = self.hidden + 2 * results + self.again
        last_matmul = self.hidden + rows + 3 * inner - results + self.again
        first_matmuls = self.hidden + 3 * rows - inputs * inner - results
        self.experts = (
            max(exchange, last_matmul + down, first_matmuls + up + down),
            max(exchange, last_matmul, first_matmuls + rows + inner),
        )

    def _gradients(self, tables: Sequence[Table]) -> list[int]:
        """Returns the bytes of the gradients of parameters. If each is added to another, only the
        largest counts, in place of the last one. The matmul itself adds float32 gradients."""
        item = self.block.item_bytes
        if not self.adds_each:
            return [item * table.numel for table in tables]
        largest = max(table.numel // table.times for table in tables)
        return [0] * (len(tables) - 1) + [item * largest * (item < 4)]

    def _add_head(self, chunk: int | None) -> None:
        """Sets the bytes of the last norm, the head and the loss, and those of the embedding."""
        block = self.block
        shape = block.shape
        item = block.item_bytes
        rows = vocabulary_rows(shape, block.tp)
        if shape.saved and shape.vocab % block.tp:
            rows = shape.vocab  # The logits are all-gathered.
        logits = (chunk or block.tokens) * rows
        self.logits = item * logits
        # The softmax is float32. With chunks, so are the logits and the head's weight gradient.
        self.loss = 4 * logits
        if chunk:
            self.logits = 0
            self.loss = self.full + 6 * logits + 4 * rows * shape.hidden
        if shape.saved:
            # The head computes all logits. The loss casts them, and has their gradient.
            logits = item * block.tokens * rows
            cast = 4 * logits // item * (item < 4)
            table = item * rows * shape.hidden
            self.loss = max(logits + cast, self.input_gradient + table)
            self.logits = logits * shape.saved.logits
        # The last norm and the head save their inputs and the logits.
        self.saved_by_head = block.outside * block.norm_bytes(shape.hidden)
        self.saved_by_head += self.full + self.logits
        # Gradients of table rows are summed in float32.
        self.embedding = self.full if item == 4 else 5 * self.full


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
        adds_each=layout.strategy in REPLICATED and not shape.saved,
    )


_microbatch_bytes = lru_cache(maxsize=4096)(MicrobatchBytes)
