"""Activation checkpointing (Chen et al. 2016, arXiv 1604.06174).

A region saves only its inputs, and computes its activations again in the backward pass. Routers of
experts do not choose again: the region keeps their choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel3d.watch.step_clock import timed

# (choices of the routers in the checkpointed region, their iterator while it is recomputed)
_region: ContextVar[tuple[list[Tensor], Iterator[Tensor] | None] | None] = ContextVar(
    "region", default=None
)


def recomputed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function whose activations the backward pass computes again.

    No generator state is restored, because dropout depends only on its key.
    """
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=_contexts,
        **kwargs,
    )


def kept(choose: Callable[[], Tensor]) -> Tensor:
    """Returns `choose()`, or in a recomputed region what it returned in the forward pass."""
    choices, again = _region.get() or ([], None)
    if again is not None:
        return next(again)
    choices.append(choose())
    return choices[-1]


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of the forward pass and of the recomputation.

    The selective checkpointing of torch could save the choices, but fails if `fully_shard` wraps a
    module in the region (torch 2.13).
    """
    choices: list[Tensor] = []

    @contextmanager
    def forward_pass() -> Iterator[None]:
        token = _region.set((choices, None))
        try:
            yield
        finally:
            _region.reset(token)

    @contextmanager
    def recomputation() -> Iterator[None]:
        token = _region.set((choices, iter(choices)))
        try:
            with timed("recompute"):
                yield
        finally:
            _region.reset(token)

    return forward_pass(), recomputation()
