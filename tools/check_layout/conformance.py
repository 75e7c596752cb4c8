"""The conformance test of a model: its recipe, shrunk, trains in layout after layout and in one
process.

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
from parallel3d.tools.check_layout.compare import compare
from parallel3d.tools.check_layout.data import TrainingRecord
from parallel3d.tools.check_layout.plain import record_plain
from parallel3d.tools.check_layout.record import record_recipe
from parallel3d.tools.check_layout.report import describe
from parallel3d.tools.check_layout.shrink import shrink
from parallel3d.tools.local_ranks import run_ranks

STEPS, WHOLE_STEPS = 20, 2  # tensors are compared in the first steps, losses and norms in all
FIRST_LOSS, LAST = 1e-6, 1e-4  # relative to one process: the first loss, the last loss and norm
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
    """Trains the model of a recipe, shrunk and in float32 on the CPU, with plain PyTorch, in one
    process, and in each of `layouts` (keys of `parallel:`) of at most `most_processes`.

    Returns a report with a line for each layout. Raises AssertionError with the report if a layout
    has other initial weights, outputs, gradients, norms, losses or numbers of parameters than plain
    PyTorch, or starts otherwise from the checkpoint that one process has saved. Raises ConfigError
    if the recipe or its class is refused as a run would refuse it, or no layout can be checked.
    `run` starts the processes."""
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(find_recipe(str(recipe)), cards=shape_cards())
    alone = _small(recipe)
    check_model(alone.model)
    reference = run(record_plain, alone, WHOLE_STEPS, world_size=1)
    report = list(_check_block_weights(alone, reference))
    is_wrong, checked = bool(report), 0
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "trained"
        for settings in ({}, *layouts):  # one process saves the checkpoint that the others load
            parallel = ParallelConfig(**{"microbatch_size": MICROBATCH, **settings})
            job, ranks = replace(alone, parallel=parallel), parallel.world_size
            name = ", ".join(f"{key} {value}" for key, value in settings.items()) or "one process"
            try:
                validate(job)
                if ranks > most_processes:
                    raise ConfigError(f"needs {ranks} processes")
            except ConfigError as error:
                report.append(f"{name}  left out: {error}")
                continue
            checked += 1
            try:
                record = run(record_recipe, job, WHOLE_STEPS, saved, world_size=ranks)
                found = list(_differences(reference, record))
            except Parallel3dError as error:
                found = [str(error)]
            is_wrong |= bool(found)
            verdict = "differs" if found else "the same model"
            report.append("\n  ".join([f"{name}  {verdict}", *found]))
    text = "\n".join(report)
    if checked < 2:
        raise ConfigError(f"layouts: none can be checked; try most_processes=2\n{text}")
    if is_wrong:
        name = recipe.model.architecture
        raise AssertionError(f"{name} is not the same model in every layout\n{text}")
    return text


def _small(recipe: Recipe) -> Recipe:
    """Returns the recipe of the model in one process, with sizes that all layouts divide."""
    divisible = replace(
        recipe,
        parallel=ParallelConfig(microbatch_size=MICROBATCH, tp=2),
        train=replace(recipe.train, global_batch_size=BATCH, compile=False),
        local_sgd=LocalSgdConfig(),
    )
    small = shrink(divisible, layers=LAYERS, steps=STEPS)
    train = replace(small.train, global_batch_size=BATCH)
    return replace(small, parallel=replace(small.parallel, tp=1), train=train)


def _differences(reference: TrainingRecord, record: TrainingRecord) -> Iterator[str]:
    """Yields what differs in a layout, only the nearest to its cause if tensors do."""
    held = sum(next(iter(views.values())).size for views in record.initial.values())
    if not reference.parameter_count == record.parameter_count == held:
        yield (
            f"the numbers of parameters differ: {reference.parameter_count:,} in one process, "
            f"{record.parameter_count:,} here, {held:,} on ranks"
        )
    first = compare(reference, record).first
    if first is not None:
        yield from describe(first)
        return
    first_step, last_step = record.curve[0], record.curve[-1]
    wanted_first, wanted_last = reference.curve[0], reference.curve[-1]
    assert record.start_loss is not None and reference.start_loss is not None
    pairs = {
        "loss of the first step": (first_step[0], wanted_first[0], FIRST_LOSS),
        "loss of the last step": (last_step[0], wanted_last[0], LAST),
        "gradient norm of the last step": (last_step[1], wanted_last[1], LAST),
    }
    # If it differs, something that the class learns is not a parameter.
    started = "loss after a start from the checkpoint of one process"
    pairs[started] = record.start_loss, reference.start_loss, FIRST_LOSS
    for what, (ours, wanted, limit) in pairs.items():
        if not math.isclose(wanted, ours, rel_tol=limit):
            yield f"the {what} is {ours:.8g}, and {wanted:.8g} in one process (limit {limit:g})"


def _check_block_weights(recipe: Recipe, reference: TrainingRecord) -> Iterator[str]:
    """Yields a line if `block_weights` of the class is not what a block has."""
    stated = block_weights_of(model_class(recipe.model.architecture), recipe.model)
    counted = 0
    for name, views in reference.initial.items():
        if name.startswith("layers.0.") and views[0].ndim > 1:
            counted += views[0].size
    if stated is not None and stated != counted:
        held = f"the matrices of a block have {counted:,} weights"
        yield f"block_weights(config) is {stated:,}, and {held}"
