"""Describes tensors, or how the tensors of a checkpoint differ from those of a model, with one line
for many blocks. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

_BLOCK = re.compile(r"\.\d+\.")  # the number of a block in a tensor's name
Shapes = Mapping[str, Sequence[int]]  # by the tensors' names


def differences(there: Shapes, here: Shapes) -> list[str]:
    """Returns a line for each tensor that only one of both has, or has in another shape. Tensors of
    several blocks with one difference share a line."""
    found = []
    for name in there.keys() | here.keys():
        shapes = [list(each[name]) if name in each else "missing" for each in (there, here)]
        if shapes[0] != shapes[1]:
            found.append((name, f"is {shapes[0]} there and {shapes[1]} here"))
    return by_block(found)


def by_block(descriptions: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each tensor's name and description, in the order of the names. Tensors of
    several blocks with the same description share a line: `layers.*.mlp.up.weight (4 tensors)`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, words in sorted(descriptions):
        groups.setdefault((_BLOCK.sub(".*.", name, count=1), words), []).append(name)
    lines = []
    for (pattern, words), names in groups.items():
        shown = names[0] if len(names) == 1 else f"{pattern} ({len(names)} tensors)"
        lines.append(f"{shown} {words}")
    return lines
