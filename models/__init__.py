"""The models, each readable on one screen, and the shape cards: public sizes as YAML, picked by `model.name`."""

from __future__ import annotations

if __name__ != "parallel3d.models":  # a bare `import models` would make a second class of everything
    raise ImportError("import this as parallel3d.models")

from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.errors import ConfigError

if TYPE_CHECKING:
    from parallel3d.parallelize import ModelClass


def shape_cards() -> dict[str, Path]:
    """The shape cards of this folder, by the name that `model.name` takes."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def model_class(architecture: str) -> ModelClass:
    """Returns the class of a model by its `model.architecture`. It imports torch."""
    from parallel3d.models.gpt import GPT
    from parallel3d.models.llama import Llama

    classes: dict[str, ModelClass] = {"llama": Llama, "gpt": GPT}
    if architecture not in classes:
        raise ConfigError(f"model.architecture = {architecture}: must be one of {', '.join(classes)}")
    return classes[architecture]
