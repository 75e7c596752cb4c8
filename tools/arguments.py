"""Shared parts of all argument parsers: one-line errors, recipes, and amounts with units.

This module imports very little, so that --help and errors in options appear at once."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from parallel3d.errors import ConfigError

# Folder of the shipped hardware files.
HARDWARE = Path(__file__).parent / "hardware"

VERBOSE = ("-v", "--verbose")
_MOST_SIZES = 32  # Maximum number of sizes in a range.
_MISSING = "the following arguments are required: "
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SHARES = {"": 1.0, "%": 0.01}
_BYTES = {"gib": 2.0**30, "gb": 1e9, "mib": 2.0**20, "mb": 1e6, "tib": 2.0**40, "tb": 1e12}
# Rates are case-sensitive: GB/s means bytes, Gb/s means bits. A bare number and gb/s mean GB/s, as
# in the option names (--network-gb-per-s).
_RATES = {
    **{"": 1e9, "gb/s": 1e9, "GB/s": 1e9, "GBps": 1e9, "GB/s/gpu": 1e9, "TB/s": 1e12, "MB/s": 1e6},
    **dict.fromkeys(("Gbps", "gbps", "Gb/s", "Gbit/s"), 1e9 / 8),
    **dict.fromkeys(("Tbps", "Tb/s"), 1e12 / 8),
}
_NUMBER = re.compile(r"((?:[0-9][0-9_,]*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*(.*)")


class Parser(argparse.ArgumentParser):
    """An argument parser with --verbose. Its usage errors are ConfigErrors of one line that refer
    to --help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        words = "also show the traceback of an error"
        self.add_argument(*VERBOSE, action="store_true", help=words)

    def error(self, message: str) -> NoReturn:
        if message.startswith(_MISSING):
            # Intermixed parsing also reports optional positional arguments as required.
            missing = [
                name for name in message.removeprefix(_MISSING).split(", ") if "=" not in name
            ]
            lines = (line.strip() for line in (self.epilog or "").splitlines())
            example = next(
                (line.partition("  #")[0].rstrip() for line in lines if line.startswith(self.prog)),
                None,
            )
            message = f"{', '.join(missing)}: required" + (f"; try {example}" if example else "")
        if message.endswith("expected one argument"):
            message += "; write --OPTION=VALUE for a value that begins with -"
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


def add_recipe(parser: argparse.ArgumentParser, shipped: Iterable[str]) -> None:
    """Adds the arguments `recipe` (None if not given) and `overrides`."""
    names = ", ".join(shipped)
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        nargs="?",
        help=f"recipe: a YAML file, or the name of a shipped recipe: {names}",
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="key of the recipe to change, and its value, such as train.steps=50",
    )


def new_path(text: str) -> Path:
    """Parses the path of a new file or folder."""
    path = Path(text)
    if path.name in ("", ".."):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a path with a file name, such as data/web"
        )
    return path


def whole(text: str) -> int:
    """Parses a positive integer."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return number


def sizes(text: str) -> tuple[int, ...]:
    """Parses numbers of devices: 16,24,32, or the powers of two in 64-1024."""
    first, dash, last = text.partition("-")
    try:
        numbers = [whole(part) for part in ([first, last] if dash else text.split(","))]
    except argparse.ArgumentTypeError as error:
        message = f"{text!r} must be numbers of devices, such as 16,24,32 or 64-1024"
        raise argparse.ArgumentTypeError(message) from error
    if dash:
        numbers = [
            numbers[0] << power for power in range(_MOST_SIZES) if numbers[0] << power <= numbers[1]
        ]
        if not numbers:
            raise argparse.ArgumentTypeError(
                f"{text!r} must begin with the smaller number, such as 64-1024"
            )
    return tuple(numbers)


def amount(what: str, *, zero: bool = True) -> Callable[[str], float]:
    """Returns a parser for a finite number >= 0, or > 0 if `zero` is False. `what` names it in
    errors.
    """
    least = "at least 0" if zero else "above 0"

    def parse(text: str) -> float:
        return _with_unit(text, {"": 1.0}, f"{what}, {least} and finite", zero=zero)

    return parse


def tokens(text: str) -> float:
    """Parses a number of tokens: 2T, 300B, 1e12."""
    return _with_unit(text, _COUNTS, "a number of tokens, such as 300B, 2T or 1e12")


def memory_bytes(text: str) -> float:
    """Parses 80GB (powers of ten) or 80GiB (powers of two) as bytes."""
    return _with_unit(text, _BYTES, "an amount of memory with its unit, such as 80GB or 75GiB")


def bytes_per_s(text: str) -> float:
    """Parses 50 or 50GB/s (bytes), 400Gbps or 400Gb/s (bits) as bytes per second."""
    return _with_unit(text, _RATES, "GB/s, such as 50, 50GB/s or 400Gbps", any_case=False)


def dollars(text: str) -> float:
    """Parses a price in US dollars: 2.5, $2.5 or 2.5/gpu-h."""
    bare = text.strip().removeprefix("$").lower()
    for per in ("/gpu-hour", "/gpu-h", "/gpu/h", "/hour", "/h"):
        bare = bare.removesuffix(per)
    return _with_unit(bare, {"": 1.0}, "US dollars per GPU-hour, such as 2.5", said=text)


def fraction(text: str) -> float:
    """Parses a fraction above 0 and up to 1: 0.9 or 90%."""
    what = "a fraction above 0 and at most 1, such as 0.92"
    return _with_unit(text, _SHARES, what, below=1 + 1e-9)


def imbalance(text: str) -> float:
    """Parses a ratio of at least 1."""
    what = "a ratio of at least 1, such as 1.2"
    ratio = _with_unit(text, {"": 1.0}, what)
    if ratio < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be {what}")
    return ratio


def share(text: str) -> float:
    """Parses a fraction from 0 to 1, inclusive: 0.04 or 4%."""
    return _with_unit(
        text, _SHARES, "a fraction from 0 to 1, such as 0.04", below=1 + 1e-9, zero=True
    )


def chance(text: str) -> float:
    """Parses a probability above 0 and below 1: 0.05 or 5%."""
    return _with_unit(text, _SHARES, "a probability above 0 and below 1, such as 0.05", below=1.0)


def _with_unit(
    text: str,
    units: dict[str, float],
    what: str,
    *,
    said: str | None = None,
    any_case: bool = True,
    below: float = math.inf,
    zero: bool = False,
) -> float:
    """Parses a number with one of `units`. It must be above 0 (or at least 0 with `zero`) and less
    than `below`. In errors, `what` describes it and `said` quotes it."""
    found = _NUMBER.fullmatch(text.strip())
    unit = found[2].strip() if found else ""
    unit = unit.lower() if any_case else unit
    number = float(re.sub("[_,]", "", found[1])) if found else math.nan
    value = number * units.get(unit, math.nan)
    if not 0 <= value < below or (value == 0 and not zero):
        raise argparse.ArgumentTypeError(f"{said or text!r} must be {what}")
    return value


_BY_NAME: tuple[Callable[[str], Any], ...] = (
    *(new_path, int, whole, sizes, tokens, memory_bytes, bytes_per_s),
    *(dollars, fraction, imbalance, share, chance),
)
PARSERS: dict[str, Callable[[str], Any]] = {  # Keyed by the names that commands.toml uses.
    **{parser.__name__: parser for parser in _BY_NAME},
    **{"path": Path, "time": amount("a time"), "days": amount("days", zero=False)},
    **{"hours": amount("hours", zero=False), "seconds": amount("seconds", zero=False)},
}
