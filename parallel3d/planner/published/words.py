"""What a case says in words, read into values: by the tables of words.yaml, and figures by patterns of their own."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_COUNTS = {None: 1, "four": 4, "eight": 8}
_COUNT = r"\d+|eight|four"
_OMNI_PATH = rf"({_COUNT})\s*(?:x\s*)?opa links"
_NETWORK = rf"(?:\b({_COUNT})(?:\s*x\s*|\s+)(?:[a-z]+\s+)?)?\b(\d{{2,4}})\s*(?:gbps|gb/s|gb\b|gbit)"
_OMNI_PATH_GBIT = 100.0  # one link (Intel Omni-Path 100 series)


@cache
def _tables() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())
    return tables


def meaning(table: str, text: str) -> Any:
    """Returns what a text means by a table of words.yaml; None where none of the table's patterns is in the text."""
    patterns = _tables()[table].items()
    return next((value for pattern, value in patterns if re.search(pattern, text.lower(), re.DOTALL)), None)


def network_gb_per_s(text: str, gpus_per_node: int) -> float | None:
    """Reads GB/s per device and direction from a source's own words, None where they state no figure."""
    words = text.lower()
    if omni := re.search(_OMNI_PATH, words):
        count, gbit, devices = omni.group(1), _OMNI_PATH_GBIT, gpus_per_node
    elif found := re.search(_NETWORK, words):
        count, gbit, devices = found.group(1), float(found.group(2)), 1 if "per gpu" in words else gpus_per_node
    else:
        return None
    return (_COUNTS[count] if count in _COUNTS else int(count)) * gbit / 8 / devices
