"""`parallel3d-plan`: the front that reads the command line, prints a subcommand's answer and tells
errors.

A subcommand's module is imported, and the planner with it, once the options are known to be right.
To add one: a module with `answer(options: argparse.Namespace) -> Reply`, which raises this
package's errors and imports no torch at its top, and an entry in commands.toml, which holds all
options and the texts of --help.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import parallel3d
from parallel3d.errors import ConfigError
from parallel3d.schedules.registry import SCHEDULES
from parallel3d.tools.arguments import PARSERS, VERBOSE, Parser
from parallel3d.tools.reply import Reply, exit_status

_DEFAULT = "recommend"
_TABLE = tomllib.loads(Path(__file__).with_name("commands.toml").read_text())


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand, as commands.toml says it. `answer` is `module:function` of a function (options)
    -> Reply."""

    answer: str
    summary: str
    does: str
    epilog: str = ""
    takes: str | None = None
    json: str = "one JSON object on stdout and nothing else"
    shared: Sequence[str] = ()
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def parser(self, name: str) -> Parser:
        """Returns the parser of all options, --json among them."""
        parser = Parser(
            prog=f"parallel3d-plan {name}",
            usage=self.takes and f"parallel3d-plan {name} {self.takes}",
            description=self.does,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--json", action="store_true", help=self.json)
        groups: dict[str, Any] = {"options": parser}
        for title, options in [
            *((title, _TABLE["shared"][title]) for title in self.shared),
            *self.groups.items(),
        ]:
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            for flags, settings in options.items():
                groups[title].add_argument(*flags.split(), **_argument(settings))
        return parser


def _argument(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns argparse's settings of an option, from those of the table."""
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


COMMANDS = {name: Command(**entry) for name, entry in _TABLE["commands"].items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit status."""
    return exit_status(argv, _run)


def _run(words: list[str]) -> int:
    words = [word for word in words if word not in VERBOSE]
    name = words[0] if words else ""
    if name in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        lines = "\n".join(
            f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()
        )
        print(_TABLE["help"].replace("$commands", lines), end="")
        return 0
    if name == "--version":
        print(f"parallel3d {parallel3d.__version__}")
        return 0
    if name.startswith("-"):
        name = _DEFAULT
        words = [_DEFAULT, *words]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(COMMANDS)}"
        said = f"{name}: no such command" if name else "no command is given"
        raise ConfigError(f"{said}; {advice}; see parallel3d-plan --help")
    command = COMMANDS[name]
    asked = command.parser(name).parse_intermixed_args(words[1:])
    module, _, function = command.answer.partition(":")
    reply: Reply = vars(import_module(module))[function](asked)
    return reply.print(as_json=asked.json)
