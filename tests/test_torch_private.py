"""What torch does not promise to keep is used in one module, `parallel3d.torch_private`, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for folder in ("parallel3d", "models", "recipes", "tools") for path in (ROOT / folder).rglob("*.py")]


def test_private_names_of_torch_are_in_one_module() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES if path.name != "torch_private.py"}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    found = [f"{path.relative_to(ROOT)}: {use}" for path, tree in trees.items() for use in _private_uses(tree, ours)]
    assert not found, "\n".join(found)


def _defined(tree: ast.AST) -> Iterator[str]:
    """Every name that a file defines: functions, classes, variables, fields and attributes that it assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _private_uses(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """Imports from private modules of torch, imports of private names, and private attributes that we do not define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_of_torch(alias.name) and "._" in alias.name)
        elif isinstance(node, ast.ImportFrom) and _is_of_torch(node.module or ""):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if "._" in name)
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in ours:
            use = ast.unparse(node)  # Python's own: two documented functions, a type, two members of a NamedTuple
            if use not in ("os._exit", "sys._current_frames", "argparse._ArgumentGroup") and node.attr not in (
                "_replace",
                "_fields",
            ):
                yield use


def _is_of_torch(module: str) -> bool:
    return module.split(".")[0] == "torch"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))
