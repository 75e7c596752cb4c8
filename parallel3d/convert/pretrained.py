"""Loads Hugging Face safetensors into a model that exceeds the memory of one rank.

Build the model without memory for its parameters and split it over tp. Then each rank reads only
its own slices (see the example of `load_safetensors`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from parallel3d.config.yaml_text import plain_name, read_short
from parallel3d.errors import CheckpointError
from parallel3d.layers.weight_gradients import like_parameter, local_tensor
from parallel3d.mesh import Axis

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_ANOTHER_MODEL = "use the checkpoint of this model"
_LARGEST_INDEX_BYTES = 64 << 20  # Size limit. An index has about 100 bytes per tensor.


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context manager in which parameters of new modules are created on the meta device.

    Buffers are built as usual, because files rarely contain them (for example rotary frequencies).

    Example:
        >>> with parallel3d.parameters_on_meta():
        ...     model = LlamaForCausalLM(config)
        >>> parallel3d.tensor_parallelize(model, tp)
        >>> parallel3d.load_safetensors(model, "checkpoints/llama", device="cuda")
    """
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


@torch.no_grad()
def load_safetensors(
    module: nn.Module,
    path: str | Path,
    *,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Fills the parameters and persistent buffers of a module from safetensors.

    No communication. Call it after `tensor_parallelize` and before `fully_shard`.

    Args:
        module: Module to fill. Each rank reads only its slice of a DTensor. Values are cast to the
            dtype of the tensor.
        path: A safetensors file, or a folder with one or more. A file may use either name of tied
            parameters.
        device: Device of tensors that are on the meta device. Default: CPU. Other tensors stay on
            their device.

    Returns:
        The same module.

    Raises:
        CheckpointError: A file cannot be read, or a tensor is missing, unexpected or has a
            different shape.
        ValueError: A DTensor is split over more axes than tp.

    Example:
        >>> with parallel3d.parameters_on_meta():
        ...     model = LlamaForCausalLM(config)
        >>> parallel3d.tensor_parallelize(model, tp)
        >>> parallel3d.load_safetensors(model, "checkpoints/llama", device="cuda")
    """
    names_of: dict[Tensor, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names_of.setdefault(tensor, []).append(name)
    made: dict[str, Tensor] = {}
    stored = open_safetensors(Path(path))
    own = set(stored)
    for tensor, names in names_of.items():
        there = own.intersection(names)
        if not there:
            raise CheckpointError(f"{path}: tensor {names[0]} is missing; {_ANOTHER_MODEL}")
        own -= there
        name = min(there)
        values = _own_slice(stored[name], name, tensor, path)
        if tensor.is_meta:
            filled = like_parameter(tensor, values.to(device or "cpu"))
            if isinstance(tensor, nn.Parameter):
                filled = nn.Parameter(filled, tensor.requires_grad)
            made |= dict.fromkeys(names, filled)
        else:
            local_tensor(tensor).copy_(values)
    module.load_state_dict(made, strict=False, assign=True)
    unfilled = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if own or unfilled:
        raise CheckpointError(
            f"{path}: unexpected tensors {sorted(own)}, and buffers without values {unfilled}; "
            f"{_ANOTHER_MODEL}, or build the model within parameters_on_meta()"
        )
    return module


def open_safetensors(path: Path) -> dict[str, Any]:
    """Opens a safetensors file, or those of a folder with or without an index.

    Returns a lazy tensor for each name. Index it to read a slice. A file stays open as long as one
    of its tensors is referenced.
    """
    try:
        return _open_files(path)
    except Exception as error:  # Other file types raise various exceptions.
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error


def _open_files(path: Path) -> dict[str, Any]:
    paths = [path]
    if (path / _INDEX).is_file():
        text = read_short(path / _INDEX, "it lists weights", _LARGEST_INDEX_BYTES)
        listed = set(json.loads(text)["weight_map"].values())
        paths = [path / plain_name(name) for name in sorted(listed)]
    elif (path / _SINGLE).is_file():
        paths = [path / _SINGLE]
    elif path.is_dir():
        paths = sorted(path.glob("*.safetensors"))
        if not paths:
            raise ValueError("the folder has no *.safetensors file")
    found: dict[str, Any] = {}
    for each in paths:
        if not each.is_file():
            raise ValueError(f"{each.name} is not a file")
        file = safe_open(each, framework="pt")
        for name in file.keys():  # noqa: SIM118  # Not a dict.
            if name in found:
                raise ValueError(f"two files contain {name}")
            found[name] = file.get_slice(name)
    return found


def read_slice(stored: Any, index: Sequence[slice], dtype: torch.dtype) -> Tensor:
    """Returns a copy of a slice, because safetensors itself returns a view of the file."""
    values: Tensor = stored[tuple(index)]
    return values.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _own_slice(stored: Any, name: str, tensor: Tensor, path: str | Path) -> Tensor:
    shape = stored.get_shape()
    here = list(tensor.shape)
    if shape != here:
        raise CheckpointError(
            f"{path}: {name} has shape {shape}, but the module needs {here}; {_ANOTHER_MODEL}"
        )
    index = [slice(None)] * tensor.ndim
    if isinstance(tensor, DTensor):
        tp = tensor.device_mesh
        if tp.ndim != 1:
            raise ValueError(f"{name}: split over more axes than tp; load before fully_shard")
        (placement,) = tensor.placements
        if isinstance(placement, Shard):
            rows = Axis.of(tp).rows(tensor.shape[placement.dim])
            index[placement.dim] = slice(rows.start, rows.stop)
    return read_slice(stored, index, tensor.dtype)
