"""`parallel3d-plan --html`: one file that says what the JSON says, in figures that can be read
without seeing them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from parallel3d.tools.plan import command as plan

Said = pytest.CaptureFixture[str]
SVG = "{http://www.w3.org/2000/svg}"
PIPELINE = (
    "--model llama3-8b --gpu a100-40gb --gpus 16 --seq-len 4096 --global-batch 128 --fix pp=4 "
    "--tokens 300B"
)
LARGE = (
    "--model gpt3-175b --gpu a100 --gpus 1024 --seq-len 2048 --global-batch 1536 --fix pp=32 tp=8 "
    "schedule=1f1b"
)
TOO_LARGE = "--model llama3-70b --gpu h100 --gpus 8 --seq-len 8192 --global-batch 512"


def written(
    arguments: str, tmp_path: Path, capsys: Said, *, status: int = 0
) -> tuple[ElementTree.Element, Any, str]:
    """Returns the page as XML, the JSON of the same plan, and the file's text."""
    file = tmp_path / "plan.html"
    assert plan.main(shlex.split(f"{arguments} --json --html {file}")) == status
    found = json.loads(capsys.readouterr().out)
    text = file.read_text(encoding="utf-8")
    return ElementTree.fromstring(text), found, text


@pytest.mark.parametrize("arguments", [PIPELINE, LARGE])
def test_it_is_one_small_file_that_needs_no_network_and_no_script(
    arguments: str, tmp_path: Path, capsys: Said
) -> None:
    page, _, text = written(arguments, tmp_path, capsys)
    assert len(text) < 300_000
    assert not [
        element for element in page.iter() if element.tag in ("script", "link", "img", "iframe")
    ]
    assert text.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert "prefers-color-scheme: dark" in text
