"""Builds models of Hugging Face Transformers from their configs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from parallel3d.config.hugging_face import config_of
from parallel3d.config.recipe import ModelConfig
from parallel3d.errors import ConfigError


def construct_hugging_face(config: ModelConfig) -> nn.Module:
    """Returns the model of `model.config`, with a language-model head and without dropout.

    Raises ConfigError if transformers is not installed or does not know the model. Code in the
    folder of the config is not run.
    """
    try:
        transformers: Any = import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "model.architecture = transformers: the package is not installed; try "
            "pip install transformers"
        ) from error
    said = f"model.config = {config.config}"
    keys = config_of(config)
    kind = keys.get("model_type")
    try:
        own = transformers.AutoConfig.for_model(**keys)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{said}: model_type = {kind}: transformers {transformers.__version__} cannot read it "
            f"({str(error).splitlines()[0]})"
        ) from error
    for key in vars(own):
        if key.endswith(("dropout", "_pdrop")):
            setattr(own, key, 0.0)
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(own)
    except Exception as error:  # Models check their configs in different ways.
        raise ConfigError(
            f"{said}: model_type = {kind}: cannot be built as a causal language model "
            f"({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    return model.float()
