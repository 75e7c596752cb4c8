"""Model definitions, and YAML cards with public model sizes for `model.name`."""

from __future__ import annotations

# A bare `import models` would create second copies of all classes.
if __name__ != "parallel3d.models":
    raise ImportError("import this as parallel3d.models")

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from parallel3d.build_engine import ModelClass
    from parallel3d.config.recipe import ModelConfig, Recipe


def shape_cards() -> dict[str, Path]:
    """Returns the paths of the YAML cards, keyed by the value of `model.name`."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def model_class(architecture: str) -> ModelClass:
    """Returns what builds the model of `model.architecture`. Raises ConfigError for other names.

    Imports torch, and the user's module for a custom class.
    """
    from parallel3d.convert.hugging_face import construct_hugging_face
    from parallel3d.existing_model import ExistingModel, import_model
    from parallel3d.models.gpt import GPT
    from parallel3d.models.llama import Llama

    own: dict[str, ModelClass] = {
        "llama": Llama,
        "gpt": GPT,
        "transformers": ExistingModel(construct_hugging_face),
    }
    return own[architecture] if architecture in own else import_model(architecture)


def unsharded_model(config: ModelConfig) -> nn.Module:
    """Builds the full model on the meta device."""
    return model_class(config.architecture)(
        config,
        tp=None,
        sequence_parallel=False,
        recompute="none",
        recompute_every=1,
        device="meta",
    )


def check_model(recipe: Recipe) -> None:
    """Raises ConfigError if a model from outside this project is missing or cannot be trained.

    Built-in models need no check, so torch is not imported for them.
    """
    if recipe.model.is_custom:
        from parallel3d.models.custom import check_custom

        check_custom(model_class(recipe.model.architecture), recipe)
