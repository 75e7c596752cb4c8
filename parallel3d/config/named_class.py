"""A user's own class that a recipe names as `package.module:Class`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError


def named_class(key: str, name: str) -> Any:
    """Returns the class that `name` stands for as the value of the recipe's `key`. Modules are looked for where Python
    looks and in the working directory. Raises ConfigError where there is no such module or class."""
    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        first, _, last = name.strip(":").rpartition(".")
        tries = f"{first or 'my_module'}:{last or 'MyClass'}"
        raise ConfigError(f"{key} = {name}: must name a class as package.module:Class; try {tries}")
    if (here := str(Path.cwd())) not in sys.path:  # a command that pip has installed does not look there
        sys.path.append(here)
    try:
        module = import_module(module_name)
    except Exception as error:
        words = f"{module_name} cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(f"{key} = {name}: {words}; start where it lies, or set PYTHONPATH={here}") from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        there = [each for each, value in vars(module).items() if isinstance(value, type)]
        words = f"{module_name} has no class {class_name}"
        raise ConfigError(f"{key} = {name}: {words}; it has {', '.join(there) or 'none'}")
    return found
