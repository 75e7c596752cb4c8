"""What a transformer block holds while it computes, for one microbatch on one tp rank: upper bounds
in closed form of the bytes alive in its forward and in both halves of its backward.

All of them are bytes beside the block's whole activations (`BlockActivations.bytes`), as if the
block at work kept all that it ever keeps: of a block that is recomputed this is so in its backward,
and little is missing in its forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from parallel3d.config.attention_kernels import (
    AttentionCall,
    AttentionDevice,
    AttentionKernel,
    attention_kernel,
)
from parallel3d.planner.memory.activations import BlockActivations
from parallel3d.planner.model.parameters import block_tables
from parallel3d.planner.model.planned_run import PlannedRun

# What a backward does with the gradient of a product's weight: it keeps it until the block is done,
# drops it when it has been added up or stepped with, or leaves it for the second half of the
# backward.
WeightGradients = Literal["kept", "dropped", "later"]


@dataclass(frozen=True, kw_only=True)
class BlockTensors:
    """Bytes of a block's tensors on this rank."""

    hidden_local: int  # what blocks hand on, [tokens, hidden], over tp with sequence parallelism
    gathered: int  # the whole sequence where sequence parallelism gathers it; 0 without
    copied: int  # its copy in order, made where a batch has several sequences
    ffn: int  # the MLP's inner features
    queries: int
    keys: int  # as large as the values
    # the same as attention's kernel takes them, which may be once for each query head
    attended_keys: int
    # what attention keeps, unless recomputed, beside queries, keys, values and output
    attention_own: int
    # what a forward makes of scores beside those kept, where a kernel writes them out
    scores_forward: int
    scores_again: int  # the same in a backward, where attention is recomputed
    scores_backward: int
    norm: int  # what a norm keeps of its forward, its output aside
    head_norms: int  # what the norms of queries and keys keep; 0 without
    gates: int  # 1 for an MLP with a gate, else 0
    mask: int  # of dropout between the layers; 0 without
    attention_weights: int  # gradients of the products' weights, as the products make them
    up_weights: int
    down_weight: int
    kept: int  # between forward and backward where nothing is recomputed

    @property
    def hidden_full(self) -> int:
        """The hidden features of all tokens of the microbatch."""
        return self.gathered or self.hidden_local

    @property
    def products(self) -> int:
        """Gradients of all weights of products."""
        return self.attention_weights + self.up_weights + self.down_weight

    @property
    def mlp_kept(self) -> int:
        """What the MLP keeps, its norm's part included."""
        return self.norm + self.hidden_local + (2 + 2 * self.gates) * self.ffn

    @property
    def input_gradient(self) -> int:
        """The gradient of a column-parallel product's input, beside that input, gathered again,
        where it lies along the sequence: the gradient is summed over tp and cut."""
        if self.gathered:
            return 2 * self.gathered + self.copied + self.hidden_local
        return self.hidden_local

    @property
    def delayed(self) -> int:
        """What is left between the two halves of a split backward: inputs and output gradients of
        all products."""
        return 4 * self.hidden_full + (2 + self.gates) * self.ffn + 2 * self.queries + 2 * self.keys

    def forward(self, *, is_recomputed: bool = False) -> int:
        """Bytes made beside the activations in a forward, less what a recomputed block has dropped
        of its attention: the output of the MLP's last product before and after it is summed over
        tp, or dropout's mask, which is drawn from 24 bytes a number."""
        made = max(
            self.hidden_full + self.hidden_local + self.copied, self.hidden_local + 25 * self.mask
        )
        dropped = (
            self.norm
            + self.head_norms
            + 2 * self.queries
            + 2 * self.keys
            + self.attention_own
            + self.mask
        )
        return max(made - is_recomputed * dropped, self.scores_forward - self.mlp_kept)

    def backward(self, weights: WeightGradients, *, is_recomputed: bool) -> int:
        """Bytes made in a backward beside the gradient of the block's output, with those that are
        left of the block's whole activations."""
        f = self.ffn
        mlp_kept = self.mlp_kept
        dropped = self.hidden_local * (self.mask > 0)
        least = max(2 * dropped, (self.forward() + dropped) * is_recomputed)
        if weights == "later":
            products = self.gathered + (2 + self.gates) * f + dropped
            ends = self.delayed - self.kept + self.hidden_local
            # Attention's own comes when the MLP waits for its second half.
            waits = 2 * self.hidden_full + (2 + self.gates) * f - mlp_kept
            scores = (
                max(
                    self.scores_backward + 2 * self.queries + 2 * self.attended_keys,
                    self.scores_again,
                )
                + waits
            )
            return max(
                least,
                products,
                self.gathered + f + self.input_gradient,
                ends + self.input_gradient,
                scores,
            )
        down = self.down_weight
        up = self.up_weights
        is_kept = weights == "kept"
        mlp = (
            # the last product
            max(self.gathered + f + down + dropped, self.gathered + self.copied),
            2 * f * self.gates + down * is_kept,  # the activation
            self.input_gradient - (1 + self.gates) * f + up + down * is_kept,  # the first products
        )
        inside = max(
            2 * self.queries + 2 * self.attended_keys + self.scores_backward, self.scores_again
        )
        attention = max(self.gathered + self.queries, inside, self.input_gradient) + dropped
        return max(
            least, *mlp, attention + self.attention_weights - mlp_kept + (down + up) * is_kept
        )


# Compute capabilities by the family of a hardware file; any other GPU is taken for an A100, as all
# later ones keep as much of attention.
_CAPABILITIES = {"volta": (7, 0), "hopper": (9, 0)}


def planned_attention(run: PlannedRun) -> AttentionKernel:
    """Returns the kernel of the attention of a planned run; windows are taken for whole
    sequences."""
    device = run.cluster.device
    shape = run.shape
    call = AttentionCall(
        item_bytes=int(run.item_bytes),
        is_bf16=run.precision.startswith("bf16"),
        head_dim=shape.head_dim,
        is_grouped=max(shape.kv_heads // run.layout.tp, 1) != shape.heads // run.layout.tp,
        has_documents=run.optimizer.has_documents,
        has_dropout=run.optimizer.has_attention_dropout,
    )
    of = AttentionDevice(
        "cpu" if run.on_cpu else "cuda", capability=_CAPABILITIES.get(device.family, (8, 0))
    )
    return attention_kernel(call, of)


def block_tensors(run: PlannedRun) -> BlockTensors:
    layout = run.layout
    activations = BlockActivations(
        shape=run.shape,
        batch=layout.microbatch_size,
        seq=run.seq_len,
        item_bytes=int(run.item_bytes),
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        fused_norm=not run.on_cpu,
        dropout=run.optimizer.has_dropout,
        attention=planned_attention(run),
    )
    return _block_tensors(activations, layout.recompute == "selective")


@lru_cache(maxsize=4096)
def _block_tensors(block: BlockActivations, is_selective: bool) -> BlockTensors:
    shape = block.shape
    item = block.item_bytes
    tp = block.tp
    hidden = shape.hidden
    kernel = block.attention
    tokens = block.batch * block.seq
    outside = block.outside
    is_gathered = block.sequence_parallel and tp > 1
    query, key, output, up, down = block_tables(shape, tp)[:5]
    queries = item * tokens * shape.query_hidden // tp
    keys = item * tokens * block.groups * shape.head_dim
    scores = tokens * block.seq * shape.heads // tp
    return BlockTensors(
        hidden_local=item * outside * hidden,
        gathered=item * tokens * hidden * is_gathered,
        copied=item * tokens * hidden * (is_gathered and block.batch > 1),
        ffn=item * tokens * shape.ffn_hidden // tp,
        queries=queries,
        keys=keys,
        attended_keys=queries if kernel.repeats_heads else keys,
        attention_own=block.bytes() - block.bytes("selective"),
        scores_forward=scores * kernel.forward_bytes,
        scores_again=scores * kernel.forward_bytes * is_selective,
        scores_backward=scores * kernel.backward_bytes,
        norm=outside * block.norm_bytes(hidden),
        head_norms=tokens * block.head_norm_bytes,
        gates=int(shape.is_gated),
        mask=outside * hidden if block.dropout else 0,
        attention_weights=item * (query.numel + key.numel + output.numel),
        up_weights=item * up.numel,
        down_weight=item * down.numel,
        kept=block.bytes(),
    )
