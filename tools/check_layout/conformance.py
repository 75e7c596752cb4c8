"""The conformance test of a model, by one call: its recipe, shrunk, trains in layout after layout and in one process.

from parallel3d.tools.check_layout.conformance import assert_conforms

def test_my_model():
    assert_conforms("my.yaml")
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import LocalSgdConfig, ParallelConfig, Recipe
from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError, Parallel3dError
from parallel3d.models import check_model, model_class, shape_cards
from parallel3d.parallelize import block_weights_of
from parallel3d.recipes import find_recipe
from parallel3d.tools.bench.harness import run_ranks
from parallel3d.tools.check_layout.compare import compare
from parallel3d.tools.check_layout.data import TrainingRecord
from parallel3d.tools.check_layout.plain import record_plain
from parallel3d.tools.check_layout.record import record_recipe
from parallel3d.tools.check_layout.report import layout_name, told
from parallel3d.tools.check_layout.shrink import shrink

STEPS, WHOLE_STEPS = 20, 2  # tensors are compared in the first steps, losses and norms in all
FIRST_LOSS, LAST = 1e-6, 1e-4  # relative to one process: the first step's loss, the last step's loss and gradient norm
BATCH, MICROBATCH, LAYERS = 8, 2, 4
LAYOUTS: tuple[Mapping[str, Any], ...] = (
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    {"pp": 2},
    {"dp_shard": 2},
    {"dp_replicate": 2, "recompute": "selective"},
    {"tp": 2, "pp": 2, "sequence_parallel": True},
    {"tp": 2, "dp_shard": 2},
    {"pp": 2, "dp_shard": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    {"tp": 2, "pp": 2, "dp_shard": 2, "sequence_parallel": True},
)


def assert_conforms(
    recipe: Recipe | Path | str,
    *,
    layouts: Sequence[Mapping[str, Any]] = LAYOUTS,
    most_processes: int = 8,
    run: Callable[..., TrainingRecord] = run_ranks,
) -> str:
    """Trains the recipe's model, shrunk and in float32 on the CPU, by plain PyTorch, in one process and in each of
    `layouts` (keys of `parallel:`) that needs at most `most_processes`. Returns a report with a line for each layout,
    or raises AssertionError with it if a layout trains another model than plain PyTorch: other initial weights,
    outputs, gradients, norms, losses or numbers of parameters, no training at all, or another start from the checkpoint
    that one process has saved after its training. `run` starts the processes.

    Raises ConfigError where the recipe or its class is refused as a run would refuse it, or no layout is left."""
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(find_recipe(str(recipe)), cards=shape_cards())
    alone = _small(recipe)
    check_model(alone.model)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "trained"
        reference = run(record_plain, alone, WHOLE_STEPS, world_size=1)
        faults = list(_faults_of_formula(alone, reference))
        page, checked = [f"one process  {fault}" for fault in faults], 0
        for settings in ({}, *layouts):  # one process saves the checkpoint that the others start from
            job = replace(alone, parallel=ParallelConfig(**{"microbatch_size": MICROBATCH, **settings}))
            name = ", ".join([layout_name(job.parallel), *(f"{k} {v}" for k, v in settings.items() if not _is_axis(k))])
            try:
                validate(job)
            except ConfigError as error:
                page.append(f"{name}  left out: {error}")
                continue
            if job.parallel.world_size > most_processes:
                page.append(f"{name}  left out: needs {job.parallel.world_size} processes")
                continue
            checked += 1
            try:
                record = run(record_recipe, job, WHOLE_STEPS, saved, world_size=job.parallel.world_size)
                found = list(_faults(reference, record))
            except Parallel3dError as error:
                found = [str(error)]
            faults += found
            page.append("\n  ".join([f"{name}  {'differs' if found else 'the same model'}", *found]))
    if checked < 2:
        raise ConfigError("\n".join(["layouts: none of them can be checked; try most_processes=2", *page]))
    if faults:
        raise AssertionError("\n".join([f"{recipe.model.architecture} is not the same model in every layout", *page]))
    return "\n".join(page)


def _small(recipe: Recipe) -> Recipe:
    """Returns the recipe's model in one process, with sizes that all layouts divide, and a batch that all share."""
    plain = replace(
        recipe,
        parallel=ParallelConfig(tp=2, microbatch_size=MICROBATCH),  # what tp divides in the small model
        train=replace(recipe.train, global_batch_size=BATCH, compile=False),
        optimizer=replace(recipe.optimizer, step_in_backward=False),
        local_sgd=LocalSgdConfig(),
    )
    small = shrink(plain, layers=LAYERS, steps=STEPS)
    alone = replace(small, parallel=ParallelConfig(microbatch_size=MICROBATCH))
    return replace(alone, train=replace(alone.train, global_batch_size=BATCH))


def _faults(reference: TrainingRecord, record: TrainingRecord) -> Iterator[str]:
    """Yields what a layout does differently, the nearest to its cause alone."""
    parameters = sum(next(iter(views.values())).size for views in record.initial.values())
    if not reference.parameter_count == record.parameter_count == parameters:
        counts = (
            f"{reference.parameter_count:,} in one process, {record.parameter_count:,} here, {parameters:,} on ranks"
        )
        yield f"the numbers of parameters differ: {counts}"
    first = compare(reference, record).first
    if first is not None:
        yield from told(first)
        return
    for step, what, kind, limit in ((0, "loss", 0, FIRST_LOSS), (-1, "loss", 0, LAST), (-1, "gradient norm", 1, LAST)):
        theirs, ours = reference.curve[step][kind], record.curve[step][kind]
        if not math.isclose(theirs, ours, rel_tol=limit):
            number = step % len(record.curve) + 1
            yield f"the {what} of step {number} is {ours:.8g}, and {theirs:.8g} in one process (limit {limit:g})"
    if record.changed:
        yield f"a start from one process's checkpoint has other numbers in {', '.join(record.changed)}"
    trained, started = reference.start_loss, record.start_loss
    assert trained is not None and started is not None
    if not math.isclose(trained, started, rel_tol=FIRST_LOSS):
        words = (
            f"the loss of a start from one process's checkpoint is {started:.8g}, and {trained:.8g} before it was saved"
        )
        yield f"{words}: something that the class learns is no parameter"


def _faults_of_formula(recipe: Recipe, reference: TrainingRecord) -> Iterator[str]:
    """Yields the fault of a formula for the weights of a block, if the class has one, that the model does not have."""
    said = block_weights_of(model_class(recipe.model.architecture), recipe.model)
    block = [views[0] for name, views in reference.initial.items() if name.startswith("layers.0.")]
    counted = sum(weight.size for weight in block if weight.ndim > 1)
    if said is not None and said != counted:
        yield f"block_weights(config) is {said:,}, and the matrices of a block have {counted:,} weights"


def _is_axis(key: str) -> bool:
    return key in ParallelConfig().axes
