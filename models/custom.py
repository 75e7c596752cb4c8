"""A model of the user's own, which `model.architecture: module:Class` names: its import, and what is asked of its class
before any worker starts. To import a module is to run it, so nothing but a recipe names one."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from torch import nn

from parallel3d.config.load import read_options
from parallel3d.config.recipe import ModelConfig
from parallel3d.config.rules import refuse
from parallel3d.config.yaml_text import shown
from parallel3d.errors import ConfigError
from parallel3d.layers.parameter import ParallelModule
from parallel3d.models.decoder import Decoder, NoOptions
from parallel3d.parallelize import ModelClass
from parallel3d.pipeline.stage import FIRST_PARTS, LAST_PARTS

_NOT_THE_CLASS = ("name", "architecture", "options")  # keys that pick the class, or that its own dataclass checks


def import_class(architecture: str) -> ModelClass:
    """Imports the module of `module:Class` and returns the class. Raises ConfigError where there is no such module or
    class, and with the traceback of the user's own code where that fails."""
    said = f"model.architecture = {architecture}"
    module_name, _, name = architecture.partition(":")
    with _told_as_theirs(f"{said}: importing {module_name} fails"):
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # a module that the user's own imports
            where = "it is looked for on PYTHONPATH, beside the recipe and in the current folder"
            raise ConfigError(f"{said}: there is no module {error.name}; {where}; try PYTHONPATH=its/folder") from None
    found = getattr(module, name, None)
    if not (inspect.isclass(found) and issubclass(found, nn.Module)):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        models = [key for key in own if inspect.isclass(vars(module)[key]) and issubclass(vars(module)[key], nn.Module)]
        near = get_close_matches(name, models, 1) or models[-1:] or ["MyModel"]
        fault = "is no torch.nn.Module" if found is not None else "is not there"
        file = getattr(module, "__file__", None) or "built into Python"
        raise ConfigError(f"{said}: {name} {fault} in {module_name} ({file}); try {module_name}:{near[0]}")
    return found


def check_class(config: ModelConfig) -> None:
    """Builds the model once, on the meta device and whole, and raises ConfigError where its options do not fit its
    class, where the class never reads a key that the recipe sets, or where what it builds cannot be cut into stages,
    split and stepped."""
    model_class, said = import_class(config.architecture), f"model.architecture = {config.architecture}"
    if isinstance(model_class, type) and issubclass(model_class, Decoder) and model_class.parts is Decoder.parts:
        raise ConfigError(f"{said}: has no method parts, which says what a Decoder is made of; try models/llama.py's")
    read_options(getattr(model_class, "Options", NoOptions), config.options)
    read: set[str] = set()
    with _told_as_theirs(f"{said}: building it fails"):
        model = model_class(
            _watched(config, read),
            tp=None,
            sequence_parallel=False,
            recompute="none",
            recompute_every=1,
            device="meta",
        )
    refuse([f"{said}: {fault}" for fault in _faults(model, config)])
    unread = [
        f"model.{key.name} = {shown(getattr(config, key.name))}: {config.architecture} does not read it when it is "
        f"built; drop it, or read it there"
        for key in fields(config)
        if key.default is not MISSING and key.name not in {*_NOT_THE_CLASS, *read}
        if getattr(config, key.name) != key.default
    ]
    refuse(unread)


def _faults(model: nn.Module, config: ModelConfig) -> Iterator[str]:
    """Yields what a pipeline, tp or an optimizer would miss in a model."""
    parts = (*FIRST_PARTS, *LAST_PARTS)
    for part in (*parts, "layers"):
        if not isinstance(getattr(model, part, None), nn.Module):
            yield f"has no module {part}, where stages are cut; derive it from parallel3d.models.decoder.Decoder"
            return
    blocks = dict(model.get_submodule("layers").named_children())
    if not isinstance(model.layers, nn.ModuleDict) or list(blocks) != [str(i) for i in range(config.layers)]:
        wanted = f"an nn.ModuleDict of model.layers = {config.layers} blocks, named '0' to '{config.layers - 1}'"
        yield f"its layers are {shown(list(blocks))}; make them {wanted}"
    declared = {
        id(getattr(part, name)) for part in model.modules() if isinstance(part, ParallelModule) for name in part.specs
    }
    for name, parameter in model.named_parameters():
        if name.split(".")[0] not in (*parts, "layers"):
            yield f"its parameter {name} belongs to no stage; put it into a block, or into {' or '.join(parts)}"
        elif id(parameter) not in declared:
            words = "is none of a ParallelModule's, so that neither its start nor its place over tp is known"
            yield f"its parameter {name} {words}; try add_parameter(name, ParameterSpec(shape, None, init))"
    if any(True for _ in model.buffers()):
        name = next(name for name, _ in model.named_buffers())
        yield f"its buffer {name} would be empty where the model is built on the meta device; compute it in the forward"


def _watched(config: ModelConfig, read: set[str]) -> ModelConfig:
    """Returns an equal config that adds the name of each key that is read of it to `read`."""

    class WatchedConfig(ModelConfig):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    watched = object.__new__(WatchedConfig)
    vars(watched).update(vars(config))
    return watched


@contextmanager
def _told_as_theirs(words: str) -> Iterator[None]:
    """Turns an error of the user's module into a ConfigError with the part of its traceback that is in their files. An
    error of this project's that is about the recipe stays as it is."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        told = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        raise ConfigError(f"{words}:\n{told}") from error


def _is_ours(file: str) -> bool:
    return file == __file__ or "importlib" in file
