"""A model larger than a rank's memory, from the safetensors files of Hugging Face: built without memory for its
parameters, split over tp, and then filled, each rank reading its own slices of each file and nothing else.

    with parameters_on_meta():
        model = LlamaForCausalLM(config)
    tensor_parallelize(model, tp)
    load_safetensors(model, "checkpoints/llama", device="cuda")
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from parallel3d.config.yaml_text import plain_name, read_short
from parallel3d.errors import CheckpointError
from parallel3d.layers.gradients import like_parameter, local_tensor
from parallel3d.row_split import shard_rows

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST_INDEX_BYTES = 64 << 20  # an index has some 100 bytes for each tensor


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built in this block have their parameters on the meta device, without memory and without initial
    values. Buffers are made as ever, because a file seldom has them (rotary frequencies)."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    with mock.patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


@torch.no_grad()
def load_safetensors(
    module: nn.Module, path: str | Path, *, device: torch.device | str | None = None, prefix: str = ""
) -> nn.Module:
    """Fills the parameters and the persistent buffers of `module` from a safetensors file, or from a folder of one or
    of many with an index, and returns it. What is on the meta device gets memory on `device`; what has memory keeps it.
    Of a DTensor on the tp axis this rank's slice alone is read; nothing is sent. The file's name of a parameter is
    `prefix` and the module's; of tied ones either name will do. Values are cast to the parameter's dtype.

    Call it after `tensor_parallelize` and before `fully_shard`. Raises CheckpointError where a tensor is missing, is of
    another shape, or belongs to another model; ValueError for a DTensor of more than one axis."""
    parameters, persistent = module.named_parameters(remove_duplicate=False), module.state_dict(keep_vars=True)
    tensors = {**dict(parameters), **{name: each for name, each in persistent.items() if isinstance(each, Tensor)}}
    names_of: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names_of.setdefault(id(tensor), []).append(name)
    with_memory: dict[str, Tensor] = {}
    with ExitStack() as files:
        stored = open_safetensors(Path(path), files)
        for names in names_of.values():
            there = [prefix + name for name in names if prefix + name in stored]
            if not there:
                raise CheckpointError(f"{path}: has no {prefix}{names[0]}; it is of another model, or needs a prefix")
            tensor, file = tensors[names[0]], stored[there[0]]
            values = _own_slice(file, there[0], tensor, path)
            for name in there:
                del stored[name]
            if not tensor.is_meta:
                local_tensor(tensor).copy_(values)
                continue
            made = like_parameter(tensor, values.to(device or "cpu"))
            made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
            with_memory |= dict.fromkeys(names, made)
    module.load_state_dict(with_memory, strict=False, assign=True)
    extra = [name for name in stored if name.startswith(prefix)]
    if extra:
        raise CheckpointError(f"{path}: {extra[0]} is none of the module's; it is of another model")
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if left:
        raise CheckpointError(
            f"{path}: has no {left[0]}, a buffer on the meta device; build the model within parameters_on_meta()"
        )
    return module


def open_safetensors(path: Path, files: ExitStack) -> dict[str, Any]:
    """Opens a safetensors file, or those of a folder, which has an index, one file or several without an index. Returns
    the file that each tensor is in. No tensor is read yet."""

    def opened(name: Path) -> Any:
        if not name.is_file():
            raise ValueError(f"{name.name} is not a file")
        return files.enter_context(safe_open(name, framework="pt"))

    try:
        if path.is_dir() and (path / _INDEX).is_file():
            weight_map = json.loads(read_short(path / _INDEX, "it lists weights", _LARGEST_INDEX_BYTES))["weight_map"]
            named = {name: opened(path / plain_name(name)) for name in set(weight_map.values())}
            found = {name: named[file] for name, file in weight_map.items()}
            held = {file: set(opened_file.keys()) for file, opened_file in named.items()}
            if absent := [name for name, file in weight_map.items() if name not in held[file]]:
                raise ValueError(f"{_INDEX} names {absent[0]}, which is not in its file")
            return found
        if not path.is_dir() or (path / _SINGLE).is_file():
            file = opened(path / _SINGLE if path.is_dir() else path)
            return dict.fromkeys(file.keys(), file)
        several = sorted(path.glob("*.safetensors"))
        if not several:
            raise ValueError("there is no such file in the folder")
        found = {}
        for file in map(opened, several):
            if twice := found.keys() & file.keys():
                raise ValueError(f"two files have {min(twice)}")
            found |= dict.fromkeys(file.keys(), file)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error


def read_slice(file: Any, name: str, index: Sequence[slice], dtype: torch.dtype) -> Tensor:
    """Returns a slice of a tensor of an open file, as a tensor of `dtype` with memory of its own: what safetensors
    gives is a view of the file's own pages, strided as the whole tensor is."""
    values: Tensor = file.get_slice(name)[tuple(index)] if index else file.get_tensor(name)
    return values.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _own_slice(file: Any, name: str, tensor: Tensor, path: str | Path) -> Tensor:
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != tuple(tensor.shape):
        raise CheckpointError(
            f"{path}: {name} is {list(stored.get_shape())} there and {list(tensor.shape)} here; it is of another model"
        )
    index = [slice(None)] * tensor.ndim
    if isinstance(tensor, DTensor):
        if tensor.device_mesh.ndim != 1:
            raise ValueError(f"{name}: is split over more axes than tp; load before fully_shard")
        (placement,) = tensor.placements
        if isinstance(placement, Shard):
            tp = tensor.device_mesh
            rows = shard_rows(tensor.shape[placement.dim], tp.get_local_rank(), tp.size())
            index[placement.dim] = slice(rows.start, rows.stop)
    return read_slice(file, name, index, tensor.dtype)
