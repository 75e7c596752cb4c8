"""The pages name files, modules, recipe keys and links that exist."""

from __future__ import annotations

import dataclasses
import re
import runpy
import subprocess
import sys
import typing
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from parallel3d.config.recipe import Recipe

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*/*.md")]),
]
_TOPS = "parallel3d|models|recipes|tools|tests|docs"
_PATH = re.compile(rf"(?<![\w/.<])((?:{_TOPS})/[\w/]+\.(?:py|yaml|md|txt|json))\b")
_MODULE = re.compile(r"python -m (parallel3d(?:\.\w+)+)")
_LINK = re.compile(r"\]\(([^)#:\s\[\]]+\.\w+)(#[^)\s]+)?\)")
_SECTIONS = tuple(field.name for field in dataclasses.fields(Recipe))
_KEY = re.compile(rf"`((?:{'|'.join(_SECTIONS)})\.\w+)[\w.]* ?=")


def _keys() -> Iterator[str]:
    hints = typing.get_type_hints(Recipe)
    for section in dataclasses.fields(Recipe):
        for kind in (hints[section.name], *typing.get_args(hints[section.name])):
            if dataclasses.is_dataclass(kind):
                yield from (f"{section.name}.{field.name}" for field in dataclasses.fields(kind))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_exists(page: Path) -> None:
    text = page.read_text()
    paths = [path for path in _PATH.findall(text) if "NAME" not in path]
    gone = [path for path in paths if not (ROOT / path).exists()]
    gone += [name for name in _MODULE.findall(text) if find_spec(name) is None]
    gone += [link for link, _ in _LINK.findall(text) if not (page.parent / link).exists()]
    gone += sorted(set(_KEY.findall(text)) - set(_keys()))
    assert not gone


def test_every_key_of_a_recipe_has_a_description() -> None:
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    page = generate["config_page"]()
    assert "`per_token` (integer ≥ 1, required)\n: Number of experts" in page


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for library in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(library, reason="needs pip install 'parallel3d[docs]'")
    options = ["--quiet", "--fail-on-warning", "--keep-going", "docs", str(tmp_path)]
    command = [sys.executable, "-m", "sphinx", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "class" in (tmp_path / "reference" / "api.html").read_text()
