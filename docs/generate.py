"""Generates the reference of recipe keys, commands and public names in docs/reference/generated/.

Sphinx calls it through conf.py. Run as a script, as `make docs` does, it updates the table of
packages in CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import parallel3d
from parallel3d.config import experts as experts_module
from parallel3d.config import recipe as recipe_module
from parallel3d.config.hugging_face import CLASSES
from parallel3d.config.schema import recipe_schema
from parallel3d.convert.families import FAMILIES as RULES
from parallel3d.convert.families import SEQUENCE_FAMILIES
from parallel3d.pipeline.split_model import FAMILIES as STAGES
from parallel3d.planner.model.hf_config import PLANNED_FAMILIES

DOCS = Path(__file__).parent
FOLDER = DOCS / "reference" / "generated"
TRAIN_COMMANDS = ("", "range-test", "evaluate", "generate", "replay")
COMMANDS = {  # module of each command
    "parallel3d-train": "recipes.pretrain",
    "parallel3d-plan": "tools.plan",
    "parallel3d-data": "tools.data",
    "parallel3d-checkpoint": "tools.checkpoint",
    "parallel3d-launch": "tools.launch",
    "parallel3d-report": "tools.report",
    "parallel3d-check-layout": "tools.check_layout",
}

API_SECTIONS = {  # title of the section for the names of each package
    "parallel_model": "Your own training loop",
    "mesh": "Your own training loop",
    "sharding": "Your own training loop",
    "checkpoint": "Your own training loop",
    "layers": "Layers",
    "models": "Layers",
    "convert": "Models written by others",
    "pipeline": "Pipelines",
    "schedules": "Pipelines",
    "config": "Recipes",
    "launch": "Recipes",
    "training": "Recipes",
    "tools": "Planner and checks",
}


def write_reference() -> None:
    """Writes the generated parts of the reference."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "config.md").write_text(config_page())
    (FOLDER / "commands.md").write_text(commands_page())
    (FOLDER / "api.md").write_text(api_page())
    (FOLDER / "families.md").write_text(families_table())


def update_packages() -> None:
    """Updates the table of packages in CONTRIBUTING.md."""
    guide = DOCS.parent / "CONTRIBUTING.md"
    before, start, rest = guide.read_text().partition("<!-- packages -->\n")
    _, end, after = rest.partition("<!-- end of packages -->")
    guide.write_text(before + start + packages_table() + end + after)


def families_table() -> str:
    """Returns the families of Hugging Face models, with what is supported for each."""
    planned = {*PLANNED_FAMILIES, *CLASSES}
    supported = (RULES, SEQUENCE_FAMILIES, STAGES, planned)
    rows = ["| `model_type` | tp | sequence parallelism | pp | planner |", "|---|---|---|---|---|"]
    for family in sorted({*RULES, *STAGES}):
        cells = ("yes" if family in names else "no" for names in supported)
        rows.append(f"| `{family}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def config_page() -> str:
    """Returns each section of a recipe with its keys: type, range, default and description."""
    schema = recipe_schema()
    comments = field_comments(recipe_module) | field_comments(experts_module)
    lines = []
    for name, section in schema["properties"].items():
        lines += [f"## {name}", ""]
        reference = next(references(section), None)
        if reference is None:
            lines += [*definition(name, section, True, comments.get(("Recipe", name), ""))]
        else:
            lines += section_lines(name, reference, schema["$defs"], comments)
    return "\n".join(lines) + "\n"


def section_lines(
    name: str, class_name: str, classes: dict[str, Any], comments: dict[tuple[str, str], str]
) -> list[str]:
    """Returns the keys of one section, followed by those of the sections inside it."""
    section = classes[class_name]
    lines = [paragraph(inspect.getdoc(getattr(recipe_module, class_name)) or ""), ""]
    inner = []
    for key, value in section["properties"].items():
        is_optional = has_default(getattr(recipe_module, class_name), key)
        lines += definition(key, value, is_optional, comments.get((class_name, key), ""))
        for reference in references(value):
            title = f"{name}.{key}[]" if value.get("type") == "array" else f"{name}.{key}"
            inner += [f"### {title}", "", *section_lines(title, reference, classes, comments)]
    return lines + inner


def has_default(section: type, key: str) -> bool:
    """Returns True if a recipe can leave out this key of a section."""
    field = next(field for field in fields(section) if field.name == key)
    return field.default is not MISSING or field.default_factory is not MISSING


def definition(key: str, value: dict[str, Any], is_optional: bool, comment: str) -> list[str]:
    """Returns the entry of one key, as an item of a definition list."""
    default = value.get("default")
    shown = default if isinstance(default, str) else json.dumps(default)
    said = f"default `{shown}`" if is_optional and not isinstance(default, dict) else ""
    if not is_optional:
        said = "required"
    facts = ", ".join(fact for fact in (kind_of(value), said) if fact)
    if not comment:
        raise ValueError(f"{key}: has no comment in config/recipe.py, from which the site takes it")
    return [f"`{key}` ({facts})", f": {sentence(comment)}", ""]


def kind_of(value: dict[str, Any]) -> str:
    """Returns the type of a value with its range or choices, as a reader would write it."""
    if "anyOf" in value:
        return " or ".join(kind_of(each) for each in value["anyOf"] if each.get("type") != "null")
    if "enum" in value or "const" in value:
        return ", ".join(f"`{each}`" for each in value.get("enum", [value.get("const")]))
    if "$ref" in value:
        return "section"
    kind = {"array": "list", "object": "mapping"}.get(value.get("type", ""), value.get("type", ""))
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "exclusiveMaximum": "<", "maximum": "≤"}
    limits = [f"{sign} {value[bound]:,}" for bound, sign in bounds.items() if bound in value]
    is_large = value.get("maximum", 0) >= 2**20
    return " ".join([kind, *(limits[:-1] if is_large else limits)])


def references(value: Any) -> Iterator[str]:
    """Yields the names of the classes to which a part of the schema refers."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def field_comments(module: Any) -> dict[tuple[str, str], str]:
    """Returns the comment before or behind each field of the module's classes."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            before: list[str] = []
            for line in reversed(lines[: field.lineno - 1]):
                if not line.strip().startswith("# "):
                    break
                before.insert(0, line.strip()[2:])
            last = lines[(field.end_lineno or field.lineno) - 1]
            behind = last[field.end_col_offset or 0 :].partition("# ")[2]
            found[node.name, field.target.id] = " ".join([*before, behind]).strip()
    return found


def sentence(text: str) -> str:
    """Returns a comment as a sentence, with the names of files as code."""
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"\bdocs/([\w-]+/([\w-]+)\.md)\b", r"[\2](../\1)", text)
    text = re.sub(r"\bNone\b", "`null`", text)
    if not re.match(r"\w+:", text):  # the name of a choice keeps its case
        text = text[:1].upper() + text[1:]
    return text and text.rstrip(".") + "."


def paragraph(docstring: str) -> str:
    """Returns the paragraphs of a docstring before its first heading such as `Example:`."""
    return re.split(r"\n\n(?:Example|Args|Attributes|Raises):", docstring)[0]


def commands_page() -> str:
    """Returns the --help of every command and subcommand."""
    lines = []
    for command, module in COMMANDS.items():
        lines += [f"### {command}", ""]
        table = DOCS.parent / module.replace(".", "/") / "commands.toml"
        subcommands: tuple[str, ...] = ("",)
        if command == "parallel3d-train":
            subcommands = TRAIN_COMMANDS
        elif table.exists():
            subcommands = ("", *tomllib.loads(table.read_text())["commands"])
        for subcommand in subcommands:
            if subcommand:
                lines += [f"#### {command} {subcommand}", ""]
            words = [*([subcommand] if subcommand else []), "--help"]
            lines += ["```text", help_text(module, words), "```", ""]
    return "\n".join(lines)


def help_text(module: str, words: list[str]) -> str:
    """Returns the text that a command prints for these words."""
    command = [sys.executable, "-m", f"parallel3d.{module}", *words]
    environment = os.environ | {"COLUMNS": "88", "NO_COLOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.rstrip()


def api_page() -> str:
    """Returns the directives that document each public name under the title of its group."""
    stub = Path(parallel3d.__file__).with_name("__init__.pyi").read_text()
    package_of = {
        name: package
        for package, name in re.findall(r"from parallel3d\.(\w+)\S* import (\w+)", stub)
    }
    sections: dict[str, list[str]] = {title: [] for title in API_SECTIONS.values()}
    for name in parallel3d.__all__:
        sections[API_SECTIONS[package_of[name]]].append(name)
    lines = []
    for title, names in sections.items():
        lines += [f"## {title}", ""]
        for name in names:
            value = getattr(parallel3d, name)
            kind = "autoclass" if inspect.isclass(value) else "autofunction"
            lines += ["```{eval-rst}", f".. {kind}:: parallel3d.{name}"]
            lines += ["   :members:"] if kind == "autoclass" else []
            lines += ["```", ""]
    return "\n".join(lines)


def packages_table() -> str:
    """Returns the packages in the order of their levels, with the summary of each docstring."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())
    levels = project["tool"]["importlinter"]["contracts"][0]["layers"]
    lines = ["| level | package | contents |", "|---|---|---|"]
    for level, names in enumerate(reversed(levels), 1):
        for name in re.findall(r"\w+", names):
            summary = (import_module(f"parallel3d.{name}").__doc__ or "").split("\n\n")[0]
            first = re.split(r"(?<=\.) ", re.sub(r"\s+", " ", summary))[0]
            lines.append(f"| {level} | `{name}` | {first.rstrip('.')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    update_packages()
