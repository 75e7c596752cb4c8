"""What the commands' argument parsers share: one-line errors, recipes, and checked numbers. Imports next to nothing."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from typing import NoReturn

from parallel3d.errors import ConfigError

_MISSING = "the following arguments are required: "


class Parser(argparse.ArgumentParser):
    """A parser whose usage errors are ConfigErrors: one line, which says where to read on."""

    def error(self, message: str) -> NoReturn:
        if message.startswith(_MISSING):
            # Intermixed parsing takes those that may be left out, too, for required.
            missing = [name for name in message.removeprefix(_MISSING).split(", ") if "=" not in name]
            example = self._example()
            message = f"{', '.join(missing)}: required" + (f"; try {example}" if example else "")
        raise ConfigError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def _example(self) -> str | None:
        """The first that --help shows."""
        lines = (line.strip() for line in (self.epilog or "").splitlines())
        return next((line.partition("  #")[0].rstrip() for line in lines if line.startswith(self.prog)), None)


def plan_parser(command: str, *, takes: str, does: str, epilog: str) -> Parser:
    """Of a command of parallel3d-plan, with --json: options in full, the epilog as it is written."""
    parser = Parser(
        prog=f"parallel3d-plan {command}",
        usage=f"parallel3d-plan {command} {takes}",
        description=does,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout and nothing else")
    return parser


def add_recipe(parser: argparse.ArgumentParser, shipped: Iterable[str]) -> None:
    """A recipe and what a command line changes of it, as `recipe` (None: not given) and `overrides`."""
    names = ", ".join(shipped)
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help=f"a YAML file, or the name of a shipped recipe: {names}"
    )
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="a key of the recipe and its value, such as train.steps=50"
    )


def whole(text: str) -> int:
    """The type of an option that counts something, from one on."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return number


def amount(what: str, *, zero: bool = True) -> Callable[[str], float]:
    """The type of an option that measures something: finite, and not below zero."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and (number > 0 or (zero and number == 0))):
            least = "at least 0" if zero else "above 0"
            raise argparse.ArgumentTypeError(f"{text!r} must be {what}, {least} and finite")
        return number

    return parse
