"""The check of what a run needs of its machine beside Python. No torch here."""

from __future__ import annotations

import os
import shutil
import sys

from parallel3d.errors import ConfigError


def check_compiler() -> None:
    """Raises ConfigError where there is no C++ compiler, which `torch.compile` needs for its kernels on a CPU and for
    their launchers on a GPU."""
    named = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(named) is None:
        raise ConfigError(
            f"train.compile = true: torch.compile needs a C++ compiler, and there is no {named} on PATH; install it, "
            "name another in CXX, or try train.compile=false"
        )
