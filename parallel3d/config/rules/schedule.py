"""The rules of a pipeline: its stages, where they begin, and what its schedule asks of them."""

from __future__ import annotations

from collections.abc import Iterator

from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.config.rules.suggestions import any_of
from parallel3d.schedules.balance import balanced_cut, cut_points, faults_of_boundaries
from parallel3d.schedules.registry import SCHEDULES


def schedule_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each rule of the pipeline that the recipe breaks."""
    parallel, layers = recipe.parallel, recipe.model.layers
    if parallel.stages > layers:
        virtual = "" if parallel.virtual_stages == 1 else f" x parallel.virtual_stages {parallel.virtual_stages}"
        pp = max(1, layers // parallel.virtual_stages)
        yield (
            f"parallel.pp = {parallel.pp}{virtual}: {layers} layers cannot fill {parallel.stages} stages; "
            f"try parallel.pp={pp} or model.layers={parallel.stages}"
        )
    elif parallel.stage_boundaries is not None:
        fault = faults_of_boundaries(parallel.stage_boundaries, layers, parallel.stages)
        if fault is not None:
            tries = list(
                cut_points(balanced_cut(layers, parallel.stages, recipe.model.part_costs(recipe.train.seq_len)))
            )
            yield f"parallel.stage_boundaries = {list(parallel.stage_boundaries)}: {fault}; try {tries}"
    yield from stages_per_rank_errors(parallel)
    if recipe.train.compile:
        yield from compile_errors(parallel)


def stages_per_rank_errors(parallel: ParallelConfig) -> Iterator[str]:
    """One line if the schedule cannot run with this number of stages on each rank."""
    name, virtual = parallel.schedule, parallel.virtual_stages
    wanted = SCHEDULES[name]
    usual = wanted.usual_stages
    if wanted.most_stages == 1 and virtual > 1:
        many = [other.name for other in SCHEDULES.values() if other.usual_stages > 1 and other.allows(virtual)]
        yield (
            f"parallel.virtual_stages = {virtual}: needs parallel.schedule = {any_of(many)}, and it is {name}; "
            f"try parallel.schedule={many[0]} or parallel.virtual_stages=1"
        )
    elif not wanted.allows(virtual):
        yield (
            f"parallel.virtual_stages = {virtual}: must be {usual} with parallel.schedule = {name}, whose "
            f"ranks hold a stage on the way down and one on the way up; try parallel.virtual_stages={usual}"
        )
    elif usual > 1 and virtual == 1:
        yield (
            f"parallel.schedule = {name}: has nothing to interleave with parallel.virtual_stages = 1; "
            f"try parallel.schedule={wanted.single_stage} or parallel.virtual_stages=2"
        )
    elif usual > 1 and parallel.pp == 1:
        yield (
            f"parallel.schedule = {name}: needs a pipeline, and parallel.pp = 1; "
            "try parallel.pp=2, or parallel.schedule=1f1b with parallel.virtual_stages=1"
        )


def compile_errors(parallel: ParallelConfig) -> Iterator[str]:
    """One line for each choice that would have to look into a block, of which `torch.compile` makes one piece."""
    schedule, recompute = SCHEDULES[parallel.schedule], parallel.recompute
    if schedule.splits_backward:
        yield (
            f"train.compile = true: parallel.schedule = {schedule.name} puts off the gradients of weights, and a "
            "compiled block's backward has both gradients in one graph; try "
            f"parallel.schedule={schedule.whole_backward}, or train.compile=false"
        )
    if recompute == "selective":
        yield (
            "train.compile = true: the compiler itself chooses what to compute again inside a block, and "
            "parallel.recompute = selective would be passed over; try parallel.recompute=none, or full"
        )
