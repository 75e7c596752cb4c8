"""Checks with the planner that the memory of this host holds a run on its CPUs, before any worker
starts. Otherwise Linux would kill a worker without a message. GPUs are not checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.launch.devices import has_gpu_files
from parallel3d.planner.hardware.cluster import load_cluster
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.model.training import optimizer_memory
from parallel3d.planner.report.page import si
from parallel3d.planner.search.request import PlanRequest
from parallel3d.tools.arguments import HARDWARE

# what a worker has of its own beside the model: Python objects, gloo, a share of torch
_WORKER_BYTES = 64 << 20


@dataclass(frozen=True)
class FreeMemory:
    """What processes of this host can still take, and who limits it."""

    bytes_: int
    limit: str


def question_of(recipe: Recipe) -> PlanRequest:
    """Returns the question that a recipe's layout answers; of the hardware only CPU or GPU matters
    here."""
    return PlanRequest(
        shape=from_config(recipe.model),
        cluster=load_cluster("cpu" if recipe.train.device == "cpu" else "h100-80gb", [HARDWARE]),
        gpus=recipe.parallel.world_size,
        seq_len=recipe.train.seq_len,
        global_batch_size=recipe.train.global_batch_size,
        precision=recipe.train.precision,
        training=optimizer_memory(recipe),
    )


def check_host(recipe: Recipe, ranks: int, free: FreeMemory | None = None) -> None:
    """Raises ConfigError if the first `ranks` ranks, which this host runs on its CPUs, need more
    memory than there is. `free` is asked of
    the system if it is not given."""
    device, free = recipe.train.device, free or free_memory()
    may_have_gpu = device == "cuda" or (device == "auto" and has_gpu_files())
    if may_have_gpu or free is None or recipe.model.is_custom:
        return
    on_cpu = replace(recipe, train=replace(recipe.train, device="cpu"))
    needed = _host_bytes(on_cpu, ranks)
    if needed <= free.bytes_:
        return
    parameters = si(total_parameters(from_config(recipe.model)))
    raise ConfigError(
        f"model.layers = {recipe.model.layers}: to train {parameters} parameters {ranks} processes "
        f"of this host need {needed / GIB:,.1f} GiB, and {free.limit} leaves "
        f"{free.bytes_ / GIB:,.1f}; try parallel.recompute=full, a smaller model or "
        f"parallel.microbatch_size, or {ceil(needed / free.bytes_)} such hosts under torchrun"
    )


def _host_bytes(recipe: Recipe, ranks: int) -> float:
    """Returns what the first ranks hold at their fullest, each at its own moment."""
    by_rank = memory_by_rank(question_of(recipe).planned_run(recipe.parallel))
    stages = Counter(recipe.parallel.coordinates(rank).pp for rank in range(ranks))
    return ranks * _WORKER_BYTES + sum(count * by_rank[pp].total for pp, count in stages.items())


def free_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> FreeMemory | None:
    """Returns the least that the system and the control groups of this process leave; None where
    they do not say."""
    try:
        meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        found = [FreeMemory(int(meminfo["MemAvailable"].split()[0]) << 10, "the system")]
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except (OSError, KeyError, ValueError):
        return None
    for _, controllers, path in groups:
        inner = cgroups / path.lstrip("/")
        if not controllers:  # version 2 of control groups
            for group in (inner, *inner.parents):
                found += _left_in(group)
    return min(found, key=lambda free: free.bytes_)


def _left_in(group: Path) -> Iterator[FreeMemory]:
    """Yields what a control group with a limit leaves: pages of files that nobody reads are given
    up first."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left = (
            int(limit)
            - int((group / "memory.current").read_text())
            + int(stat.get("inactive_file", 0))
        )
    except (OSError, ValueError):
        return  # not a group of this mount, as in a container
    yield FreeMemory(max(left, 1), f"the control group's limit of {int(limit) / GIB:,.1f} GiB")
