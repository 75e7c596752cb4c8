"""Imports a user's class that a recipe names as `package.module:Class`.

Importing a module executes it. So only a command that uses the class imports it, and the folder of
the recipe is on the search path only during the import."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from parallel3d.errors import ConfigError

# Folders of the loaded recipes that use a custom model or callbacks.
BESIDE_RECIPES: list[str] = []
_OURS = re.compile(r"config/import_class\.py$|models/custom\.py$|importlib")


def import_class(key: str, name: str, base: type[Any], base_name: str) -> Any:
    """Returns the class that `key` of a recipe names. It must be `base` or a subclass of it.

    `base_name` names `base` in errors. Raises ConfigError if the module or class does not exist, or
    if the user's module fails, with its traceback."""
    said = f"{key} = {name}"
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        first, _, last = name.strip(":").rpartition(".")
        tries = f"{first or 'my_module'}:{last or 'MyClass'}"
        raise ConfigError(f"{said}: must name a class as package.module:Class; try {tries}")
    with naming_user_code(f"{said}: importing {module_name} failed"):
        try:
            with _recipe_folders():
                module = import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise  # an import inside the user's module failed
            where = "it is searched on PYTHONPATH, next to the recipe and in the current folder"
            raise ConfigError(
                f"{said}: there is no module {error.name}; {where}; try PYTHONPATH=its/folder"
            ) from None
    found = getattr(module, class_name, None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    own = [each for each in vars(module).values() if isinstance(each, type)]
    names = [each.__name__ for each in own if issubclass(each, base) and each is not base]
    near = get_close_matches(class_name, names, 1) or names[-1:] or ["MyClass"]
    fault = "is not defined" if found is None else f"is not a {base_name}"
    file = getattr(module, "__file__", None) or "built into Python"
    raise ConfigError(
        f"{said}: {class_name} {fault} in {module_name} ({file}); try {module_name}:{near[0]}"
    )


@contextmanager
def _recipe_folders() -> Iterator[None]:
    """Context manager that appends the folders of recipes and the current folder to sys.path.

    They come last, so that no file in them hides an installed module. torch is imported first,
    because it tries to import optional modules, which must not be found there."""
    import_module("torch")
    added = [folder for folder in (*BESIDE_RECIPES, os.getcwd()) if folder not in sys.path]
    sys.path += added
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


@contextmanager
def naming_user_code(words: str) -> Iterator[None]:
    """Context manager that converts errors of the user's module into ConfigErrors, with the
    traceback inside the user's files. ConfigErrors pass unchanged."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        while trace is not None and _OURS.search(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        told = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        raise ConfigError(f"{words}:\n{told}") from error
