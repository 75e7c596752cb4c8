"""The pages name what exists: every path, module, name, recipe key and link that they print."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import ROOT, product

import parallel3d
from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.recipes import find_recipe, shipped_recipes

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_PATH = re.compile(r"(?<![\w/.<])((?:parallel3d|models|recipes|tools|tests|docs)/[\w/]+\.(?:py|yaml|md|txt|json))\b")
_DOTTED = re.compile(r"(?<!schema: )(?<!schema` \| `)\bparallel3d(?:\.\w+)+")
_LINK = re.compile(r"\]\(([^)#:\s\[\]]+\.\w+)(#[^)\s]+)?\)")
_M = re.MULTILINE | re.DOTALL
_SECTIONS = tuple(field.name for field in dataclasses.fields(Recipe))
_KEY = re.compile(rf"`((?:{'|'.join(_SECTIONS)})(?:\.\w+)+)(?:[ =:][^`]*)?`")


def _defined(module: str) -> set[str]:
    return {name for source in product() if source.module == module for name in re.findall(r"\b\w+\b", source.text)}


def _exists(dotted: str) -> bool:
    """Tells whether a dotted name is a module, or a name in the text of one."""
    modules = {source.module for source in product()}
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        if (module := ".".join(parts[:end])) in modules:
            return end == len(parts) or parts[end] in _defined(module)
    return False


def _keys() -> Iterator[str]:
    hints = typing.get_type_hints(Recipe)
    for section in dataclasses.fields(Recipe):
        yield section.name
        kind = next(
            (k for k in (hints[section.name], *typing.get_args(hints[section.name])) if hasattr(k, "__mro__")), None
        )
        if dataclasses.is_dataclass(kind):
            yield from (f"{section.name}.{field.name}" for field in dataclasses.fields(kind))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_exists(page: Path) -> None:
    text = page.read_text()
    gone = [path for path in _PATH.findall(text) if not (ROOT / path).exists() and "NAME" not in path]
    gone += [name for name in _DOTTED.findall(text) if not _exists(name)]
    gone += [link for link, _ in _LINK.findall(text) if not (page.parent / link).exists()]
    gone += [key for key in _KEY.findall(text) if ".".join(key.split(".")[:2]) not in set(_keys())]
    assert not gone, f"{page.name} names what does not exist: {', '.join(dict.fromkeys(gone))}"


def test_the_values_in_the_tables_for_people_from_elsewhere_are_taken() -> None:
    page = (ROOT / "docs/coming-from.md").read_text()
    settings = re.findall(rf"`((?:{'|'.join(_SECTIONS)})\.\w+=[^`\s]+)`", page)
    assert len(settings) >= 12
    for setting in settings:
        try:
            load_recipe(find_recipe("quickstart"), [setting], cards=shape_cards())
        except ConfigError as error:  # one that needs another key beside it does not name the command line
            assert "(command line)" not in str(error), error


def test_the_site_has_every_page_once_and_every_module_of_a_public_name() -> None:
    index = (ROOT / "docs/index.md").read_text()
    listed = [name for tree in re.findall(r"```{toctree}\n:caption: .*\n([^`]*)```", index) for name in tree.split()]
    assert sorted(listed) == sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "index")
    modules = re.findall(r"automodule:: parallel3d\.(\S+)", (ROOT / "docs/api.md").read_text())
    programs = "".join(block for page in PAGES for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), _M))
    used = {*parallel3d._HOMES, *re.findall(r"^ *from parallel3d\.(\S+) import", programs, re.MULTILINE)}
    assert sorted(each for each in modules if not each.startswith("planner.")) == sorted(used)


def _messages() -> dict[str, str]:
    """Every text with at least 18 letters of its own in the rooms that speak of a run, as a pattern: what is put in may
    be anything. Each has its longest part beside it, which is looked for first."""
    found = {}
    speaking = re.compile(r"parallel3d\.(launch|watch|diagnosis|training|spikes)\b")
    for source in product():
        for node in ast.walk(ast.parse(source.text)) if speaking.match(source.module) else ():
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            own = [text for text in texts if isinstance(text, str)]
            if sum(map(len, own)) >= 18:
                pattern = "".join(re.escape(text) if isinstance(text, str) else ".*?" for text in texts)
                found[pattern] = max(own, key=len)
    return found


def test_the_messages_that_are_quoted_are_those_of_the_program() -> None:
    """It reads blocks of text and first cells of tables; what a command shows is compared where the command is run."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    lines = "".join(re.findall(r"^```text\n(.*?)^```", page, _M)).splitlines()
    assert len(lines) >= 7
    messages = _messages()
    for line in lines:
        found = any(part in line and re.search(message, line) for message, part in messages.items())
        assert found, f"nothing in the program prints `{line}`"
    program = "".join(source.text for source in product())
    parts = [part for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for part in re.findall("`(.*?)`", cell)]
    assert [part for part in parts if part not in program] == []


def test_each_shipped_recipe_has_its_section_with_what_is_planned() -> None:
    page = " ".join((ROOT / "docs/recipes.md").read_text().split())
    for name, path in shipped_recipes().items():
        section = page.partition(f" ## {name} ")[2].partition(" ## ")[0]
        assert section, f"docs/recipes.md has no section ## {name}"
        planned = re.search(r"^# plan +(.*)$", path.read_text(), re.MULTILINE)
        assert planned is None or planned[1] in section, f"docs/recipes.md, {name}: the plan says {planned[1]}"


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for library in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(library, reason="needs what makes the site: pip install 'parallel3d[docs]'")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "class" in (tmp_path / "api.html").read_text() and (tmp_path / "searchindex.js").exists()
