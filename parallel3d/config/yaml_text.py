"""Reads YAML text into a flat list of settings, each with its file and line.

The text may come from an untrusted source. Only plain YAML is accepted, without custom tags or
aliases. Invalid text raises a `ConfigError` of one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from parallel3d.errors import ConfigError

COMMAND_LINE = "command line"
# Recipes are a few kB in size. Parsing 1 MiB would take half a minute.
_LARGEST_FILE_BYTES = 128 << 10


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value for a key, with its origin."""

    key: str  # dotted name, such as optimizer.lr
    value: object  # scalar, list of scalars, or list of dicts
    origin: str  # source of the value, such as "my.yaml:12" or "command line"

    def __str__(self) -> str:
        return f"{shown(self.key)} = {shown(self.value)} ({self.origin})"


class PlainLoader(yaml.SafeLoader):
    """Loads plain YAML. Accepts 1e-4 as a number, which YAML 1.1 reads as text, and refuses
    aliases, which can expand a short file beyond memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not supported; write the value itself",
                problem_mark=mark,
            )
        return super().compose_node(parent, index)


@cache
def load_plain(text: str) -> Any:
    """Returns the tree of a plain YAML text. Cached, because many published cases name the same
    hardware file. Calls with the same text share one tree, so do not change it."""
    return yaml.load(text, PlainLoader)


class _Dumper(yaml.SafeDumper):
    """Dumps YAML that `PlainLoader` reads back: quotes text such as "1e-4", and writes tuples as
    lists."""


for _side in (PlainLoader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
_Dumper.add_representer(tuple, _Dumper.represent_list)


def read_settings(path: Path, *, under: str = "") -> list[Setting]:
    """Reads the settings of a YAML file, in order. `under` is prefixed to each key (`model` for a
    shape card)."""
    try:
        loader = PlainLoader(read_short(path, "a recipe is a short YAML file").decode())
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{path}: must contain keys and values, such as `train:` and below it `  steps: 1`"
            )
        settings = list(_flatten(loader, root, under, path.name))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        mark = getattr(e, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        raise ConfigError(f"{path}{line}: not valid YAML: {_problem(e)}") from e
    first: dict[str, Setting] = {}
    for setting in settings:
        if first.setdefault(setting.key, setting) is not setting:
            raise ConfigError(
                f"{setting}: already set at {first[setting.key].origin}; keep one of the two"
            )
    return settings


def read_short(path: Path, kind: str, most: int = _LARGEST_FILE_BYTES) -> bytes:
    """Returns the content of a short file written by a user.

    Raises OSError as `open` does, and ConfigError if the file is too large or is a pipe or device,
    which may never end. `kind` describes the expected file in the error."""
    if path.is_fifo():  # opening it could block forever
        raise ConfigError(f"{path}: not a regular file; {kind}")
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ConfigError(f"{path}: larger than {most >> 10} KiB; {kind}")
    return content


def plain_name(name: object) -> str:
    """Checks that `name`, by which one file refers to another in the same folder, is a bare file
    name, and returns it. Raises ValueError for a path, which could point anywhere."""
    if (
        not isinstance(name, str)
        or not name.isprintable()
        or "/" in name
        or name in ("", ".", "..")
    ):
        raise ValueError(f"{shown(name)} is not the name of a file in this folder")
    return name


def parse_value(text: str, key: str) -> object:
    """Parses the value of `key=text` on the command line as YAML."""
    try:
        return yaml.load(text, PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(
            f"{key} = {shown(text)} ({COMMAND_LINE}): not a YAML value: {_problem(e)}"
        ) from e


def dump_yaml(tree: object) -> str:
    """Dumps plain dicts, lists, tuples and scalars as YAML, in their order."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def shown(value: object) -> str:
    """Formats a value as a user would type it, shortened to 60 characters."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = str(list(value) if isinstance(value, tuple) else value) or "''"
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= 60 else text[:57] + "..."


def _flatten(
    loader: PlainLoader, mapping: yaml.MappingNode, prefix: str, file: str
) -> Iterator[Setting]:
    for key_node, value_node in mapping.value:
        name = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
        key = f"{prefix}.{name}" if prefix else name
        if isinstance(value_node, yaml.MappingNode):
            yield from _flatten(loader, value_node, key, file)
        else:
            value = loader.construct_object(value_node, deep=True)
            origin = f"{file}:{key_node.start_mark.line + 1}"
            yield Setting(key=key, value=value, origin=origin)


def _problem(error: Exception) -> str:
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return problem or type(error).__name__
