"""Base of every module whose parameters are DTensors on the tp axis: the layers of this library and
the converted modules of others. `deepcopy`, state dicts and `torch.nn.init` give what they give on
one device.

[Note: random starts] torch draws random numbers of a DTensor for each rank's part: on CPUs all
ranks get the same numbers, on GPUs others than one device gets. So `normal_`, `uniform_` and
`bernoulli_` of DTensors draw the full tensor from the given or the default generator on each rank,
and keep this rank's part. Functions that compute with what they drew, such as `orthogonal_` and
`trunc_normal_`, need the full tensor too: `draw(parameter, nn.init.trunc_normal_)`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor, distribute_tensor

from parallel3d.layers.gradients import accumulate_or_return, local_tensor
from parallel3d.layers.regions import (
    all_gather_to_region,
    copy_to_region,
    reduce_from_region,
    reduce_scatter_from_region,
)
from parallel3d.layers.replica_check import differ, fingerprints
from parallel3d.mesh import Axis, Role
from parallel3d.torch_private import draw_dtensors_by, local_of


class ShardedModule(nn.Module):
    """A module that holds this rank's part of its parameters."""

    axis: Axis
    sequence_parallel: bool = False
    fused_gradients: bool = False  # [Note: fused gradients] in `layers.gradients`
    is_entered = False  # a module around this one does what `enter` does

    def replicated(self, name: str) -> Any:
        """Returns this rank's part of a parameter as a plain tensor for autograd, or None."""
        parameter = getattr(self, name)
        if not isinstance(parameter, DTensor):
            return parameter
        if self.fused_gradients and not is_compiling():
            return _FusedLocal.apply(parameter)
        return parameter.to_local()

    def enter(self, x: Tensor) -> Tensor:
        """Gives x to column-parallel layers, gathered if its sequence is split."""
        if self.is_entered:
            return x
        enter = all_gather_to_region if self.sequence_parallel else copy_to_region
        return enter(x, self.axis)

    def leave(self, y: Tensor) -> Tensor:
        """Sums the output of row-parallel layers, and splits its sequence again."""
        leave = reduce_scatter_from_region if self.sequence_parallel else reduce_from_region
        return leave(y, self.axis)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            is_full = isinstance(value, Tensor) and not isinstance(value, DTensor)
            if is_full and isinstance(parameter, DTensor) and value.shape == parameter.shape:
                state_dict[prefix + name] = shard_like(value, parameter)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        words = [super().extra_repr()]
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):
                words.append(f"{name}={_sizes_with_axes(parameter)}")
        return ", ".join(filter(None, words))

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> tuple[str, ...]:
        """Names that DistributedDataParallel asks a module for first."""
        self._refuse_if_split(
            RuntimeError,
            "DistributedDataParallel does not know parameters that are split over tp; use "
            'parallel3d.sharding.apply.shard(model, mesh, "NO_SHARD"), or fully_shard',
        )
        return ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for parameter in self._parameters.values():
            # torch cannot copy a gradient that is a view into a buffer.
            if parameter is not None and isinstance(parameter.grad, DTensor):
                memo[id(parameter.grad)] = parameter.grad.clone()
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_if_split(
            TypeError,
            "a module that is split over processes cannot be pickled; send or save its state: "
            "torch.distributed.checkpoint.save(model.state_dict()), or full tensors by "
            "full_tensor()",
        )
        return super().__reduce_ex__(protocol)

    def _refuse_if_split(self, error: type[Exception], words: str) -> None:
        if any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            raise error(f"{type(self).__name__}: {words}")


class _FusedLocal(Function):
    """This rank's part of a parameter. Backward: the gradient is added to the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        local = local_tensor(parameter)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        accumulate_or_return(ctx.parameter, grad.contiguous(), fused=True)


def shard_like(full: Tensor, parameter: DTensor) -> DTensor:
    """Returns a full tensor in the layout of `parameter`. Nothing is sent."""
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(full.to(parameter.device), mesh, placements, src_data_rank=None)


@torch.no_grad()
def draw(parameter: Tensor, init: Callable[[Tensor], object]) -> None:
    """Fills a parameter by `init`, which gets the full tensor; this rank keeps its part.

    Every rank of the parameter's mesh calls it, with generators of the same state. Raises
    ValueError on all ranks if ranks that hold the same numbers have drawn different ones."""
    if not isinstance(parameter, DTensor):
        init(parameter)
        return
    full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    init(full)
    mesh = parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate() and mesh.size(dim) > 1 and not full.is_meta:
            axis = Axis(mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim))
            refuse_another_draw("a parameter", full, axis, mesh.device_type)
    local_of(parameter).copy_(local_of(shard_like(full, parameter)))


def draw_dtensors_whole() -> None:
    """Makes random numbers for DTensors of this process be drawn by `draw`: [Note: random starts].
    A second call changes nothing."""
    draw_dtensors_by(draw)


def refuse_another_draw(name: str, full: Tensor, axis: Axis, device_type: str) -> None:
    """Raises ValueError on all ranks of an axis if they have not drawn the same tensor."""
    if axis.size > 1 and differ(fingerprints([full]).to(device_type), axis).any():
        raise ValueError(
            f"{name} {list(full.shape)}: was drawn differently on another tp rank, and each holds "
            "it whole; call torch.manual_seed(0) on every tp rank before the model is built"
        )


def _sizes_with_axes(parameter: DTensor) -> str:
    """Returns the sizes of a parameter with the axes that split them, such as [101 / tp 2, 32]."""
    mesh, sizes = parameter.device_mesh, [str(size) for size in parameter.shape]
    names = mesh.mesh_dim_names or (Role.SPLIT_TENSORS.value,) * mesh.ndim
    for name, ranks, placement in zip(names, mesh.shape, parameter.placements, strict=True):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            sizes[dim] += f" / {name} {ranks}"
    return f"[{', '.join(sizes)}]"
