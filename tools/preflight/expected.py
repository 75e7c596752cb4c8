"""What the planner says that a recipe needs of each rank and of the disk, and what it takes the links for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.planner.hardware.cluster import Cluster, axis_group, cluster_of_cuda, load_cluster
from parallel3d.planner.memory.ranks import memory_by_rank
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.model.training import master_bytes, optimizer_memory, unmodeled_settings
from parallel3d.planner.time.collectives import all_reduce_s, send_s
from parallel3d.recipes.host_fit import question_of
from parallel3d.tools.arguments import HARDWARE


@dataclass(frozen=True, kw_only=True)
class RecipeNeeds:
    """`memory_bytes` are by pipeline rank, beside what a process on a GPU has before it trains; empty where the planner
    does not know the recipe's model. `is_known` says that the cluster is one's own or of a GPU in the shipped files,
    and not a guess."""

    cluster: Cluster
    is_known: bool
    memory_bytes: tuple[float, ...]
    checkpoints: int  # that there are at once
    checkpoint_bytes: float | None

    @classmethod
    def of(cls, recipe: Recipe, hardware: str | None, cuda_name: str, per_node: int) -> RecipeNeeds:
        """`hardware` is a shipped name or the path of a hardware file; None takes the GPU's own, or that of a CPU."""
        cluster, is_known = load_cluster(hardware or "cpu", [HARDWARE]), hardware is not None
        if hardware is None and (found := cluster_of_cuda(cuda_name, [HARDWARE])) is not None:
            cluster, is_known = found, True
        is_modeled = not recipe.model.is_custom and not any(unmodeled_settings(recipe))
        return cls(
            cluster=replace(cluster, gpus_per_node=per_node),
            is_known=is_known,
            memory_bytes=_memory(recipe, on_cpu=not cuda_name) if is_modeled else (),
            checkpoints=_checkpoints(recipe),
            checkpoint_bytes=None if recipe.model.is_custom else _checkpoint_bytes(recipe),
        )

    def all_reduce_s(self, parallel: ParallelConfig, axis: str, bytes_: int) -> float:
        group = axis_group(self.cluster, parallel.axes[axis], _stride(parallel, axis), world=parallel.world_size)
        return all_reduce_s(self.cluster, group, bytes_)

    def message_s(self, bytes_: int, *, crosses: bool) -> float:
        return send_s(self.cluster, bytes_, nodes=1 + crosses)


def _stride(parallel: ParallelConfig, axis: str) -> int:
    """Returns how far apart the neighbours on an axis are: the product of the axes inside it."""
    stride = 1
    for name, size in reversed(parallel.axes.items()):
        if name == axis:
            break
        stride *= size
    return stride


def _memory(recipe: Recipe, *, on_cpu: bool) -> tuple[float, ...]:
    train = replace(recipe.train, device="cpu" if on_cpu else "cuda")
    run = question_of(replace(recipe, train=train)).planned_run(recipe.parallel)
    return tuple(memory.total - memory.context for memory in memory_by_rank(run))


def _checkpoints(recipe: Recipe) -> int:
    """Counts the checkpoints that are on the disk at once at the end: those kept, and one that is being written."""
    rule = recipe.checkpoint
    if rule.every is None:
        return 0
    for_good = 0 if rule.keep_every is None else recipe.train.steps // rule.keep_every
    return min(rule.keep + rule.keep_best + for_good, recipe.train.steps // rule.every) + 1


def _checkpoint_bytes(recipe: Recipe) -> float:
    """Returns the bytes of a checkpoint: the weights that the optimizer steps, and its states."""
    optimizer = optimizer_memory(recipe)
    states = 0.0 if optimizer.is_adafactor else optimizer.state_bytes
    return total_parameters(from_config(recipe.model)) * (master_bytes(recipe.train.precision) + states)
