"""What each rank reports of itself and its host before anything is measured."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import torch

import parallel3d
from parallel3d.config.recipe import Recipe
from parallel3d.data.corpus import check_data
from parallel3d.errors import ConfigError, DataError
from parallel3d.recipes.host_memory_check import free_memory

_DRIVER = Path("/sys/module/nvidia/version")


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank. Only the first rank of each host reports its disk and data."""

    rank: int
    host: str
    device: str  # name of a GPU, or CPU
    versions: dict[str, str] = field(default_factory=dict)
    clock_s: float = 0.0  # time.time(), asked of all ranks at once
    free_bytes: int | None = None  # of the rank's GPU, or of the host
    disk_free_bytes: int | None = None  # at the folder of the run
    problems: tuple[str, ...] = ()  # with the folder of the run, or the data


def rank_facts(rank: int, device: torch.device) -> RankFacts:
    """Returns what every rank reports."""
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "parallel3d": parallel3d.__version__,
    }
    free = free_memory()
    name, free_bytes = "CPU", None if free is None else free.bytes_
    if device.type == "cuda":
        name, free_bytes = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0]
        versions["cuda"] = torch.version.cuda or torch.version.hip or ""
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with suppress(OSError):
            versions["driver"] = _DRIVER.read_text().strip()
    return RankFacts(
        rank=rank, host=socket.gethostname(), device=name, versions=versions, free_bytes=free_bytes
    )


def folder_above(run_dir: str) -> Path:
    """Returns the folder of a run, or its nearest parent that exists."""
    path = Path(run_dir).absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def leave_mark(run_dir: str | None) -> Path | None:
    """Writes a file that shows other hosts whether they share the folder of the run. Returns None
    if it cannot; `disk_facts` says why."""
    if run_dir is None:
        return None
    mark = folder_above(run_dir) / f".parallel3d-check-{uuid4().hex}"
    try:
        mark.touch(exist_ok=False)
    except OSError:
        return None
    return mark


def disk_facts(run_dir: str, mark: str | None) -> tuple[int | None, str]:
    """Returns the free bytes at the folder of the run, and what is wrong with it on this host.
    `mark` is the name of the file that rank 0 has written there."""
    folder = folder_above(run_dir)
    if mark is not None and not (folder / mark).exists():
        return None, (
            f"run_dir = {run_dir}: is not the folder that rank 0 writes into; put it on storage "
            "that all share"
        )
    if not os.access(folder, os.W_OK):
        return None, f"run_dir = {run_dir}: {folder} cannot be written; try a run_dir that can"
    return shutil.disk_usage(folder).free, ""


def data_problem(recipe: Recipe) -> str:
    """Returns why this host cannot read the data of the run, or ""."""
    train = recipe.train
    try:
        check_data(
            recipe.data,
            seq_len=train.seq_len,
            vocab=recipe.model.vocab,
            samples_text=bool(train.sample_tokens),
        )
    except (ConfigError, DataError, OSError) as error:
        return str(error)
    return ""
