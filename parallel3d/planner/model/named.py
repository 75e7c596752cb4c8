"""Models by name: the shape cards of models/, and shapes that no recipe can train."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from parallel3d.config.recipe import ModelConfig, RopeScaling
from parallel3d.errors import ConfigError
from parallel3d.planner.model.experts import Experts, LatentAttention
from parallel3d.planner.model.shapes import ModelShape, from_config

_TABLE = Path(__file__).with_name("named_shapes.yaml")


def shape_names(cards: Mapping[str, Path]) -> list[str]:
    """Returns every name that `named_shape` knows; `cards` are those of models/."""
    return sorted({*cards, *_load(_TABLE)})


def named_shape(name: str, cards: Mapping[str, Path]) -> ModelShape:
    """Returns the shape of this name. Raises ConfigError with the nearest names."""
    if name in cards:
        return from_config(card_config(name, cards[name]))
    table = _load(_TABLE)
    if name not in table:
        near = get_close_matches(name, [*cards, *table], n=3, cutoff=0.4)
        advice = f"did you mean {', '.join(near)}?" if near else "see parallel3d-plan models"
        raise ConfigError(f"model {name}: unknown; {advice}")
    numbers = table[name]
    if "experts" in numbers:
        numbers["experts"] = Experts(**numbers["experts"])
    if "latent" in numbers:
        numbers["latent"] = LatentAttention(**numbers["latent"])
    return ModelShape(name=name, **numbers)


def card_config(name: str, path: Path) -> ModelConfig:
    """Returns the model of a shape card."""
    numbers = _load(path)
    scaling = numbers.pop("rope_scaling", None)
    return ModelConfig(
        name=name, rope_scaling=None if scaling is None else RopeScaling(**scaling), **numbers
    )


def _load(path: Path) -> dict[str, Any]:
    loaded = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert isinstance(loaded, dict)
    return loaded
