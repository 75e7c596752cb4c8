"""The structure of the code, as far as import-linter cannot check it: packages without torch, and
the private names of torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import parallel3d

ROOT = Path(parallel3d.__file__).parent
WITHOUT_TORCH = (
    *("errors", "schedules", "config", "watch", "launch", "planner"),
    "tools/check_layout/command",
    "tools/report",
)
PRIVATE_TORCH = re.compile(
    r"^\s*from torch\S* import .*\b_\w|(?<![\w\"])torch(\.\w+)*\._[a-z]", re.MULTILINE
)


def modules_of(package: str) -> list[str]:
    """Returns the module of a file, or all modules of a folder."""
    paths = sorted((ROOT / package).rglob("*.py")) or [ROOT / f"{package}.py"]
    names = [path.relative_to(ROOT.parent).with_suffix("").as_posix() for path in paths]
    return [name.removesuffix("/__init__").replace("/", ".") for name in names]


def test_packages_that_answer_at_once_do_not_import_torch() -> None:
    modules = [module for package in WITHOUT_TORCH for module in modules_of(package)]
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    assert "torch" not in sys.modules, module
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_private_names_of_torch_are_used_in_two_files() -> None:
    users = []
    for top in ("parallel3d", "models", "recipes", "tools"):
        for path in sorted((ROOT.parent / top).rglob("*.py")):
            if PRIVATE_TORCH.search(path.read_text()):
                users.append(path.relative_to(ROOT.parent).as_posix())
    assert users == ["parallel3d/torch_private.py", "tools/verify/fakes.py"]
