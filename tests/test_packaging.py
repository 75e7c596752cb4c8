"""What is installed: the same packages as in the folders, under one name only."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import parallel3d

ROOT = Path(__file__).parents[1]
MAPPED = ("models", "recipes", "tools")
BENCH = ROOT / "tools" / "bench"  # runs from a checkout and is not installed
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_list_of_packages_is_that_of_the_folders() -> None:
    tops = [path for path in ROOT.joinpath("parallel3d").iterdir() if path.is_dir()]
    folders = {init.parent for top in tops for init in top.glob("**/__init__.py")}
    bench = ("tools", "bench")
    parts = [folder.relative_to(ROOT).parts for folder in folders]
    names = {".".join(each) for each in parts if each[1:3] != bench}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == {"parallel3d"} | names


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_folder_refuses_its_bare_name(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"ImportError: import this as parallel3d.{name}" in done.stderr


@pytest.mark.parametrize("name", parallel3d.__all__)
def test_a_public_name_is_what_it_says(name: str) -> None:
    value = getattr(parallel3d, name)
    assert value.__name__ == name
    assert name in dir(parallel3d)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel that is built from a copy of the tree, so that the tree stays as it
    is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md", "parallel3d", *MAPPED):
        if (ROOT / name).exists():
            subprocess.run(["cp", "-a", str(ROOT / name), str(source)], check=True)
    program = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    built = subprocess.run(
        [sys.executable, "-c", program],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl"))).namelist()


def test_a_wheel_holds_every_module_recipe_and_card_once(wheel: list[str]) -> None:
    wanted = {
        f"parallel3d/{path.relative_to(top)}"
        if top.name == "parallel3d"
        else f"parallel3d/{path.relative_to(ROOT)}"
        for top in (ROOT / "parallel3d", *(ROOT / name for name in MAPPED))
        for pattern in (
            "**/*.py",
            "**/*.pyi",
            "**/*.css",
            "**/*.js",
            "**/uplot/LICENSE",
            "**/*.yaml",
            "**/*.json",
            "**/*.toml",
            "**/launchers/*",
            "**/py.typed",
        )
        for path in top.glob(pattern)
        if not path.is_relative_to(BENCH)
    }
    held = [name for name in wheel if ".dist-info/" not in name]
    assert sorted(held) == sorted(wanted)
    assert any(name.endswith("LICENSE") for name in wheel)
