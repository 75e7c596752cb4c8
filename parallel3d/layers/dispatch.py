"""Sends tokens to the ranks that hold their experts, and the results back.

The rows of a rank are its tokens, once for each of a token's experts. They are sorted by expert,
then by token. An all-to-all with parts of different sizes takes them to their experts, which see
them in the order of ranks and tokens. The way back is the reverse. Sums over a token's experts have
a fixed order, without atomic additions, so results do not depend on timing.

A rank without rows still takes part in every exchange. With one rank, nothing is sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from parallel3d.layers.collectives import all_to_all, outside_graph
from parallel3d.layers.router import load_of
from parallel3d.mesh import Axis
from parallel3d.watch.step_clock import timed_as


class Route(NamedTuple):
    """Way of a rank's rows to their experts and back."""

    order: Tensor  # [rows] Row of the token-major order for each row sorted by expert.
    counts: Tensor  # [own experts] Rows that each expert of this rank computes.
    arrival: (
        Tensor | None
    )  # [received rows] Order by expert of the rows that arrived. None: sorted.
    sent: list[int]  # Rows sent to each rank.
    received: list[int]  # Rows received from each rank.


def route(chosen: Tensor, experts: int, axis: Axis) -> Route:
    """Returns the route of the rows of `chosen` [tokens, per_token], experts by index.

    `experts` is their number over all ranks of `axis`. Exchanges the numbers of rows.
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = load_of(chosen, experts)
    if axis.size == 1:
        return Route(order, counts, None, [], [])
    by_rank = counts.view(axis.size, -1)
    arriving = all_to_all(by_rank, replace(axis, cause="ep"))  # [ranks, own experts]
    sent, received = torch.stack((by_rank.sum(1), arriving.sum(1))).tolist()
    own = torch.arange(arriving.shape[1], device=flat.device).expand_as(arriving)
    expert_of = own.flatten().repeat_interleave(arriving.flatten())
    return Route(
        order,
        counts=arriving.sum(0),
        arrival=expert_of.argsort(stable=True),
        sent=sent,
        received=received,
    )


def dispatch(x: Tensor, per_token: int, way: Route, axis: Axis) -> Tensor:
    """Returns the rows [received rows, hidden] for this rank's experts, sorted by expert.

    x is [tokens, hidden].
    """
    rows: Tensor = outside_graph(_Spread.apply, x, per_token, way.order)
    if way.arrival is None:
        return rows
    arrived = outside_graph(_Exchange.apply, rows, way.sent, way.received, axis)
    return permuted(arrived, way.arrival)


def combine(y: Tensor, weights: Tensor, way: Route, axis: Axis) -> Tensor:
    """Returns the weighted sums [tokens, hidden] of the results of each token's experts.

    y holds the results of this rank's experts, in the order of `dispatch`. `weights` is [tokens,
    per_token].
    """
    if way.arrival is not None:
        back = permuted(y, inverse(way.arrival))
        y = outside_graph(_Exchange.apply, back, way.received, way.sent, axis)
    total: Tensor = outside_graph(_Sum.apply, y, weights.to(y.dtype), way.order)
    return total


def inverse(order: Tensor) -> Tensor:
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order), device=order.device)
    return found


def permuted(x: Tensor, order: Tensor) -> Tensor:
    """Returns x[order] for a permutation of the rows."""
    y: Tensor = outside_graph(_Permute.apply, x, order)
    return y


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, inverse(order)), None


class _Spread(Function):
    """Repeats each token for its experts. The backward pass sums over them in order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, per_token: int, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.per_token = per_token
        return x.index_select(0, order // per_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        by_token = grad.index_select(0, inverse(order)).unflatten(0, (-1, ctx.per_token))
        return by_token.sum(1), None, None


class _Sum(Function):
    """Sums the rows of each token's experts, times their weights, in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order)
        by_token = rows.index_select(0, inverse(order)).unflatten(0, weights.shape)
        return by_token.mul_(weights.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights, order = ctx.saved_tensors
        d_rows = grad.index_select(0, order // weights.shape[1])
        d_weights = (d_rows * rows).sum(-1)[inverse(order)].view_as(weights)
        d_rows *= weights.flatten()[order].unsqueeze(-1)
        return d_rows, d_weights, None


class _Exchange(Function):
    """All-to-all of rows. The backward pass sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
        ctx.way = (received, sent, axis)
        return _exchange(
            x,
            sent,
            received,
            axis,
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, *ctx.way), None, None, None


@timed_as("ep")
def _exchange(x: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=axis.group)
    return out
