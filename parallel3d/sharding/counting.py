"""Counts what is sent: every collective that a block of code starts, by axis and kind.

    with CollectiveCounter(mesh) as sent:
        trainer.train_step(batch)
    sent.bytes["dp_shard", "all_gather"]

The bytes are those that a rank sends in ring algorithms (`sharding.bytes`). Small tensors that processes of one host
exchange through shared memory are no collectives and are not counted, and neither are point-to-point sends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.torch_private import TorchDispatchMode, collective_name

# Each operator of c10d with its kind, and the place of its larger tensor among its arguments.
_KINDS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allgather_": ("all_gather", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all_to_all", 1),
}
_FACTORS = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "broadcast": 1,
    "all_to_all": 1,
}  # times (n - 1) / n of the whole


class CollectiveCounter(TorchDispatchMode):
    """Counts `bytes[axis, kind]`, which this rank has sent, and `calls[axis, kind]`. The axis is the name that the
    group's axis has on `mesh`, or the group's own description. Raises NotImplementedError at a collective that it does
    not know, such as those of compiled code."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.bytes: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.calls: Counter[tuple[str, str]] = Counter()
        self._axes: dict[str, str] = {}
        for name in mesh.mesh_dim_names or ():
            if mesh[name].size() > 1:
                self._axes[mesh.get_group(name).group_name] = name

    def of(self, *axes: str, kind: str) -> float:
        """Returns the bytes of one kind over several axes."""
        return sum(self.bytes[axis, kind] for axis in axes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = collective_name(func)
        if name is not None:
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name in ("barrier", "monitored_barrier_", "send", "recv_", "recv_any_source_", "wait_tensor"):
            return
        if name not in _KINDS:
            raise NotImplementedError(f"{name}: a collective that is not counted yet")
        kind, which = _KINDS[name]
        whole = sum(x.nbytes for x in _tensors(args[which]))
        axis, ranks = self._group(args)
        self.bytes[axis, kind] += _FACTORS[kind] * (ranks - 1) * whole / ranks
        self.calls[axis, kind] += 1

    def _group(self, args: Any) -> tuple[str, int]:
        for arg in args:
            group = _as_group(arg)
            if group is not None:
                return self._axes.get(group.group_name, group.group_desc), group.size()
        raise NotImplementedError("a collective without a group")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for inner in value for tensor in _tensors(inner)]


def _as_group(arg: Any) -> dist.ProcessGroup | None:
    if not isinstance(arg, torch.ScriptObject):
        return None
    try:
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(arg)
    except RuntimeError:  # a ReduceOp
        return None
    return group
