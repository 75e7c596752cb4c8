"""A model of the user's own, which `model.architecture: module:Class` names: what is asked of its
class before any worker starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import nn

from parallel3d.build_engine import ModelClass
from parallel3d.config.import_class import import_class, naming_user_code
from parallel3d.config.load import read_options
from parallel3d.config.recipe import ModelConfig
from parallel3d.config.rules import refuse
from parallel3d.config.yaml_text import shown
from parallel3d.layers.parameter import ParallelModule
from parallel3d.layers.positions import PackedDocuments
from parallel3d.models.decoder import NoOptions
from parallel3d.pipeline.stage import FIRST_PARTS, LAST_PARTS

# keys that pick the class, or that its own dataclass checks
_NOT_THE_CLASS = ("name", "architecture", "options")


def import_model(architecture: str) -> ModelClass:
    """Returns the class that `model.architecture` names as `module:Class`. Raises ConfigError as
    `config.import_class` does."""
    return import_class("model.architecture", architecture, nn.Module, "torch.nn.Module")


def check_class(config: ModelConfig) -> None:
    """Builds the model once, on the meta device and whole, and raises ConfigError where its options
    do not fit its class, where the class never reads a key that the recipe sets, or where what it
    builds cannot be cut into stages, split and stepped."""
    model_class = import_model(config.architecture)
    said = f"model.architecture = {config.architecture}"
    read_options(getattr(model_class, "Options", NoOptions), config.options)
    read: set[str] = set()
    with naming_user_code(f"{said}: building it fails"):
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
                f"model.{key.name} = {shown(value)}: {config.architecture} does not read it when "
                "it is built; drop it, or read it there"
            )
    refuse(unread)


def _faults(model: nn.Module, config: ModelConfig) -> Iterator[str]:
    """Yields what a pipeline, tp or an optimizer would miss in a model."""
    parts = (*FIRST_PARTS, *LAST_PARTS)
    for part in (*parts, "layers"):
        if not isinstance(getattr(model, part, None), nn.Module):
            yield (
                f"has no module {part}, where stages are cut; derive it from "
                "parallel3d.models.decoder.Decoder"
            )
            return
    blocks = dict(model.get_submodule("layers").named_children())
    wanted = [str(index) for index in range(config.layers)]
    if not isinstance(model.layers, nn.ModuleDict) or list(blocks) != wanted:
        yield (
            f"its layers are {shown(list(blocks))}; make them an nn.ModuleDict of model.layers = "
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
                f"its parameter {name} belongs to no stage; put it into a block, or into "
                f"{' or '.join(parts)}"
            )
        elif id(parameter) not in declared:
            yield (
                f"its parameter {name} is none of a ParallelModule's, so that neither its start "
                "nor its place over tp is known; try add_parameter(name, ParameterSpec(shape, "
                "None, init))"
            )
    for name, _ in model.named_buffers():
        yield (
            f"its buffer {name} would be empty where the model is built on the meta device; "
            "compute it in the forward"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        yield (
            "all of its parameters are frozen; leave requires_grad=True on those that training is "
            "to change"
        )
    elif unused := _unused(model):
        names = ", ".join([*unused[:4], *["..."] * (len(unused) > 4)])
        yield (
            f"no forward pass uses its parameter {names}; remove it, or freeze it by "
            "requires_grad_(False)"
        )


def _unused(model: nn.Module) -> list[str]:
    """Returns the names of the parameters that are not frozen and have no part in the output of a
    model on the meta device; none if the forward pass cannot run there."""
    model.eval()  # dropout needs a key
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    starts = torch.zeros(2, dtype=torch.int32, device="meta")
    for keywords in ({}, {"documents": PackedDocuments((2,), starts, ids)}):
        with suppress(Exception):  # it may take no documents, or look at values
            model(ids, **keywords).sum().backward()
    trained = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    unused = [name for name, parameter in trained if parameter.grad is None]
    return unused if len(unused) < len(trained) else []


def _watched(config: ModelConfig, read: set[str]) -> ModelConfig:
    """Returns an equal config that adds the name of each key that is read of it to `read`."""

    class WatchedConfig(ModelConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    watched = object.__new__(WatchedConfig)
    vars(watched).update(vars(config))
    return watched
