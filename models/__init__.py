"""The models, each readable on one screen, and the shape cards: public sizes as YAML, picked by
`model.name`."""

from __future__ import annotations

# a bare `import models` would make a second class of everything
if __name__ != "parallel3d.models":
    raise ImportError("import this as parallel3d.models")

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel3d.build_engine import ModelClass
    from parallel3d.config.recipe import ModelConfig


def shape_cards() -> dict[str, Path]:
    """The shape cards of this folder, by the name that `model.name` takes."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def model_class(architecture: str) -> ModelClass:
    """Returns the class of a model by its `model.architecture`. It imports torch, and the module of
    a class of the user's. Raises ConfigError where there is no such class."""
    from parallel3d.models.custom import import_model
    from parallel3d.models.gpt import GPT
    from parallel3d.models.llama import Llama

    classes: dict[str, ModelClass] = {"llama": Llama, "gpt": GPT}
    return classes[architecture] if architecture in classes else import_model(architecture)


def check_model(config: ModelConfig) -> None:
    """Raises ConfigError where a class of the user's is not there, or is no model that can be
    trained; what this project ships is not looked at, and torch not imported for it."""
    if config.is_custom:
        from parallel3d.models.custom import check_class

        check_class(config)
