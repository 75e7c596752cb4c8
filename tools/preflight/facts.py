"""Collects facts about each rank and its host, and the memory and disk that the recipe needs."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import parallel3d
from parallel3d.config.recipe import Recipe
from parallel3d.data.corpus import check_data
from parallel3d.errors import ConfigError, DataError
from parallel3d.launch.free_memory import free_memory
from parallel3d.launch.provenance import driver_version
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.model.training import master_bytes, optimizer_memory, unmodeled_settings
from parallel3d.recipes.host_memory_check import question_of


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Facts about one rank. Only the first rank of each host reports its disk and problems."""

    rank: int
    host: str
    device: str  # Name of the GPU, or "CPU".
    versions: dict[str, str] = field(default_factory=dict)
    clock_s: float = 0.0  # time.time(), read on all ranks after a barrier.
    free_bytes: int | None = None  # Free memory of the rank's GPU, or of the host; None: unknown.
    disk_free_bytes: int | None = None  # Free disk space in the run folder.
    problems: tuple[str, ...] = ()  # Problems with the run folder or the data.


@dataclass(frozen=True, kw_only=True)
class RecipeNeeds:
    """Memory and disk space that the recipe needs. Bytes are 0 if the planner does not know the
    model class, and memory also if it does not support a setting.
    """

    # Bytes per rank, for each pipeline rank, without the memory of a process before training.
    memory_bytes: tuple[float, ...]
    checkpoints: int  # Maximum number on disk: kept ones and one being written.
    checkpoint_bytes: float

    @classmethod
    def of(cls, recipe: Recipe, *, on_cpu: bool) -> RecipeNeeds:
        rule = recipe.checkpoint
        steps = recipe.train.steps
        checkpoints = 0
        checkpoint_bytes = 0.0
        if rule.every is not None:
            permanent = steps // rule.keep_every if rule.keep_every else 0
            kept = rule.keep + rule.keep_best + permanent
            checkpoints = min(kept, steps // rule.every) + 1
        memory_bytes: tuple[float, ...] = (0.0,) * recipe.parallel.pp
        if not recipe.model.is_custom:
            state_bytes = optimizer_memory(recipe).state_bytes
            state_bytes += master_bytes(recipe.train.precision)
            checkpoint_bytes = total_parameters(from_config(recipe.model)) * state_bytes
            if not any(unmodeled_settings(recipe)):
                train = replace(recipe.train, device="cpu" if on_cpu else "cuda")
                question = question_of(replace(recipe, train=train))
                ranks = memory_by_rank(question.planned_run(recipe.parallel))
                memory_bytes = tuple(each.total - each.context for each in ranks)
        return cls(
            memory_bytes=memory_bytes, checkpoints=checkpoints, checkpoint_bytes=checkpoint_bytes
        )


def rank_facts(rank: int, device: torch.device) -> RankFacts:
    versions = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "parallel3d": parallel3d.__version__,
    }
    free = free_memory()
    name = "CPU"
    free_bytes = None if free is None else free.bytes_
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        free_bytes = torch.cuda.mem_get_info(device)[0]
        versions["cuda"] = torch.version.cuda or torch.version.hip or ""
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["driver"] = driver_version() or ""
    return RankFacts(
        rank=rank, host=socket.gethostname(), device=name, versions=versions, free_bytes=free_bytes
    )


@contextmanager
def marked(run_dir: str | None) -> Iterator[str]:
    """Context manager that creates a temporary file in the run folder or its nearest existing
    parent, and yields its name, or "" if there is no writable folder. Other hosts look for the file
    to check that they share the folder.
    """
    if run_dir is None or not os.access(folder_above(run_dir), os.W_OK):
        yield ""
        return
    with tempfile.NamedTemporaryFile(prefix=".parallel3d-", dir=folder_above(run_dir)) as file:
        yield Path(file.name).name


def folder_above(run_dir: str) -> Path:
    """Returns the run folder, or its nearest existing parent."""
    path = Path(run_dir).absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())


def host_facts(facts: RankFacts, recipe: Recipe, run_dir: str | None, mark: str) -> RankFacts:
    """Adds free disk space and problems to the facts of a host's first rank. `mark` is the name of
    the file that rank 0 has created (see `marked`).
    """
    train = recipe.train
    problems = []
    free_bytes = None
    if run_dir is not None:
        folder = folder_above(run_dir)
        free_bytes = shutil.disk_usage(folder).free
        if not os.access(folder, os.W_OK):
            problems.append(f"run_dir = {run_dir}: {folder} cannot be written; try another run_dir")
        elif not (folder / mark).exists():
            problems.append(
                f"run_dir = {run_dir}: is not on storage shared with rank 0; put it on storage "
                "that all hosts share"
            )
    try:
        check_data(
            recipe.data,
            seq_len=train.seq_len,
            vocab=recipe.model.vocab,
            samples_text=bool(train.sample_tokens),
        )
    except (ConfigError, DataError, OSError) as error:
        problems.append(str(error))
    return replace(facts, disk_free_bytes=free_bytes, problems=tuple(problems))
