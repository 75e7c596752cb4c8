"""Every name of torch that has no public counterpart, each with why it is needed. No other module
calls one.

The names at the top are re-exported as they are. The functions below them say what is wanted, and
hide what differs between torch 2.11 and 2.15.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# a file, an offset in it, a length
from torch.distributed.checkpoint.filesystem import _StorageInfo as DcpPlace
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

# sees every operator that is called
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map  # over the tensors in nested arguments

__all__ = [
    "DcpPlace",
    "TorchDispatchMode",
    "tree_iter",
    "tree_map",
]

# Operators on lists of tensors: on a GPU one kernel for many tensors, where a loop launches one for
# each.
foreach_copy_ = torch._foreach_copy_


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies each tensor by `factor`, in place, in few kernels. The public
    `torch.nn.utils.clip_grads_with_norm_` never multiplies by more than 1, and a plain loop costs a
    GPU one launch for each tensor."""
    torch._foreach_mul_(list(tensors), factor)


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the 2-norm of each tensor, summed and returned in `dtype`. The public
    `torch.nn.utils.get_total_norm` rounds each norm to its tensor's own dtype, which leaves eight
    bits of bf16. On a CPU torch adds the squares up one after the other, which in float32 loses
    7e-4 of the norm of 2^24 numbers. So it gets a large tensor in pieces."""
    if tensors[0].device.type != "cpu":
        return list(torch._foreach_norm(list(tensors), 2.0, dtype=dtype))
    found = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = (len(flat) - 1) // 4096 * 4096
        parts = (flat[:whole].view(-1, 4096), flat[whole:][None])
        each = [torch.linalg.vector_norm(part, dim=1, dtype=dtype) for part in parts]
        found.append(torch.linalg.vector_norm(torch.cat(each)))
    return found


def is_in_backward() -> bool:
    """Returns whether autograd is at work in this thread, as it is when recompute runs a forward
    again."""
    return torch._C._current_graph_task_id() != -1


def offsets_of(tensor: DTensor) -> tuple[int, ...]:
    """Returns where this rank's part begins in the global tensor, for each dim, also if several
    axes split one dim. It is what DCP asks a tensor to save its part. Raises ValueError if the rank
    has no part."""
    (chunk,) = tensor.__create_chunk_list__()
    assert chunk.sizes == local_of(tensor).shape
    return tuple(chunk.offsets)


def dcp_index(metadata: Metadata, places: dict[MetadataIndex, DcpPlace]) -> bytes:
    """Returns what torch.distributed.checkpoint has in the file `.metadata`, by which its own
    readers find the parts of each tensor. Its public writer can only write it straight to the
    disk."""
    metadata.storage_data = places
    metadata.storage_meta = StorageMeta()
    metadata.version = "1.0.0"
    return pickle.dumps(metadata)


def local_of(tensor: DTensor) -> Tensor:
    """Returns this rank's part without `to_local`, an operator that a `TorchDispatchMode` must not
    call from itself."""
    return tensor._local_tensor


def draw_dtensors_by(draw: Callable[[DTensor, Callable[[Tensor], object]], None]) -> None:
    """Makes `draw(dtensor, fill)` do every in-place draw of random numbers into a DTensor; `fill`
    makes the same draw into a plain tensor. torch has a public hook for how an operator is split,
    but not for what it draws."""

    def handler(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        draw(args[0], lambda full: operator(full, *args[1:], **kwargs))
        return args[0]

    aten = torch.ops.aten
    handlers = DTensor._op_dispatcher._custom_op_handlers
    for operator in (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float):
        handlers.setdefault(operator, handler)  # type: ignore[arg-type]


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Returns how long a collective of a group waits for its peers."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def limit_waits(seconds: float) -> None:
    """Has every collective that starts from now on, in any group of this process, wait at most so
    long for its peers. Each group has a public `set_timeout`; the list of all groups is private. A
    DeviceMesh makes its groups with torch's default of half an hour."""
    for group in list(dist.distributed_c10d._world.pg_map):
        group.set_timeout(timedelta(seconds=seconds))


def abort_groups() -> None:
    """Breaks off what NCCL has under way in all groups of this process, and leaves other backends
    as they are. `destroy_process_group`, which is public, waits until all of it has been done, and
    after a failure it never is."""
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        dist.distributed_c10d._abort_process_group()


def default_store() -> dist.Store:
    """Returns the store at which the processes of the default group have met."""
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
    """Makes a process group that its members alone make, of the default group's backends or of the
    one for `device`. torch's `new_group` has two traps for it.

    It names a group after its ranks and the number of groups that the process has already: two
    members with unequal numbers wait for each other forever. So every group here has a name that is
    new and the same on its members: `name`, or the description, the ranks and how many such groups
    this process has made. If the default group is bound to a device, torch would split the new
    group off that one, in which all ranks of the default group have to take part. So the default
    group is unbound for the moment, and the communicator of the new group is made at its first
    use."""
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
    """Returns whether `torch.compile(module)` has made this module or `module.compile()` was
    called."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def with_modules(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """Returns a module with some of those below it replaced, by their names. All else is shared
    with the one given, which stays as it is: `set_submodule`, which is public, would change it."""
    changed = type(module).__new__(type(module))
    changed.__dict__.update(module.__dict__)
    changed._modules = dict(module._modules)
    for path, new in replaced.items():
        name, _, rest = path.partition(".")
        child = changed.get_submodule(name)
        changed._modules[name] = with_modules(child, {rest: new}) if rest else new
    return changed


def keep_delayed_gradients(root: FSDPModule) -> None:
    """Adds the gradients that the second half of a split backward has made to those that
    `fully_shard` keeps. Until torch 2.14 it keeps them apart, in the dtype of the reduction, and
    reduces one of the two; from 2.15 on the gradient of a gathered parameter is that sum, and there
    is nothing to do."""
    for group in _groups(root):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "accumulate_unsharded_grad_if_needed"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def reduce_delayed_gradients(root: FSDPModule) -> None:
    """Does what `fully_shard` does at the end of a backward, but of a split one after its first
    half: sums gradients over the data ranks and frees the gathered parameters."""
    for group in reversed(_groups(root)):
        group.post_backward()
    fully_shard.state(root)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def _groups(root: FSDPModule) -> list[Any]:
    """Returns the groups of parameters that `fully_shard` gathers together, in the order of the
    model. A module has one or none in torch 2.11 and a list of them from 2.13 on."""
    states = fully_shard.state(root)._state_ctx.all_states  # type: ignore[attr-defined]  # torch's pipeline does so too
    groups = [
        getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states
    ]
    return [group for of_module in groups for group in of_module if group is not None]
