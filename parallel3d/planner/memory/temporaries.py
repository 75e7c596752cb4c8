"""Memory of one microbatch on a tp rank: activations that a block and the head save, and
temporaries of the largest operators."""

from __future__ import annotations

from functools import lru_cache

from parallel3d.config.attention_kernels import (
    AttentionCall,
    AttentionDevice,
    attention_kernel,
)
from parallel3d.config.recipe import Recompute
from parallel3d.planner.memory.activations import BlockActivations
from parallel3d.planner.model.parameters import block_tables, vocabulary_rows
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.training.loss_chunks import tokens_at_a_time


class MicrobatchBytes:
    """Bytes of one microbatch. `chunk` is the number of tokens per chunk of logits, or None if the
    logits are not chunked."""

    def __init__(
        self,
        block: BlockActivations,
        recompute: Recompute,
        chunk: int | None,
    ) -> None:
        shape = block.shape
        item = block.item_bytes
        tp = block.tp
        tokens = block.tokens
        full = item * tokens * shape.hidden
        ffn = item * tokens * shape.ffn_hidden // tp
        inputs = shape.feed_forward_inputs
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
        up, down = (item * table.numel for table in block_tables(shape, tp)[3:5])
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
        # The last norm and the head save their inputs and the logits.
        rows = vocabulary_rows(shape, tp)
        logits = (chunk or tokens) * rows
        table = item * rows * shape.hidden
        self.logits = 0 if chunk else item * logits
        self.saved_by_head = norm + full + self.logits
        self.embedding = 5 * full + table  # Gradients of table rows are summed in float32.
        # The softmax is float32. With chunks, so are the logits and the head's weight gradient.
        self.loss = max(4 * logits, input_gradient + table)
        if chunk:
            self.loss = max(full + 6 * logits, input_gradient) + 4 * rows * shape.hidden


# Compute capability, keyed by the family of a device. Other families use that of the A100, because
# attention saves the same tensors on later GPUs.
_CAPABILITIES = {"volta": (7, 0), "hopper": (9, 0)}


def microbatch_bytes(run: PlannedRun) -> MicrobatchBytes:
    """Returns the memory of one microbatch of a planned run. Windowed attention counts as full
    attention."""
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
    kind = "cpu" if run.on_cpu else "cuda"
    on = AttentionDevice(kind, capability=_CAPABILITIES.get(device.family, (8, 0)))
    block = BlockActivations(
        shape=shape,
        batch=layout.microbatch_size,
        seq=run.seq_len,
        item_bytes=int(run.item_bytes),
        cp=layout.cp,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        fused_norm=not run.on_cpu,
        dropout=run.optimizer.has_dropout,
        attention=attention_kernel(call, on),
    )
    chunk = tokens_at_a_time(
        run.optimizer.loss_chunk_tokens,
        tokens=run.tokens,
        vocab=shape.vocab,
        tp=layout.tp,
        gpu_bytes=device.gpu_bytes,
    )
    return _microbatch_bytes(block, layout.recompute, chunk)


_microbatch_bytes = lru_cache(maxsize=4096)(MicrobatchBytes)
