"""Loads weights in Hugging Face format. Each rank reads only the slices for its shards."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from parallel3d.checkpoint.collectives import collect
from parallel3d.checkpoint.hugging_face_names import (
    HEAD,
    NAMES,
    UNREAD,
    HfTensor,
    hf_tensors,
    model_on_meta,
)
from parallel3d.checkpoint.manifest import differences
from parallel3d.config.hugging_face import family_of
from parallel3d.config.recipe import ModelConfig
from parallel3d.convert.pretrained import open_safetensors, read_slice
from parallel3d.errors import CheckpointError
from parallel3d.layers.parameter import ParameterSpec
from parallel3d.mesh import Axis, Role
from parallel3d.sharding.optimizer_parts import LocalParameter

# Dtypes of unquantized weights, as safetensors names them.
_WEIGHTS = ("F64", "F32", "BF16", "F16")


def load_pretrained(parameters: Sequence[LocalParameter], model: ModelConfig, folder: Path) -> None:
    """Loads this rank's shards of the parameters from safetensors files in `folder`. Collective.

    Raises CheckpointError on all ranks if tensors are missing, unexpected, of the wrong shape,
    quantized or unreadable. All but read errors are found before a parameter changes.
    """

    shapes = {own.name: own.spec.shape for own in parameters}

    def compare(everyone: list[dict[str, tuple[int, ...]]]) -> None:
        refuse_another_model(folder, model, ChainMap(*everyone))

    def read() -> None:
        sources: dict[str, list[HfTensor]] = defaultdict(list)
        try:
            stored = _open(folder, model)
            tensors = [*hf_tensors(model, shapes, stored)]
            for each in sorted(tensors, key=lambda each: each.expert):
                for name in each.parameters:
                    sources[name].append(each)
            for own in parameters:
                tp = own.axes[Role.SPLIT_TENSORS]
                own.part.initialize(
                    partial(_part, stored, sources[own.name], own.name, own.spec, tp)
                )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: cannot be read: {error}") from error

    collect(lambda: shapes, compare)
    collect(read)


def refuse_another_model(
    folder: Path, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises CheckpointError if the tensors in a folder do not fit a model or are quantized.

    The error has a line for each difference. `shapes` are those of the model's parameters.
    """
    stored = _open(folder, model)
    tensors = hf_tensors(model, shapes, stored)
    here = {each.name: each.shape(shapes[each.parameters[0]]) for each in tensors}
    if HEAD not in here:  # The head is tied, but some files contain it.
        stored.pop(HEAD, None)
    lines = differences({name: each.get_shape() for name, each in stored.items()}, here)
    for name, each in stored.items():
        if each.get_dtype() not in _WEIGHTS:
            lines.append(f"{name} has dtype {each.get_dtype()}; quantized weights cannot be loaded")
    if lines:
        raise CheckpointError("\n  ".join([f"{folder}: is from another model:", *lines]))


def _open(folder: Path, model: ModelConfig) -> dict[str, Any]:
    """Opens the tensors in a folder, keyed by their names in the family's `NamesTable`.

    Adds the prefix `base`, which a model saved without its head lacks, and omits `UNREAD` buffers.
    """
    stored = open_safetensors(folder)
    if model.architecture == "transformers":
        base = f"{model_on_meta(model).base_model_prefix}."
    else:
        base = NAMES[family_of(model)].base
    has_base = any(name.startswith(base) for name in stored)
    found = {}
    for name, each in stored.items():
        if UNREAD.fullmatch(name):
            continue
        if name != HEAD and not has_base:
            name = base + name
        found[name] = each
    return found


def _part(
    stored: dict[str, Any],
    sources: list[HfTensor],
    name: str,
    spec: ParameterSpec,
    tp: Axis,
    shards: Axis,
) -> Tensor:
    """Reads a rank's shard of a parameter as float32. `sources` have its rows, in order."""
    rows, columns = spec.box(tp, shards)
    matrix = sources[0].matrix(spec.shape)
    height = matrix[0] // spec.shape[0]  # Rows of each matrix of a stack, else 1.
    ends = (rows.start * height, rows.stop * height)
    parts: list[Tensor] = []
    for tensor in sources:
        held = tensor.rows(matrix[0])
        start, stop = (min(max(row, held.start), held.stop) for row in ends)
        if parts and start == stop:  # An empty slice is read only for an empty shard.
            continue
        # Added to a row of the parameter, gives its row in the source, which stacks parameters.
        offset = tensor.parameters.index(name) * len(held) - held.start
        index = [slice(offset + start, offset + stop), slice(columns.start, columns.stop)]
        index = index[: len(matrix)]
        if tensor.transposed:
            parts.append(read_slice(stored[tensor.name], index[::-1], torch.float32).t())
        else:
            parts.append(read_slice(stored[tensor.name], index, torch.float32))
    part = torch.cat(parts) if len(parts) > 1 else parts[0]
    return part if len(matrix) == len(spec.shape) else part.unflatten(0, (len(rows), height))
