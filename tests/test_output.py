"""Every command whose stdout is full, closed or no longer read: one line or none, and never status
0."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMANDS = [
    "recipes.pretrain quickstart --print-config",
    "recipes.pretrain --help",
    "tools.plan timeline --schedule 1f1b --pp 2 --microbatches 2",
    "tools.check_layout --help",
]


def ended(arguments: list[str], redirection: str, *, unbuffered: bool) -> tuple[int, str]:
    """Runs Python in a shell, with a pipe without a reader as stdout unless the redirection is of
    stdout. Returns the exit status and what is on stderr."""
    script = " ".join(["exec", sys.executable, *arguments, redirection])
    environment = os.environ | {"PYTHONUNBUFFERED": "1" if unbuffered else ""}
    reader, writer = os.pipe()
    os.close(reader)
    command = ["bash", "-c", script]
    done = subprocess.run(
        command,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=60,
    )
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_stdout_is_no_traceback_and_not_status_0(command: str) -> None:
    module, *options = command.split()
    arguments = ["-m", f"parallel3d.{module}", *options]
    is_odd = bool(COMMANDS.index(command) % 2)
    full = "error: stdout: cannot be written: No space left on device\n"
    assert ended(arguments, "> /dev/full", unbuffered=is_odd) == (73, full)


@pytest.mark.parametrize(
    "command, unbuffered", [("tools.plan --help", False), ("tools.data merge --help", True)]
)
def test_a_reader_that_has_gone_ends_a_command_silently_and_a_closed_stdout_is_refused(
    command: str, unbuffered: bool
) -> None:
    module, *options = command.split()
    arguments = ["-m", f"parallel3d.{module}", *options]
    assert ended(arguments, "", unbuffered=unbuffered) == (141, "")
    closed = "error: stdout: is closed; try > /dev/null\n"
    assert ended(arguments, ">&-", unbuffered=unbuffered) == (73, closed)
