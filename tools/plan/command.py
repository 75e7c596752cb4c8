"""`parallel3d-plan`. Its subcommands are defined in commands.toml."""

from __future__ import annotations

from pathlib import Path

from parallel3d.tools.command_line import CommandLine

COMMAND_LINE = CommandLine(
    "parallel3d-plan", Path(__file__).with_name("commands.toml"), default="recommend"
)
main = COMMAND_LINE.main
