"""Wraps all private names of torch that the project uses, each with the reason.

No other module uses private names. Those imported at the top are re-exported unchanged. Functions
also hide differences between torch 2.11 and 2.15.
"""

from __future__ import annotations

import atexit
import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Location of data in a distributed checkpoint (DCP): file name, offset and length.
from torch.distributed.checkpoint.filesystem import _StorageInfo as DcpPlace
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

# Base class for modes that intercept every operator.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map  # Visit the tensors in nested arguments.

__all__ = [
    "DcpPlace",
    "TorchDispatchMode",
    "tree_iter",
    "tree_map",
]

# On a GPU, foreach operators launch one kernel for many tensors instead of one per tensor.
foreach_copy_ = torch._foreach_copy_


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies each tensor by `factor` in place, with few kernels.

    The public `torch.nn.utils.clip_grads_with_norm_` never multiplies by more than 1, and a loop
    would launch one kernel per tensor.
    """
    torch._foreach_mul_(list(tensors), factor)


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the 2-norm of each tensor, accumulated in `dtype`.

    The public `torch.nn.utils.get_total_norm` rounds each norm to the dtype of its tensor. On CPUs,
    large tensors are summed in pieces, because a sequential float32 sum has a relative error of
    7e-4 for 2^24 numbers.
    """
    if tensors[0].device.type != "cpu":
        return list(torch._foreach_norm(list(tensors), 2.0, dtype=dtype))
    found = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = (len(flat) - 1) // 4096 * 4096
        norm = torch.linalg.vector_norm(flat[whole:], dtype=dtype)
        if whole:
            rows = torch.linalg.vector_norm(flat[:whole].view(-1, 4096), dim=1, dtype=dtype)
            norm = torch.linalg.vector_norm(torch.cat((rows, norm[None])))
        found.append(norm)
    return found


def is_in_backward() -> bool:
    """Returns True if this thread runs a backward pass or recomputes a forward pass in one."""
    return torch._C._current_graph_task_id() != -1


def offsets_of(tensor: DTensor) -> tuple[int, ...]:
    """Returns the offset of this rank's shard in the global tensor along each dim.

    Works even if several mesh axes split the same dim. Raises ValueError if the shard is empty.
    """
    (chunk,) = tensor.__create_chunk_list__()
    assert chunk.sizes == local_of(tensor).shape
    return tuple(chunk.offsets)


def dcp_index(metadata: Metadata, places: dict[MetadataIndex, DcpPlace]) -> bytes:
    """Returns the content of the `.metadata` file of a DCP checkpoint.

    DCP's public API can only write it to disk.
    """
    metadata.storage_data = places
    metadata.storage_meta = StorageMeta()
    metadata.version = "1.0.0"
    return pickle.dumps(metadata)


def local_of(tensor: DTensor) -> Tensor:
    """Returns the local shard, even in a `TorchDispatchMode`, which must not call `to_local`."""
    return tensor._local_tensor


def draw_dtensors_by(draw: Callable[[DTensor, Callable[[Tensor], object]], None]) -> None:
    """Makes `normal_`, `uniform_` and `bernoulli_` on a DTensor call `draw(dtensor, fill)` instead.

    `fill(tensor)` makes the same draw into a plain tensor. torch has a public hook for the sharding
    of an operator, but not for its random numbers.
    """

    def handler(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        draw(args[0], lambda full: operator(full, *args[1:], **kwargs))
        return args[0]

    aten = torch.ops.aten
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for operator in (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float):
        handlers.setdefault(operator, handler)  # type: ignore[arg-type]


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Returns the timeout of a group's collectives on `device`."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def limit_waits(seconds: float) -> None:
    """Sets the timeout of future collectives in all existing groups of this process.

    Groups have a public `set_timeout`, but the list of all groups is private. DeviceMesh creates
    groups with torch's default timeout, up to half an hour.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        group.set_timeout(timedelta(seconds=seconds))


def abort_groups() -> None:
    """Aborts pending operations in all groups if the default group uses NCCL.

    The public `destroy_process_group` would wait for them, possibly forever after a failure.
    """
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        dist.distributed_c10d._abort_process_group()


@cache
def let_gloo_finish() -> None:
    """Waits 0.2 s when the program ends, so that gloo's threads can free their last tensors.

    They need the GIL for it. A thread that asks for the GIL while Python shuts down aborts the
    process (torch 2.13), which happens if a DeviceMesh outlives `destroy_process_group`.
    """
    atexit.register(time.sleep, 0.2)


def default_store() -> dist.Store:
    """Returns the store of the default process group."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


_groups_made: Counter[str] = Counter()


def group_of(
    ranks: Sequence[int],
    description: str,
    *,
    name: str | None = None,
    device: torch.device | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Creates a process group. Only its members need to call this function, all of them.

    The group uses the backends of the default group, or only the one for `device`. This function
    works around two problems of `torch.distributed.new_group`.

    torch names a group by its ranks and the number of groups that the process has, so members with
    different numbers would wait forever. Here the name is `name`, or else the description, the
    ranks and a counter.

    If the default group is bound to a device, torch creates the new group by a split, in which all
    ranks must take part. So the default group is unbound temporarily, and the communicator is
    created on first use.
    """
    c10d: Any = dist.distributed_c10d
    if name is None:
        key = f"{description} {list(ranks)}"
        _groups_made[key] += 1
        name = f"{key} {_groups_made[key]}"
    everyone = c10d._get_default_group()
    naming = c10d._process_group_name
    backend = None if device is None else everyone._get_backend(device).name()
    bound = everyone.bound_device_id
    everyone.bound_device_id = None
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        group = dist.new_group(
            ranks, timeout, backend, use_local_synchronization=True, group_desc=description
        )
    finally:
        everyone.bound_device_id = bound
        c10d._process_group_name = naming
    assert isinstance(group, dist.ProcessGroup)
    return group


def is_compiled(module: nn.Module) -> bool:
    """Returns True if `torch.compile(module)` or `module.compile()` has been applied."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def with_modules(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """Returns a copy of a module in which the descendants named by `replaced` are replaced.

    All else is shared with the original, which stays unchanged. The public `set_submodule` would
    modify it.
    """
    changed = type(module).__new__(type(module))
    changed.__dict__.update(module.__dict__)
    changed._modules = dict(module._modules)
    for path, new in replaced.items():
        name, _, rest = path.partition(".")
        child = changed.get_submodule(name)
        changed._modules[name] = with_modules(child, {rest: new}) if rest else new
    return changed


def keep_delayed_gradients(root: FSDPModule) -> None:
    """Adds weight gradients of a split backward pass to those that `fully_shard` accumulates.

    Before torch 2.15, `fully_shard` accumulates gradients separately in the reduction dtype and
    would reduce only one of the two. From 2.15 on, this function does nothing.
    """
    for group in _groups(root):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "accumulate_unsharded_grad_if_needed"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def reduce_delayed_gradients(root: FSDPModule) -> None:
    """Completes a split backward pass as `fully_shard` completes an ordinary one.

    Reduces gradients over the DP ranks and reshards parameters.
    """
    for group in reversed(_groups(root)):
        group.post_backward()
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def wrap_communication(module: FSDPModule, wrap: Callable[[Any], Any]) -> None:
    """Wraps the functions in which `fully_shard` starts, and waits for, the module's collectives.

    torch has no hooks around them.
    """
    for group in _groups_of(fully_shard.state(module)):  # type: ignore[attr-defined]
        for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward"):
            setattr(group, name, wrap(getattr(group, name)))


def _groups(root: FSDPModule) -> list[Any]:
    """Returns the parameter groups of `fully_shard` in model order."""
    states = fully_shard.state(root)._state_ctx.all_states  # type: ignore[attr-defined]  # torch.distributed.pipelining does this, too
    return [group for state in states for group in _groups_of(state)]


def _groups_of(state: Any) -> list[Any]:
    """Returns the parameter groups of a module: at most one in torch 2.11, a list from 2.13 on."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]
