"""Counts what collectives send, at torch's own c10d operators: for benchmarks and tests that compare with a formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class WireBytes(TorchDispatchMode):
    """While it is entered, `by_group` adds up what this rank's collectives send on each group, named by its global
    ranks, as the usual algorithms do it (ring all-reduce, direct all-to-all). Tensors that go through the memory of
    one host are no collectives of torch's, and not counted. Raises NotImplementedError at one that it does not know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_group: Counter[tuple[int, ...]] = Counter()

    def between(self, ranks: tuple[int, ...]) -> int:
        """Bytes that this rank has sent on all groups of just these ranks."""
        return self.by_group[ranks]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            group, size = _call_of(func, args)
            if group is not None:
                self.by_group[tuple(dist.get_process_group_ranks(group))] += round(size)
        return func(*args, **(kwargs or {}))


# Operator -> bytes that one of n ranks sends, of the tensors in its first and second argument.
_SENT: dict[str, Callable[[list[Tensor], list[Tensor], int], float]] = {
    "allreduce_": lambda tensors, _, n: 2 * (n - 1) / n * _nbytes(tensors),
    "allreduce_coalesced_": lambda tensors, _, n: 2 * (n - 1) / n * _nbytes(tensors),
    "broadcast_": lambda tensors, _, n: (n - 1) / n * _nbytes(tensors),  # a rank's share of what all send
    "alltoall_base_": lambda _, inputs, n: (n - 1) / n * _nbytes(inputs),
    "allgather_": lambda _, inputs, n: (n - 1) * _nbytes(inputs),
    "_allgather_base_": lambda _, inputs, n: (n - 1) * _nbytes(inputs),
    "allgather_into_tensor_coalesced_": lambda _, inputs, n: (n - 1) * _nbytes(inputs),
    "_reduce_scatter_base_": lambda _, inputs, n: (n - 1) / n * _nbytes(inputs),
    "reduce_scatter_tensor_coalesced_": lambda _, inputs, n: (n - 1) / n * _nbytes(inputs),
    "send": lambda tensors, _, n: _nbytes(tensors),
    "recv_": lambda *_: 0,
    "recv_any_source_": lambda *_: 0,
    "barrier": lambda *_: 0,
}


def _call_of(func: Any, args: tuple[Any, ...]) -> tuple[dist.ProcessGroup | None, float]:
    name = func._schema.name.removeprefix("c10d::")
    if name == "monitored_barrier_":
        return None, 0
    if name not in _SENT:
        raise NotImplementedError(f"c10d.{name}: nothing is known of what it sends")
    position = next(i for i, argument in enumerate(func._schema.arguments) if argument.name == "process_group")
    group = dist.ProcessGroup.unbox(args[position])
    first, second = (_tensors(args[i]) if i < len(args) else [] for i in (0, 1))
    return group, _SENT[name](first, second, group.size())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
