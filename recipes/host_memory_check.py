"""Checks with the planner, before any worker starts, that a run on CPUs fits into the memory of
this host.

Otherwise Linux would kill a worker without a message. GPUs and custom models are not checked."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.launch.devices import has_gpu_files
from parallel3d.launch.free_memory import FreeMemory, free_memory
from parallel3d.planner.hardware.cluster import load_cluster
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.model.training import optimizer_memory
from parallel3d.planner.report.page import si
from parallel3d.planner.search.request import PlanRequest
from parallel3d.tools.arguments import HARDWARE

# Memory of a worker without the model: Python objects, gloo, part of torch.
_WORKER_BYTES = 64 << 20


def question_of(recipe: Recipe) -> PlanRequest:
    """Returns a plan request for the layout of a recipe, on CPUs or, for any GPU, on H100s."""
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
    """Raises ConfigError if `ranks` ranks on the CPUs of this host need more memory than `free`
    (default: what the system reports). Skips ranks that may use GPUs, and models that the planner
    does not know."""
    device, free = recipe.train.device, free or free_memory()
    may_have_gpu = device == "cuda" or (device == "auto" and has_gpu_files())
    if may_have_gpu or free is None:
        return
    on_cpu = replace(recipe, train=replace(recipe.train, device="cpu"))
    try:
        needed = _host_bytes(on_cpu, ranks)
    except ConfigError:
        return  # The planner does not know this model.
    if needed <= free.bytes_:
        return
    parameters = si(total_parameters(from_config(recipe.model)))
    raise ConfigError(
        f"model.layers = {recipe.model.layers}: training {parameters} parameters with {ranks} "
        f"processes on this host needs {needed / GIB:,.1f} GiB, but {free.limit} leaves "
        f"{free.bytes_ / GIB:,.1f} GiB; try parallel.recompute=full, a smaller model or "
        f"parallel.microbatch_size, or {ceil(needed / free.bytes_)} such hosts with torchrun"
    )


def _host_bytes(recipe: Recipe, ranks: int) -> float:
    """Returns the memory of the first `ranks` ranks, as if all peaked at the same time."""
    by_rank = memory_by_rank(question_of(recipe).planned_run(recipe.parallel))
    stages = Counter(recipe.parallel.coordinates(rank).pp for rank in range(ranks))
    return ranks * _WORKER_BYTES + sum(count * by_rank[pp].total for pp, count in stages.items())
