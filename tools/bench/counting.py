"""Counts collectives and the bytes that a rank sends for them, assuming ring algorithms.

Small tensors exchanged through shared memory, and point-to-point sends, are not counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch.distributed as dist
from torch.distributed import DeviceMesh

from parallel3d.torch_private import TorchDispatchMode, tree_iter

# Kind of each c10d operator, and the index of its larger tensor argument.
_KINDS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allgather_": ("all_gather", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all_to_all", 1),
}
_NOT_COUNTED = {"barrier", "monitored_barrier_", "send", "recv_", "recv_any_source_", "wait_tensor"}


def collective_name(operator: Any) -> str | None:
    """Returns the name of a collective, such as "allreduce_", or None for any other operator.

    Collectives are c10d operators and functional collectives (used by torch.compile and DTensor).
    """
    if operator.namespace not in ("c10d", "_c10d_functional"):
        return None
    return str(operator._overloadpacket.__name__)


class CollectiveCounter(TorchDispatchMode):
    """Counts bytes sent by this rank in `bytes[axis, kind]` and calls in `calls[axis, kind]`.

    `axis` is the name of a mesh axis, or the description of any other process group. Functional and
    unknown collectives raise NotImplementedError.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.bytes: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.calls: Counter[tuple[str, str]] = Counter()
        larger = [name for name in mesh.mesh_dim_names or () if mesh[name].size() > 1]
        self._axes = {mesh.get_group(name).group_name: name for name in larger}

    def of(self, *axes: str, kind: str) -> float:
        """Returns the bytes that collectives of one kind sent over these axes in total."""
        return sum(self.bytes[axis, kind] for axis in axes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = collective_name(func)
        if name is not None and name not in _NOT_COUNTED:
            if name not in _KINDS:
                raise NotImplementedError(f"{name}: counting this collective is not supported")
            kind, which = _KINDS[name]
            group = next(group for arg in args if (group := as_group(arg)) is not None)
            axis = self._axes.get(group.group_name, group.group_desc)
            ranks = group.size()
            whole = sum(x.nbytes for x in tree_iter(args[which]))
            self.bytes[axis, kind] += (
                (2 if kind == "all_reduce" else 1) * (ranks - 1) * whole / ranks
            )
            self.calls[axis, kind] += 1
        return func(*args, **(kwargs or {}))


def as_group(arg: Any) -> dist.ProcessGroup | None:
    """Returns the process group in an argument of a c10d operator, or None."""
    try:
        group: dist.ProcessGroup = dist.ProcessGroup.unbox(arg)
    except RuntimeError:  # a tensor or ReduceOp
        return None
    return group
