"""The pages name what exists: every path, module, name, recipe key and link that they print."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import ROOT, product

from parallel3d.config.recipe import Recipe

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_PATH = re.compile(r"(?<![\w/.<])((?:parallel3d|models|recipes|tools|tests|docs)/[\w/]+\.(?:py|yaml|md|txt|json))\b")
_DOTTED = re.compile(r"(?<!schema: )(?<!schema` \| `)\bparallel3d(?:\.\w+)+")
_LINK = re.compile(r"\]\(([^)#:\s\[\]]+\.\w+)(#[^)\s]+)?\)")
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
        yield from (f"{section.name}.{name}" for name in dir(kind) if not name.startswith("__"))
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
