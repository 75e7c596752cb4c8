"""Finds out which command, versions and environment variables made a run, without torch."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import parallel3d

_GIT_S = 5.0  # Seconds to wait for git, which can be slow on a network file system.
# Environment variables that change how a run computes or communicates, and those to leave out.
_MATTERS = re.compile(
    "NCCL_|RCCL_|CUDA_|CUBLAS_|NVIDIA_|HIP_|HSA_|ROCR_|OMP_|MKL_|KMP_|TORCH|PYTORCH_|PET_|GLOO_"
    "|FI_|UCX_|LD_LIBRARY_PATH|LD_PRELOAD|SLURM_JOB_ID|SLURM_RESTART_COUNT"
)
_IS_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")


def user_command(arguments: Sequence[str]) -> list[str]:
    """Returns the command line that the user typed, given the arguments of `parallel3d-train`.

    It is that of torchrun if torchrun started this process on Linux, else `parallel3d-train` with
    the same arguments."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError, ValueError):
            parent = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
            if parent[-len(arguments) :] == [*arguments]:
                return parent
    return ["parallel3d-train", *arguments]


def own_versions() -> dict[str, Any]:
    """Returns the versions of Python, the NVIDIA driver and parallel3d, with the git commit if it
    is imported from a checkout. Unknown ones are None."""
    checkout = Path(__file__).parents[2]
    commit = is_dirty = None
    if (checkout / ".git").exists():
        git = ["git", "--no-optional-locks", "-C", str(checkout)]
        describe = ["describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [*git, *describe],
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=_GIT_S,
                check=True,
            )
            commit, dirty, _ = done.stdout.strip().partition("-dirty")
            is_dirty = bool(dirty)
    return {
        "parallel3d": parallel3d.__version__,
        "commit": commit,
        "dirty": is_dirty,
        "python": platform.python_version(),
        "driver": driver_version(),
    }


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver of this host, or None."""
    with suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text().strip()
    return None


def environment() -> dict[str, str]:
    """Returns the environment variables that matter to a run, without secrets."""
    names = [name for name in sorted(os.environ) if _MATTERS.match(name)]
    return {name: os.environ[name] for name in names if not _IS_SECRET.search(name)}
