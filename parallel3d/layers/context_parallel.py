"""Attention of a context-parallel rank: its own queries see the keys of the full sequence.

Each rank all-gathers the keys and values of its sequence and attends from its own queries, so the
softmax of a query is computed on one rank, and nothing is merged.

Shapes: B batch, S sequence, s = S / cp tokens of a rank, H query heads and G key/value heads of one
tp rank, K head dim.

Communication of a layer and microbatch: keys and values are all-gathered in the forward pass and
again in the backward pass, and their gradients are reduce-scattered. A rank sends
3 (cp - 1) B s 2 G K numbers.

[Note: freed keys] Gathered keys and values do not stay in memory between the passes. After the
forward pass their storage is emptied. Kernels have saved views of it, so it is filled again when
the gradient of the output arrives. If the attention or its block is recomputed, nothing is saved,
and the recomputation gathers them again.

Ring attention or an all-to-all over heads (Ulysses) would replace `attend_to_sequence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from parallel3d.layers.collectives import gather, reduce_scatter
from parallel3d.layers.fused_attention import Segments, attend_by_varlen
from parallel3d.layers.positions import PackedDocuments
from parallel3d.layers.sequence import QUERY_BLOCK, SequencePart
from parallel3d.torch_private import is_in_backward

# Attention of a block of queries: (q, k, v, rows of the batch, positions of q and of k) -> y.
AttendBlock = Callable[[Tensor, Tensor, Tensor, slice, range, range], Tensor]


class Gathered:
    """Keys and values [B, S, 2, G, K] of full sequences, whose memory can be freed and refilled.

    Args:
        own: Keys and values [B, s, 2, G, K] of this rank.
        part: Part of the sequences that this rank holds.
    """

    def __init__(self, own: Tensor, part: SequencePart) -> None:
        self._own = own
        self._part = part
        self.full = gather_sequence(own, part)
        self._bytes = self.full.untyped_storage().nbytes()

    def free(self) -> None:
        self.full.untyped_storage().resize_(0)

    def refill(self) -> None:
        self.full.untyped_storage().resize_(self._bytes)
        # `data`, because kernels have saved this version of the tensor.
        gather_sequence(self._own, self._part, out=self.full.data)


def gather_sequence(own: Tensor, part: SequencePart, out: Tensor | None = None) -> Tensor:
    """Returns full sequences [B, S, ...] from the part [B, s, ...] of each rank."""
    by_rank = gather(own.unsqueeze(0), part.axis, dim=0)
    return part.joined(by_rank.unbind(), 1, out=out)


class _GatherSequence(Function):
    """All-gathers keys and values. The backward pass reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: SequencePart, held: list[Gathered] | None) -> Tensor:
        ctx.part = part
        ctx.held = held
        if held is None:
            return gather_sequence(own, part)
        held.append(Gathered(own.contiguous(), part))
        full = held[0].full
        return full.view_as(full)  # `Gathered` must not refer to its own autograd graph.

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.held:  # A split backward pass keeps the graph for longer.
            ctx.held[0].free()
        by_rank = torch.stack(ctx.part.split(grad, 1))
        return reduce_scatter(by_rank, ctx.part.axis, dim=0)[0], None, None


class _RefillBefore(Function):
    """Returns y. Its backward pass gathers the freed keys and values again."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gathered: Gathered) -> Tensor:
        ctx.gathered = gathered
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.gathered.refill()
        return grad, None


def attend_to_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: SequencePart,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    recomputed: bool,
) -> Tensor:
    """Computes the attention of a rank's queries to the keys of the full sequence.

    Args:
        q: Queries [B, s, H, K].
        k: Keys [B, s, G, K].
        v: Values [B, s, G, K].
        part: Part of the sequence that this rank holds.
        attend: Computes y [B, s, H, K] from q and the keys and values [B, S, G, K] of the whole
            sequence.
        recomputed: True if the backward pass computes `attend` again ([Note: freed keys]).
    """
    own = torch.stack((k, v), dim=2)
    saves = torch.is_grad_enabled() and own.requires_grad and not recomputed
    if not saves or is_in_backward():
        return attend(q, *_GatherSequence.apply(own, part, None).unbind(2))
    held: list[Gathered] = []
    y = attend(q, *_GatherSequence.apply(own, part, held).unbind(2))
    held[0].free()
    return _RefillBefore.apply(y, held[0])


def attend_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    part: SequencePart,
    documents: PackedDocuments | None,
    *,
    causal: bool,
    window: int | None,
    attend_block: AttendBlock | None,
) -> Tensor:
    """Computes attention [B, s, H, K] of a rank's queries, chunk by chunk.

    Args:
        q: Queries [B, s, H, K].
        k: Keys [B, S, G, K].
        v: Values [B, S, G, K].
        part: Part of the sequence that this rank holds.
        documents: Packed documents of the full sequences.
        causal: If True, a query sees only keys up to its own position.
        window: Largest number of keys that a query sees.
        attend_block: Computes a block of at most `QUERY_BLOCK` queries. None: the variable-length
            kernel computes a chunk at once.
    """
    seq = k.shape[1]
    results = []
    for rows, spans in _rows(documents, k.shape[0], seq):
        pieces = []
        own, keys, values = q[rows], k[rows], v[rows]
        for chunk, q_chunk in zip(part.ranges(seq), own.chunk(2, dim=1), strict=True):
            seen = list(_seen(chunk, spans, causal))
            if attend_block is None:
                # The keys of consecutive documents are adjacent.
                at = slice(seen[0][1].start, seen[-1][1].stop)
                by_query, by_key = (
                    Segments.of([len(each) for each in side], q.device)
                    for side in zip(*seen, strict=True)
                )
                y = attend_by_varlen(
                    q_chunk,
                    keys[:, at],
                    values[:, at],
                    by_query,
                    by_key,
                    causal=causal,
                    window=window,
                )
                pieces.append(y)
                continue
            for queries, visible in seen:
                for block, near in _blocks(queries, visible, causal, window):
                    q_block = q_chunk[:, block.start - chunk.start : block.stop - chunk.start]
                    at = slice(near.start, near.stop)
                    seen_by_block = keys[:, at], values[:, at], rows, block, near
                    pieces.append(attend_block(q_block, *seen_by_block))
        results.append(torch.cat(pieces, dim=1))
    return torch.cat(results) if len(results) > 1 else results[0]


def _rows(
    documents: PackedDocuments | None, batch: int, seq: int
) -> Iterator[tuple[slice, list[range]]]:
    """Yields each row of the batch with the ranges of its documents.

    The keys of several rows up to a position are not adjacent in memory, so kernels would copy and
    keep them.
    """
    lengths = [seq] * batch if documents is None else documents.lengths
    spans: list[list[range]] = [[] for _ in range(batch)]
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        row, first = divmod(end - length, seq)
        spans[row].append(range(first, first + length))
    for row, own in enumerate(spans):
        yield slice(row, row + 1), own


def _seen(chunk: range, documents: Sequence[range], causal: bool) -> Iterator[tuple[range, range]]:
    """Yields the queries of a chunk in each document, with the keys that they may see."""
    for document in documents:
        queries = range(max(chunk.start, document.start), min(chunk.stop, document.stop))
        if queries:
            yield queries, range(document.start, queries.stop if causal else document.stop)


def _blocks(
    queries: range, keys: range, causal: bool, window: int | None
) -> Iterator[tuple[range, range]]:
    """Yields blocks of the queries, each with the keys within its window."""
    for first in range(queries.start, queries.stop, QUERY_BLOCK):
        block = range(first, min(first + QUERY_BLOCK, queries.stop))
        start, stop = keys.start, keys.stop
        if window is not None:
            start = max(start, block.start - window + 1)
            stop = min(stop, block.stop + window - 1)
        yield block, range(start, min(stop, block.stop) if causal else stop)
