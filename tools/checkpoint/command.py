"""The command `parallel3d-checkpoint`. Its subcommands are in commands.toml."""

from __future__ import annotations

from pathlib import Path

from parallel3d.tools.command_line import CommandLine

main = CommandLine("parallel3d-checkpoint", Path(__file__).with_name("commands.toml")).main
