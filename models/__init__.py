"""Model definitions, and YAML cards with public model sizes for `model.name`."""

from __future__ import annotations

# A bare `import models` would create second copies of all classes.
if __name__ != "parallel3d.models":
    raise ImportError("import this as parallel3d.models")

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel3d.build_engine import ModelClass
    from parallel3d.config.recipe import ModelConfig


def shape_cards() -> dict[str, Path]:
    """Returns the paths of the YAML cards, keyed by the value of `model.name`."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def model_class(architecture: str) -> ModelClass:
    """Returns the class of `model.architecture`. Raises ConfigError if there is no such class.

    Imports torch, and the user's module for a custom class.
    """
    from parallel3d.models.custom import import_model
    from parallel3d.models.gpt import GPT
    from parallel3d.models.llama import Llama

    classes: dict[str, ModelClass] = {"llama": Llama, "gpt": GPT}
    return classes[architecture] if architecture in classes else import_model(architecture)


def check_model(config: ModelConfig) -> None:
    """Raises ConfigError if a custom model class is missing or cannot be trained.

    Built-in models need no check, so torch is not imported for them.
    """
    if config.is_custom:
        from parallel3d.models.custom import check_class

        check_class(config)
