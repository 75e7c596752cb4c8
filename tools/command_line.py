"""Front end of commands with subcommands: parses the command line, runs a subcommand, and prints
its reply or error.

A subcommand's module is imported only after the options are valid. To add a subcommand, write a
function `(options: argparse.Namespace) -> Reply` in a module that does not import torch at its top,
and add an entry to commands.toml, which contains all options and help texts."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import parallel3d
from parallel3d.errors import ConfigError
from parallel3d.schedules.registry import SCHEDULES
from parallel3d.tools.arguments import PARSERS, VERBOSE, Parser
from parallel3d.tools.cli_output import Reply, exit_status

Options = Mapping[str, Mapping[str, Any]]  # Settings of argparse, keyed by the flags of an option.


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """A subcommand as described in commands.toml. `answer` is `module:function` of a function
    (options) -> Reply."""

    answer: str
    summary: str
    does: str = ""  # Description. Default: the summary.
    epilog: str = ""
    takes: str | None = None
    json: str = "print one JSON object instead of the report"
    shared: Sequence[str] = ()
    groups: Mapping[str, Options] = field(default_factory=dict)

    def parser(self, name: str, shared: Mapping[str, Options]) -> Parser:
        """Returns the parser of all options, including --json. `name` is the full name of the
        command, and `shared` has the groups of options that several subcommands share."""
        parser = Parser(
            prog=name,
            usage=self.takes and f"{name} {self.takes}",
            description=self.does or f"{self.summary[0].upper()}{self.summary[1:]}.",
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--json", action="store_true", help=self.json)
        groups: dict[str, Any] = {"options": parser}
        for title, options in [
            *((title, shared[title]) for title in self.shared),
            *self.groups.items(),
        ]:
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            for flags, settings in options.items():
                groups[title].add_argument(*flags.split(), **_argument(settings))
        return parser


def _argument(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the settings of an option in the table to those of argparse."""
    found = dict(settings)
    if "type" in found:
        found["type"] = PARSERS[found["type"]]
    if isinstance(found.get("metavar"), list):
        found["metavar"] = tuple(found["metavar"])
    if found.get("choices") == "$schedules":
        found["choices"] = tuple(SCHEDULES)
    if "help" in found:
        found["help"] = found["help"].replace("$schedules", ", ".join(SCHEDULES))
    return found


class CommandLine:
    """A command whose subcommands are described in the file `table`. If the first argument is an
    option, the subcommand is `default`."""

    def __init__(self, prog: str, table: Path, default: str | None = None) -> None:
        self.prog = prog
        self.default = default
        self.table = tomllib.loads(table.read_text())
        self.commands = {
            name: Subcommand(**entry) for name, entry in self.table["commands"].items()
        }

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Runs the command line and returns the exit status."""
        return exit_status(arguments, self._run)

    def _run(self, words: list[str]) -> int:
        words = [word for word in words if word not in VERBOSE]
        name = words[0] if words else ""
        if name in ("-h", "--help"):
            width = max(map(len, self.commands))
            lines = "\n".join(
                f"  {name:<{width}}  {command.summary}" for name, command in self.commands.items()
            )
            print(self.table["help"].replace("$commands", lines), end="")
            return 0
        if name == "--version":
            print(f"parallel3d {parallel3d.__version__}")
            return 0
        if name.startswith("-") and self.default is not None:
            name = self.default
            words = [name, *words]
        if name not in self.commands:
            near = get_close_matches(name, self.commands, 1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(self.commands)}"
            said = f"{name}: no such command" if name else "no command given"
            raise ConfigError(f"{said}; {advice}; see {self.prog} --help")
        asked = self.parse(name, words[1:])
        module, _, function = self.commands[name].answer.partition(":")
        reply: Reply = vars(import_module(module))[function](asked)
        return reply.print(as_json=asked.json)

    def parse(self, name: str, words: Iterable[str]) -> argparse.Namespace:
        """Parses the options of a subcommand. Raises ConfigError for an unknown one."""
        parser = self.commands[name].parser(f"{self.prog} {name}", self.table.get("shared", {}))
        return parser.parse_intermixed_args([*words])
