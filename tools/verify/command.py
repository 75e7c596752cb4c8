"""`parallel3d-plan verify`: trains one rank on fake tensors and compares its peak memory with the
planner's estimate."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.memory.ranks import rank_memory, worst_rank
from parallel3d.planner.model.parameters import expert_numel, rank_numel
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.training import unmodeled_settings
from parallel3d.planner.report.page import layout_text
from parallel3d.planner.search.request import PlanRequest
from parallel3d.recipes import named_recipe
from parallel3d.recipes.host_memory_check import question_of
from parallel3d.tools.cli_output import Reply

if TYPE_CHECKING:
    from parallel3d.tools.verify.dry_run import DryRun


@dataclass(frozen=True)
class Verified:
    """One rank of a recipe: the memory estimate, the dry run, and the parameter count of the
    estimate."""

    recipe: Recipe
    rank: int
    model: RankMemory
    dry: DryRun
    parameters: int  # Number of elements that the rank updates, as estimated.

    @property
    def difference(self) -> float:
        """Relative error of the estimate. Positive if it is higher than the dry run's peak."""
        return self.model.allocated / self.dry.peak.total - 1

    def rows(self) -> Iterator[tuple[str, float, float]]:
        """Yields (kind, estimated bytes, bytes of the dry run)."""
        model = self.model
        peak = self.dry.peak
        yield "parameters", model.parameters, peak.made.get("parameters", 0)
        yield "optimizer", model.optimizer, peak.made.get("optimizer", 0)
        waiting = sum(peak.waiting(kind) for kind in ("backward", "between", "gathered"))
        yield "gradients, gathered, on their way", model.gradients + model.buffers, waiting
        at_work = peak.waiting("forward") + sum(peak.at_work.values())
        yield "activations, at work", model.activations + model.logits + model.temporary, at_work


def answer(options: argparse.Namespace) -> Reply:
    """Verifies the requested rank, or the first one of the pipeline rank with the highest estimated
    peak. Raises ConfigError for a rank outside the layout.
    """
    recipe = named_recipe(options.recipe, options.overrides)
    rank = options.rank
    parallel = recipe.parallel
    if rank is not None and options.pipeline_rank is not None:
        raise ConfigError(
            "--rank, --pipeline-rank: use only one; --pipeline-rank P means its first rank"
        )
    if rank is None:
        pipeline_rank = options.pipeline_rank
        if pipeline_rank is None:
            pipeline_rank = worst_rank(run_of_recipe(recipe)).rank
        if not 0 <= pipeline_rank < parallel.pp:
            raise ConfigError(
                f"--pipeline-rank {pipeline_rank}: the layout has pipeline ranks 0 to "
                f"{parallel.pp - 1}; try --pipeline-rank 0"
            )
        rank = pipeline_rank * (parallel.world_size // parallel.pp)
    if not 0 <= rank < parallel.world_size:
        raise ConfigError(
            f"--rank {rank}: the layout has ranks 0 to {parallel.world_size - 1}; try --rank 0"
        )
    found = verify(recipe, rank)
    return Reply(
        page=_page(found),
        tree=lambda: _tree(found),
    )


def verify(recipe: Recipe, rank: int) -> Verified:
    # This imports torch, which is not needed to report errors in the input.
    from parallel3d.tools.verify.dry_run import dry_run

    run = run_of_recipe(recipe)
    place = recipe.parallel.coordinates(rank)
    parts = tuple(
        part for part, holder in zip(run.stages, run.placement, strict=True) if holder == place.pp
    )
    dry = dry_run(recipe, rank, gpu_bytes=run.cluster.device.gpu_bytes)
    tp, shards, ep, expert_shards = run.layout.splits
    index = rank // tp % run.layout.shard_ranks
    count = rank_numel(run.shape, parts, tp, shards=shards, at=(place.tp, index % shards))
    layers = sum(part.layers - part.dense for part in parts)
    count += expert_numel(
        run.shape, layers, ep, expert_shards, (index * tp + place.tp) // ep % expert_shards
    )
    return Verified(recipe, rank, rank_memory(run, place.pp), dry, count)


def run_of_recipe(recipe: Recipe) -> PlannedRun:
    """Returns the planned run of a recipe. Raises ConfigError as `question_of_recipe` does."""
    return question_of_recipe(recipe).planned_run(recipe.parallel)


def question_of_recipe(recipe: Recipe) -> PlanRequest:
    """Returns the plan request for the layout of a recipe. Raises ConfigError for features that the
    memory model does not support."""
    for setting, known, instead in unmodeled_settings(recipe):
        raise ConfigError(f"{setting}: {known}; try {instead}")
    return question_of(recipe)


def _page(found: Verified) -> Iterator[str]:
    recipe = found.recipe
    dry = found.dry
    parallel = recipe.parallel
    name = recipe.model.name or recipe.model.architecture
    yield f"recipe    {name}, {layout_text(parallel)}"
    yield f"rank      {found.rank} of {parallel.world_size}: {parallel.coordinates(found.rank)}"
    said = (
        f"{dry.microbatches} of {recipe.microbatches} microbatches"
        if dry.microbatches < recipe.microbatches
        else ""
    )
    yield f"dry run   a step in {dry.seconds:.1f} s{f' ({said} need as much)' if said else ''}"
    yield ""
    yield f"{'GiB':<34}{'model':>10}{'dry run':>10}{'difference':>12}"
    for kind, model, run in found.rows():
        yield f"{kind:<34}{model / GIB:>10.3f}{run / GIB:>10.3f}{(model - run) / GIB:>+12.3f}"
    total = f"{'total':<34}{found.model.allocated / GIB:>10.3f}{dry.peak.total / GIB:>10.3f}"
    yield (
        f"{total}{(found.model.allocated - dry.peak.total) / GIB:>+12.3f}  {found.difference:+.2%}"
    )
    yield ""
    yield f"peak at   model: {found.model.moment}; dry run: {dry.at}"
    same = (
        "the same"
        if found.parameters == dry.parameter_count
        else f"the estimate counts {found.parameters:,}"
    )
    yield f"steps     {dry.parameter_count:,} parameters on this rank, {same}"


def _tree(found: Verified) -> object:
    return rounded(
        {
            "schema": "parallel3d.verify/1",
            "rank": found.rank,
            "pipeline_rank": found.recipe.parallel.coordinates(found.rank).pp,
            "world_size": found.recipe.parallel.world_size,
            "microbatches": {"recipe": found.recipe.microbatches, "run": found.dry.microbatches},
            "kinds": [
                {"kind": kind, "model_gib": model / GIB, "dry_run_gib": run / GIB}
                for kind, model, run in found.rows()
            ],
            "total_gib": {
                "model": found.model.allocated / GIB,
                "dry_run": found.dry.peak.total / GIB,
            },
            "difference_pct": 100 * found.difference,
            "peak_at": {"model": found.model.moment, "dry_run": found.dry.at},
            "seconds": found.dry.seconds,
            "parameters": {"model": found.parameters, "dry_run": found.dry.parameter_count},
        }
    )
