"""Whether the memory of this host holds a run on its CPUs, asked of the planner before any worker starts: where it does
not, Linux would end a worker without a word, and the host might crawl before that. What a GPU holds is for its worker
to see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError
from parallel3d.launch.devices import has_gpu_files
from parallel3d.planner.hardware.cluster import load_cluster
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.model.training import optimizer_memory
from parallel3d.planner.report.text import si
from parallel3d.planner.search.question import Question
from parallel3d.tools.arguments import HARDWARE

_WORKER_BYTES = 64 << 20  # what a worker has of its own beside the model: Python objects, gloo, a share of torch


@dataclass(frozen=True)
class FreeMemory:
    """What processes of this host can still take, and who limits it."""

    bytes_: int
    limit: str


def question_of(recipe: Recipe) -> Question:
    """Returns the question that a recipe's layout answers; of the hardware only CPU or GPU matters here."""
    return Question(
        shape=from_config(recipe.model),
        cluster=load_cluster("cpu" if recipe.train.device == "cpu" else "h100-80gb", [HARDWARE]),
        gpus=recipe.parallel.world_size,
        seq_len=recipe.train.seq_len,
        global_batch_size=recipe.train.global_batch_size,
        precision=recipe.train.precision,
        training=optimizer_memory(recipe),
    )


def check_host(recipe: Recipe, ranks: int, free: FreeMemory | None = None) -> None:
    """Raises ConfigError where the first `ranks` ranks, which this host runs on its CPUs, need more memory than there
    is, with a smaller model or a leaner layout that would fit. `free` is asked of the system where it is not given."""
    device, free = recipe.train.device, free or free_memory()
    may_have_gpu = device == "cuda" or (device == "auto" and has_gpu_files())
    if may_have_gpu or free is None or recipe.model.is_custom:
        return
    on_cpu = replace(recipe, train=replace(recipe.train, device="cpu"))
    needed = _host_bytes(on_cpu, ranks)
    if needed <= free.bytes_:
        return
    model, processes = recipe.model, f"{ranks} processes" if ranks > 1 else "one process"
    what = f"model.name = {model.name}" if model.name else f"model.layers = {model.layers}, hidden {model.hidden}"
    tries = [*_what_fits(on_cpu, ranks, free.bytes_), f"{ceil(needed / free.bytes_)} such hosts under torchrun"]
    raise ConfigError(
        f"{what}: to train {si(total_parameters(from_config(model)))} parameters {processes} of this host need "
        f"{needed / GIB:,.1f} GiB, and {free.limit} leaves {free.bytes_ / GIB:,.1f}; try {', or '.join(tries)}"
    )


def _host_bytes(recipe: Recipe, ranks: int) -> float:
    """Returns what the first ranks hold at their fullest, each at its own moment."""
    by_rank = memory_by_rank(question_of(recipe).planned_run(recipe.parallel))
    stages = Counter(recipe.parallel.coordinates(rank).pp for rank in range(ranks))
    return ranks * _WORKER_BYTES + sum(count * by_rank[pp].total for pp, count in stages.items())


def _what_fits(recipe: Recipe, ranks: int, free_bytes: int) -> Iterator[str]:
    """Yields the first leaner layout that fits, else the most layers that do."""

    def fits(changed: Recipe) -> bool:
        try:
            validate(changed)
        except ConfigError:
            return False
        return _host_bytes(changed, ranks) <= free_bytes

    lean: dict[str, object] = {"recompute": "full", "recompute_every": None}
    for changes in (lean, {**lean, "microbatch_size": 1}):
        parallel: ParallelConfig = replace(recipe.parallel, **changes)  # type: ignore[arg-type]
        if fits(replace(recipe, parallel=parallel)):
            yield " ".join(f"parallel.{key}={value}" for key, value in changes.items() if value is not None)
            return
    most, too_many = 0, recipe.model.layers
    while too_many - most > 1:
        layers = (most + too_many) // 2
        if layers >= recipe.parallel.stages and not fits(replace(recipe, model=replace(recipe.model, layers=layers))):
            too_many = layers
        else:
            most = layers
    if most >= recipe.parallel.stages:
        yield f"model.layers={most}"


def free_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> FreeMemory | None:
    """Returns the least that the system and the control groups of this process leave; None where they do not say."""
    try:
        meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        found = [FreeMemory(int(meminfo["MemAvailable"].split()[0]) << 10, "the system")]
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except (OSError, KeyError, ValueError):
        return None
    for _, controllers, path in groups:
        if controllers in ("", "memory"):
            names = ("memory.max", "memory.current", "inactive_file")
            root, (most, used, cached) = cgroups, names
            if controllers:  # version 1 of control groups
                root, most, used = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                cached = "total_inactive_file"
            inner = root / path.lstrip("/")
            for group in (inner, *(each for each in inner.parents if each.is_relative_to(root))):
                found += _left_in(group, most, used, cached)
    return min(found, key=lambda free: free.bytes_)


def _left_in(group: Path, most: str, used: str, cached: str) -> Iterator[FreeMemory]:
    """Yields what a control group with a limit leaves: pages of files that nobody reads are given up first."""
    try:
        limit = (group / most).read_text().strip()
        if limit == "max":
            return
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left = int(limit) - int((group / used).read_text()) + int(stat.get(cached, 0))
    except (OSError, ValueError):
        return  # not a group of this mount, as in a container
    yield FreeMemory(max(left, 1), f"the control group's limit of {int(limit) / GIB:,.1f} GiB")
