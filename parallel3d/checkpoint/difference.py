"""What is said of a checkpoint's tensors, a line for many blocks: how they differ from those of the model that is to
have them, all at once. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

_BLOCK = re.compile(r"\.(\d+)\.")  # the number of a block in a tensor's name
Shapes = Mapping[str, Sequence[int]]  # by the tensors' names


def differences(there: Shapes, here: Shapes) -> list[str]:
    """Returns a line for each tensor that only one of both has, or has in another shape. Tensors of several blocks
    with one difference share a line: `model.layers.{2-5}.mlp.up.weight is not there, ...`."""

    def found() -> Iterator[tuple[str, str]]:
        for name in there.keys() | here.keys():
            if name not in there:
                yield name, f"is not there, and {list(here[name])} here"
            elif name not in here:
                yield name, f"is {list(there[name])} there, and not here"
            elif tuple(there[name]) != tuple(here[name]):
                yield name, f"is {list(there[name])} there and {list(here[name])} here"

    return by_block(found())


def by_block(said: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each tensor's name and what is said of it, in the names' order, in which block 10 comes after
    block 9. Tensors of several blocks of which the same is said share a line."""
    found: dict[tuple[str, str], list[int]] = {}  # (a name without its block's number, what is said) -> the numbers
    for name, words in sorted(said, key=lambda pair: _in_order(pair[0])):
        block = _BLOCK.search(name)
        found.setdefault((_BLOCK.sub(".{}.", name, count=1), words), []).extend([int(block[1])] if block else [])
    return [f"{name.replace('{}', _ranges(blocks), 1)} {words}" for (name, words), blocks in found.items()]


def _in_order(name: str) -> list[tuple[bool, int, str]]:
    """Returns what sorts block 10 after block 9."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]


def _ranges(numbers: Iterable[int]) -> str:
    """Returns ascending numbers in short: 3, or {0-3,7}."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return words if words.isdigit() or not words else f"{{{words}}}"
