"""The token embedding, its rows (the vocabulary) split over tp.

[Note: uneven vocabulary] Rank r has rows r c <= id < min((r + 1) c, V) of V, where c = ceil(V / n): DTensor's own
uneven shards. So nothing is padded at rest: the parameter's global shape, the state dict and a checkpoint are those
of one device. Where equal widths are needed, the head pads its logits instead (`head`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from parallel3d.layers.collectives import all_reduce, start_gather, start_reduce_scatter
from parallel3d.layers.init import normal
from parallel3d.layers.loss import wide_dtype
from parallel3d.layers.main_grad import accumulated_gradient
from parallel3d.layers.parameter import (
    Initializer,
    ParallelModule,
    ParameterSpec,
    accumulate_or_return,
    local_tensor,
    traced,
)
from parallel3d.layers.placement import LayerTp
from parallel3d.layers.regions import reduce_from_region, reduce_scatter_from_region
from parallel3d.mesh import Axis
from parallel3d.row_split import shard_rows


class VocabParallelEmbedding(ParallelModule):
    """ids [batch, seq] -> [batch, seq, hidden], or [batch, seq / tp, hidden] with `sequence_parallel`.

    Each tp rank looks up the ids of its rows, and the sum over tp joins them: an all-reduce (or reduce-scatter)
    forward; backward nothing (or an all-gather). Megatron-LM, arXiv 1909.08053, section 3.

    tp need not divide vocab: [Note: uneven vocabulary]. An id outside the vocabulary gives zeros under tp > 1: check
    ids before they come here, as `data.loader` does. Raises ValueError where a rank would have no row at all.
    """

    weight: nn.Parameter

    def __init__(
        self,
        vocab: int,
        hidden: int,
        *,
        tp: LayerTp = None,
        init: Initializer = normal(0.02),
    ) -> None:
        super().__init__(tp)
        self.first_row = shard_rows(vocab, self.axis.rank, self.axis.size).start
        self.add_parameter("weight", ParameterSpec((vocab, hidden), 0, init, uneven=True))

    def forward(self, ids: Tensor) -> Tensor:
        if is_compiling():
            return self._traced(ids)
        y: Tensor = _VocabParallelEmbedding.apply(
            ids, self.weight, self.axis, self.first_row, self.sequence_parallel, self.fused_gradients
        )
        return y

    def _traced(self, ids: Tensor) -> Tensor:
        rows = traced(self.weight, self, "weight")
        if self.axis.size == 1:
            return F.embedding(ids, rows)
        y, _, _ = look_up(ids, rows, self.first_row)
        return reduce_scatter_from_region(y, self.axis) if self.sequence_parallel else reduce_from_region(y, self.axis)


def look_up(ids: Tensor, rows: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Looks ids [B, S] up in this rank's rows [w, D] of the vocabulary, from id `first` on. Returns [B, S, D], with
    zeros for the ids of other ranks; the ids as indices of the rows, 0 for other ranks'; and which ids are other
    ranks'."""
    own = ids - first
    elsewhere = (own < 0) | (own >= rows.shape[0])
    own = own.masked_fill(elsewhere, 0)
    return F.embedding(own, rows).masked_fill_(elsewhere.unsqueeze(-1), 0.0), own, elsewhere


class _VocabParallelEmbedding(Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, axis: Axis, first: int, sequence_parallel: bool, fused: bool
    ) -> Tensor:
        ctx.axis, ctx.sequence_parallel, ctx.fused = axis, sequence_parallel, fused
        ctx.weight = weight
        rows = local_tensor(weight)
        if axis.size == 1:
            ctx.save_for_backward(ids)
            ctx.elsewhere = None
            return F.embedding(ids, rows)
        y, own, ctx.elsewhere = look_up(ids, rows, first)
        ctx.save_for_backward(own)
        return start_reduce_scatter(y, axis).wait() if sequence_parallel else all_reduce(y, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        if ctx.sequence_parallel:
            grad = start_gather(grad, ctx.axis).wait()
        if ctx.elsewhere is not None:
            grad = grad.masked_fill(ctx.elsewhere.unsqueeze(-1), 0.0)
        return None, _accumulate_or_return_looked_up(weight, ids, grad, fused=ctx.fused), None, None, None, None


def _accumulate_or_return_looked_up(weight: Tensor, ids: Tensor, grad: Tensor, *, fused: bool) -> Tensor | None:
    """Does `accumulate_or_return` for the gradient `grad` of the rows that were looked up. It is added to those rows
    alone where there is a total already: a dense gradient of the vocabulary's size for every microbatch costs more than
    the look-up."""
    if fused and (total := accumulated_gradient(weight)) is not None:
        total.index_put_((ids,), grad.to(total.dtype), accumulate=True)  # deterministic on GPUs too
        return None
    dtype = grad.dtype if fused else wide_dtype(grad)  # rows that many tokens look up are rounded once, at the end
    dense = torch.zeros_like(local_tensor(weight), dtype=dtype)
    dense.index_put_((ids,), grad.to(dtype), accumulate=True)
    return accumulate_or_return(weight, dense.to(grad.dtype), fused=fused)
