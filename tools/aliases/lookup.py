"""Looks up names of models, hardware files and frameworks, with the aliases of aliases.toml.
Suggests similar names for unknown ones. Names must match in full, except for case, separators, the
vendor and, for models, the owner and suffixes such as -instruct.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.planner.hardware.cluster import load_cluster
from parallel3d.planner.hardware.framework import FRAMEWORKS
from parallel3d.planner.model.named import shape_names
from parallel3d.recipes import shipped_recipes
from parallel3d.tools.arguments import HARDWARE

Kind = Literal["model", "hardware", "framework"]
_OPTIONS: dict[Kind, str] = {"model": "--model", "hardware": "--gpu", "framework": "--framework"}
# Suffixes of model variants, which have the same shape.
_TUNED = re.compile(r"([\s_-]+(instruct|base|chat|hf|it|pt))+\s*$", re.IGNORECASE)
_ALIASES: dict[str, dict[str, list[str]]] = tomllib.loads(
    Path(__file__).with_name("aliases.toml").read_text()
)


def find_name(kind: Kind, text: str) -> str | None:
    """Returns the project's name for a model, hardware file or framework, or None if it is unknown.

    Hardware can also be given by its CUDA device name, and a model by its Hugging Face name.
    """
    found = _by_plain_name(kind)
    own = text.rpartition("/")[2] if kind == "model" else text
    plain = _plain(own)
    if plain not in found and kind == "model":
        plain = _plain(_TUNED.sub("", own))
    if plain in found:
        return found[plain]
    if kind == "hardware":
        for name in known_names(kind):
            if plain in map(_plain, load_cluster(name, [HARDWARE]).device.cuda_names):
                return load_cluster(name, [HARDWARE]).device_file
    return None


def known_name(kind: Kind, text: str) -> str:
    """Returns the project's name, as `find_name` does. Raises ConfigError with similar names if it
    is unknown."""
    found = find_name(kind, text)
    if found is not None:
        return found
    place = f"hardware {text}" if kind == "hardware" else f"{_OPTIONS[kind]} {text}"
    table = _by_plain_name(kind)
    close = [table[each] for each in get_close_matches(_plain(text), table, n=6, cutoff=0.55)]
    near = list(dict.fromkeys(close))[:3]
    known = f"known are {', '.join(sorted(known_names(kind)))}"
    if kind == "model":
        known = "see parallel3d-plan models"
    told = f"did you mean {', '.join(near)}?" if near else known
    others = {
        "model": "or use the path of its config.json",
        "framework": "or use unknown, which stands for a typical framework",
    }
    raise ConfigError(f"{place}: unknown; {told} {others.get(kind, '')}".rstrip())


def known_names(kind: Kind) -> Collection[str]:
    """Returns all names of a kind, without aliases."""
    if kind == "model":
        return [*shape_names(shape_cards()), *shipped_recipes()]
    if kind == "framework":
        return FRAMEWORKS
    return sorted(path.stem for path in HARDWARE.glob("*.yaml"))


@cache
def _by_plain_name(kind: Kind) -> dict[str, str]:
    found = {}
    for name, aliases in _ALIASES[kind].items():
        for alias in aliases:
            found[_plain(alias)] = name
    for name in known_names(kind):
        found[_plain(name)] = name
    return found


def _plain(name: str) -> str:
    """Normalizes a name: lower case, without separators and vendor."""
    plain = re.sub(r"[\s_-]+", "", name.lower())
    return plain.removeprefix("nvidia").removeprefix("amd")
