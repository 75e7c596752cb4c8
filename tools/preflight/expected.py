"""The memory and disk space that a recipe needs, as the planner estimates them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallel3d.config.recipe import Recipe
from parallel3d.planner.hardware.cluster import Cluster, cluster_of_cuda, load_cluster
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.model.training import master_bytes, optimizer_memory, unmodeled_settings
from parallel3d.recipes.host_memory_check import question_of
from parallel3d.tools.arguments import HARDWARE


@dataclass(frozen=True, kw_only=True)
class RecipeNeeds:
    """Needs of a recipe. Memory and checkpoints of a model class that the planner does not know
    count as nothing."""

    memory_bytes: tuple[float, ...]  # by pipeline rank, without what a process has before training
    checkpoints: int  # on the disk at once
    checkpoint_bytes: float

    @classmethod
    def of(cls, recipe: Recipe, *, on_cpu: bool) -> RecipeNeeds:
        memory_bytes: tuple[float, ...] = (0.0,) * recipe.parallel.pp
        checkpoint_bytes = 0.0
        if not recipe.model.is_custom:
            state_bytes = optimizer_memory(recipe).state_bytes + master_bytes(
                recipe.train.precision
            )
            checkpoint_bytes = total_parameters(from_config(recipe.model)) * state_bytes
        if not recipe.model.is_custom and not any(unmodeled_settings(recipe)):
            train = replace(recipe.train, device="cpu" if on_cpu else "cuda")
            run = question_of(replace(recipe, train=train)).planned_run(recipe.parallel)
            memory_bytes = tuple(each.total - each.context for each in memory_by_rank(run))
        return cls(
            memory_bytes=memory_bytes,
            checkpoints=_checkpoints(recipe),
            checkpoint_bytes=checkpoint_bytes,
        )


def base_cluster(hardware: str | None, cuda_name: str, per_node: int) -> Cluster:
    """Returns the hardware file that fits: the one that is named, that of the GPU, or a CPU's."""
    cluster = cluster_of_cuda(cuda_name, [HARDWARE]) if hardware is None else None
    return replace(cluster or load_cluster(hardware or "cpu", [HARDWARE]), gpus_per_node=per_node)


def _checkpoints(recipe: Recipe) -> int:
    """Counts the checkpoints on the disk at the end: those kept, and one that is being written."""
    rule, steps = recipe.checkpoint, recipe.train.steps
    if rule.every is None:
        return 0
    permanent = 0 if rule.keep_every is None else steps // rule.keep_every
    return min(rule.keep + rule.keep_best + permanent, steps // rule.every) + 1
