"""The models, each readable on one screen, and the shape cards: public sizes as YAML, picked by `model.name`."""

from __future__ import annotations

if __name__ != "parallel3d.models":  # a bare `import models` would make a second class of everything
    raise ImportError("import this as parallel3d.models")

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.errors import ConfigError

if TYPE_CHECKING:
    from parallel3d.parallelize import ModelClass

# model.architecture -> the class, imported when it is asked for
_CLASSES = {"llama": "parallel3d.models.llama:Llama", "gpt": "parallel3d.models.gpt:GPT"}


def shape_cards() -> dict[str, Path]:
    """The shape cards of this folder, by the name that `model.name` takes."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def model_class(architecture: str) -> ModelClass:
    """Returns the class of a model. It imports torch."""
    if architecture not in _CLASSES:
        raise ConfigError(f"model.architecture = {architecture}: must be one of {', '.join(_CLASSES)}")
    module, _, name = _CLASSES[architecture].partition(":")
    found: ModelClass = getattr(import_module(module), name)
    return found
