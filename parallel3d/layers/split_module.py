"""The base of every module whose parameters are DTensors on the tp axis, the layers of this library and the converted
modules of others: what torch's users do to a module gives what it would give on one device.

[Note: random starts] torch draws a DTensor's random numbers for each rank's part alone: on CPUs all ranks get the same
numbers, on GPUs others than one device gets. So from the first split parameter on, `normal_`, `uniform_` and
`bernoulli_` of any DTensor, which all of `torch.nn.init` ends in, draw the whole tensor from the given or the default
generator on each rank, and keep this rank's part (`draw`). `orthogonal_` and its kin, which compute with what
they drew, raise torch's NotImplementedError: call them by `draw(parameter, nn.init.orthogonal_)`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from parallel3d.layers.agreement import differ, fingerprints
from parallel3d.mesh import Axis
from parallel3d.torch_private import draw_dtensors_by, local_of


class SplitModule(nn.Module):
    """A module that holds this rank's part of its parameters. It loads a state dict of whole tensors, copies itself
    within its process group, and prints what is split; it refuses to be pickled, because its group stays here."""

    fused_gradients: bool = False  # [Note: fused gradients] in `layers.gradients`

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
                continue
            if value.shape == parameter.shape:  # torch's own message tells of other shapes
                state_dict[prefix + name] = cut_like(value, parameter)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        split = [f"{name}={_laid_out(each)}" for name, each in self._parameters.items() if isinstance(each, DTensor)]
        return ", ".join(filter(None, (super().extra_repr(), *split)))

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> tuple[str, ...]:
        """The names that DistributedDataParallel asks a module for before all else. Raises RuntimeError where
        parameters are split: it would send each rank's part to all ranks."""
        if self._is_split():
            raise RuntimeError(
                f"{type(self).__name__}: DistributedDataParallel does not know parameters that are split over tp; lay "
                'it over data ranks by parallel3d.sharding.apply.shard(model, mesh, "NO_SHARD"), or by fully_shard'
            )
        return ()

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitModule:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for parameter in self._parameters.values():
            if parameter is not None and isinstance(parameter.grad, DTensor):  # torch copies no view into a buffer
                memo[id(parameter.grad)] = parameter.grad.clone()
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_split():
            raise TypeError(
                f"{type(self).__name__}: a module that is split over processes cannot be pickled; send or save its "
                "state: torch.distributed.checkpoint.save(model.state_dict()), or whole tensors by full_tensor()"
            )
        return super().__reduce_ex__(protocol)

    def _is_split(self) -> bool:
        return any(isinstance(parameter, DTensor) for parameter in self.parameters())


def cut_like(whole: Tensor, parameter: DTensor) -> DTensor:
    """Returns this rank's part of a whole tensor, laid over the mesh as `parameter` is. Nothing is sent."""
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole.to(parameter.device), mesh, placements, src_data_rank=None)


@torch.no_grad()
def draw(parameter: Tensor, init: Callable[[Tensor], object]) -> None:
    """Fills a parameter by `init`, which is given the whole tensor, as on one device: of what it leaves there this rank
    keeps its part. Every rank of the parameter's mesh calls it with generators of the same state. Raises ValueError on
    all ranks that hold the same numbers where they have drawn others; to tell it, 16 bytes are sent."""
    if not isinstance(parameter, DTensor):
        init(parameter)
        return
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    init(whole)
    mesh = parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate() and mesh.size(dim) > 1 and not whole.is_meta:
            axis = Axis(mesh.size(dim), mesh.get_local_rank(dim), mesh.get_group(dim))
            refuse_another_draw("a parameter", whole, axis, mesh.device_type)
    local_of(parameter).copy_(local_of(cut_like(whole, parameter)))


def draw_dtensors_whole() -> None:
    """Has random numbers that are drawn into a DTensor, any DTensor of this process, drawn as `draw` draws them:
    [Note: random starts]. A second call changes nothing."""
    draw_dtensors_by(draw)


def refuse_another_draw(name: str, whole: Tensor, axis: Axis, device_type: str) -> None:
    """Raises ValueError on all ranks of an axis where they have not drawn the same tensor, wherever it is. Tensors of
    `device_type` are sent over the axis."""
    if axis.size > 1 and differ(fingerprints([whole]).to(device_type), axis).any():
        raise ValueError(
            f"{name} {list(whole.shape)}: was drawn differently on another tp rank, and each holds it whole; call "
            "torch.manual_seed(0) on every tp rank before the model is built"
        )


def _laid_out(parameter: Any) -> str:
    """Returns the sizes of a parameter with the axes that split them, such as [101 / tp 2, 32]."""
    mesh, sizes = parameter.device_mesh, [str(size) for size in parameter.shape]
    names = mesh.mesh_dim_names or ("tp",) * mesh.ndim
    for name, ranks, placement in zip(names, mesh.shape, parameter.placements, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            sizes[dim] += f" / {name} {ranks}"
    return f"[{', '.join(sizes)}]"
