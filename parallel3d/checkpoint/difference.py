"""Describes tensors, or how the tensors of a checkpoint differ from those of a model, with one line
for many blocks. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

_BLOCK = re.compile(r"\.(\d+)\.")  # the number of a block in a tensor's name
Shapes = Mapping[str, Sequence[int]]  # by the tensors' names


def differences(there: Shapes, here: Shapes) -> list[str]:
    """Returns a line for each tensor that only one of both has, or has in another shape. Tensors of
    several blocks with one difference share a line: `model.layers.{2-5}.mlp.up.weight is not there,
    ...`."""

    def find() -> Iterator[tuple[str, str]]:
        for name in there.keys() | here.keys():
            if name not in there:
                yield name, f"is not there, and {list(here[name])} here"
            elif name not in here:
                yield name, f"is {list(there[name])} there, and not here"
            elif tuple(there[name]) != tuple(here[name]):
                yield name, f"is {list(there[name])} there and {list(here[name])} here"

    return by_block(find())


def by_block(descriptions: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each tensor's name and description, in the order of the names. Tensors of
    several blocks with the same description share a line."""
    blocks: dict[tuple[str, str], list[int]] = {}  # by the name without its block, and description
    for name, words in sorted(descriptions, key=lambda pair: _sort_key(pair[0])):
        numbers = blocks.setdefault((_BLOCK.sub(".{}.", name, count=1), words), [])
        if block := _BLOCK.search(name):
            numbers.append(int(block[1]))
    return [
        f"{name.replace('{}', _ranges(numbers), 1)} {words}"
        for (name, words), numbers in blocks.items()
    ]


def _sort_key(name: str) -> str:
    """Returns a key that sorts block 10 after block 9."""
    return re.sub(r"\d+", lambda number: number[0].rjust(9, "0"), name)


def _ranges(numbers: list[int]) -> str:
    """Returns ascending numbers in short: 3, or {0-3,7}."""
    runs: list[list[int]] = []
    for number in numbers:
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    words = ",".join(f"{run[0]}-{run[-1]}" for run in runs)
    words = re.sub(r"\b(\d+)-\1\b", r"\1", words)
    return words if words.isdigit() else f"{{{words}}}"
