"""A class of the user's own, which a recipe names as `package.module:Class`. Importing a module runs it, so only a
command that uses the class imports it, and the folder of the recipe is searched only during that import."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from parallel3d.errors import ConfigError

BESIDE_RECIPES: list[str] = []  # the folders of the recipes that this process has loaded, and that name a class


def named_class(key: str, name: str, base: type[Any], base_name: str) -> Any:
    """Returns the class that `name` stands for as the value of the recipe's `key`: `base`, which people know as
    `base_name`, or one derived from it. Raises ConfigError where there is no such module or class, and with the
    traceback of the user's own code where that fails. `load_recipe` says where modules are looked for."""
    said = f"{key} = {name}"
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        first, _, last = name.strip(":").rpartition(".")
        tries = f"{first or 'my_module'}:{last or 'MyClass'}"
        raise ConfigError(f"{said}: must name a class as package.module:Class; try {tries}")
    with told_as_theirs(f"{said}: importing {module_name} fails"):
        try:
            with _modules_beside_recipes():
                module = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # a module that the user's own imports
            where = "it is looked for on PYTHONPATH, beside the recipe and in the current folder"
            raise ConfigError(f"{said}: there is no module {error.name}; {where}; try PYTHONPATH=its/folder") from None
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
        there = [each.__name__ for each in own if isinstance(each, type) and issubclass(each, base)]
        near = get_close_matches(class_name, there, 1) or there[-1:] or ["MyClass"]
        fault = f"is no {base_name}" if found is not None else "is not there"
        file = getattr(module, "__file__", None) or "built into Python"
        raise ConfigError(f"{said}: {class_name} {fault} in {module_name} ({file}); try {module_name}:{near[0]}")
    return found


@contextmanager
def _modules_beside_recipes() -> Iterator[None]:
    """Adds the folders of recipes and the current folder to the end of sys.path, so that no file in them hides an
    installed module. torch comes first, because it tries to import some thirty optional modules."""
    import_module("torch")
    added = [folder for folder in (*BESIDE_RECIPES, os.getcwd()) if folder not in sys.path]
    sys.path += added
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


@contextmanager
def told_as_theirs(words: str) -> Iterator[None]:
    """Turns an error of the user's module into a ConfigError with the part of its traceback that is in their files. An
    error of this project's that is about the recipe stays as it is."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        told = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        raise ConfigError(f"{words}:\n{told}") from error


def _is_ours(file: str) -> bool:
    return file.endswith(("config/named_class.py", "models/custom.py")) or "importlib" in file
