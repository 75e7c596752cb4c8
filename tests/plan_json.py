"""The answers of `parallel3d-plan` as JSON, and the errors of commands."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from parallel3d.tools.plan import command

Said = pytest.CaptureFixture[str]


def plan_json(arguments: str, capsys: Said, *, status: int = 0) -> dict[str, Any]:
    """Runs a command, and returns its answer, the one line that it prints."""
    assert command.main(shlex.split(f"{arguments} --json")) == status
    said = capsys.readouterr()
    assert said.err == ""
    (line,) = said.out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def error_line(capsys: Said) -> str:
    """Returns the error of a command, the one line that it printed."""
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    return line
