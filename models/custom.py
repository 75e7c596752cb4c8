"""Validates models from outside this project before workers start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields
from inspect import signature
from typing import Any

import torch
from torch import nn

from parallel3d.build_engine import ModelClass
from parallel3d.config.import_class import naming_user_code
from parallel3d.config.load import read_options
from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.config.rules import refuse
from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError
from parallel3d.existing_model import ExistingModel
from parallel3d.layers.parameter import ParallelModule
from parallel3d.layers.positions import PackedDocuments
from parallel3d.mesh import LAYER_AXES
from parallel3d.models.decoder import NoOptions
from parallel3d.pipeline.stage import OWN_NAMES

# Keys that select the class, or that its own dataclass validates.
_NOT_THE_CLASS = ("name", "architecture", "options")


def check_custom(model_class: ModelClass, recipe: Recipe) -> None:
    """Builds the unsharded model once on the meta device and validates it.

    Raises ConfigError if options do not fit the class, if the class does not read a key that the
    recipe sets, or if the model cannot be split into stages, sharded or trained.
    """
    config = recipe.model
    said = f"model.architecture = {config.architecture}"
    if isinstance(model_class, ExistingModel):
        with naming_user_code(f"{said}: building the model failed"):
            model_class.check(recipe)
        return
    read_options(getattr(model_class, "Options", NoOptions), config.options)
    taken = signature(model_class).parameters.values()
    names = {each.name for each in taken}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken)
    for axis in LAYER_AXES:
        size = recipe.parallel.axes[axis]
        if size > 1 and axis not in names and not takes_any:
            raise ConfigError(
                f"parallel.{axis} = {size}: the constructor of {config.architecture} has no "
                f"argument {axis}; add {axis}=None and pass it on in the ParallelContext, or try "
                f"parallel.{axis}=1"
            )
    read: set[str] = set()
    with naming_user_code(f"{said}: building the model failed"):
        model = model_class(
            _watched(config, read),
            tp=None,
            sequence_parallel=False,
            recompute="none",
            recompute_every=1,
            device="meta",
        )
    refuse([f"{said}: {fault}" for fault in _faults(model, config)])
    unread = []
    for key in fields(config):
        value = getattr(config, key.name)
        is_set = key.default is not MISSING and value != key.default
        if is_set and key.name not in {*_NOT_THE_CLASS, *read}:
            unread.append(
                f"model.{key.name} = {shown(value)}: {config.architecture} does not read this key; "
                "remove it, or read it in the constructor"
            )
    refuse(unread)


def _faults(model: nn.Module, config: ModelConfig) -> Iterator[str]:
    """Yields problems that a pipeline, tp or an optimizer would have with a model."""
    parts = (*OWN_NAMES.first, *OWN_NAMES.last)
    for part in (*parts, "layers"):
        if not isinstance(getattr(model, part, None), nn.Module):
            yield (
                f"module {part} is missing, but stages need it; derive the class from "
                "parallel3d.models.decoder.Decoder"
            )
            return
    blocks = dict(model.get_submodule("layers").named_children())
    wanted = [str(index) for index in range(config.layers)]
    if not isinstance(model.layers, nn.ModuleDict) or list(blocks) != wanted:
        yield (
            f"layers = {shown(list(blocks))}: must be an nn.ModuleDict of model.layers = "
            f"{config.layers} blocks, named '0' to '{wanted[-1]}'"
        )
    declared = {
        id(getattr(part, name))
        for part in model.modules()
        if isinstance(part, ParallelModule)
        for name in part.specs
    }
    for name, parameter in model.named_parameters():
        if name.split(".")[0] not in (*parts, "layers"):
            yield (
                f"parameter {name} belongs to no stage; move it into a block, or into "
                f"{' or '.join(parts)}"
            )
        elif id(parameter) not in declared:
            yield (
                f"parameter {name} was not added to a ParallelModule, so its initial values and "
                "its sharding are unknown; use add_parameter(name, ParameterSpec(shape, "
                "None, init))"
            )
    for name, _ in model.named_buffers():
        yield (
            f"buffer {name} would be empty, because the model is built on the meta device; "
            "compute it in forward()"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield ("all parameters are frozen; set requires_grad=True on those that you want to train")
    elif unused := _unused(model):
        names = ", ".join([*unused[:4], *["..."] * (len(unused) > 4)])
        yield (
            f"no forward pass uses parameter {names}; remove it, or freeze it with "
            "requires_grad_(False)"
        )


def _unused(model: nn.Module) -> list[str]:
    """Returns the names of trainable parameters that do not affect the model's output.

    Returns an empty list if none has a gradient, for example because the forward pass cannot run on
    the meta device.
    """
    model.eval()  # Dropout would need a key.
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    starts = torch.zeros(2, dtype=torch.int32, device="meta")
    for keywords in ({}, {"documents": PackedDocuments((2,), starts, ids)}):
        with suppress(Exception):  # The model may not accept documents, or may read values.
            model(ids, **keywords).sum().backward()
    trained = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    unused = [name for name, parameter in trained if parameter.grad is None]
    return unused if len(unused) < len(trained) else []


def _watched(config: ModelConfig, read: set[str]) -> ModelConfig:
    """Returns an equal config that records the name of each key read from it in `read`."""

    class WatchedConfig(ModelConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    watched = object.__new__(WatchedConfig)
    vars(watched).update(vars(config))
    return watched
