"""Models by name: the shape cards of models/, and named_shapes.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from parallel3d.config.recipe import ModelConfig
from parallel3d.config.schema import adapter
from parallel3d.errors import ConfigError
from parallel3d.planner.model.shapes import ModelShape, from_config

_TABLE = Path(__file__).with_name("named_shapes.yaml")


def shape_names(cards: Mapping[str, Path]) -> list[str]:
    """Returns all names that `named_shape` accepts. `cards` are those of models/."""
    return sorted({*cards, *_load(_TABLE)})


def named_shape(name: str, cards: Mapping[str, Path]) -> ModelShape:
    """Returns the shape with this name. Raises ConfigError if it is unknown."""
    if name in cards:
        return from_config(card_config(name, cards[name]))
    table = _load(_TABLE)
    if name not in table:
        raise ConfigError(f"model {name}: unknown; parallel3d-plan models lists the names")
    shape: ModelShape = adapter(ModelShape).validate_python({"name": name, **table[name]})
    return shape


def card_config(name: str, path: Path) -> ModelConfig:
    """Returns the model configuration of a shape card."""
    config: ModelConfig = adapter(ModelConfig).validate_python({"name": name, **_load(path)})
    return config


def _load(path: Path) -> dict[str, Any]:
    loaded = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert isinstance(loaded, dict)
    return loaded
