"""Conformance test for a model: trains it, reduced in size, in many layouts and in one process.

from parallel3d.tools.check_layout.conformance import assert_conforms

def test_my_model():
    assert_conforms("my.yaml")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel3d.config.recipe import LocalSgdConfig, ParallelConfig, Recipe
from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError, Parallel3dError
from parallel3d.models import check_model
from parallel3d.recipes import named_recipe
from parallel3d.tools.check_layout.compare import compare
from parallel3d.tools.check_layout.data import TrainingRecord
from parallel3d.tools.check_layout.plain import record_plain
from parallel3d.tools.check_layout.record import record_recipe
from parallel3d.tools.check_layout.report import describe
from parallel3d.tools.check_layout.shrink import shrink
from parallel3d.tools.local_ranks import run_ranks

STEPS, WHOLE_STEPS = 20, 2  # Tensors are compared in the first two steps.
# (step, name, index in the curve: 0 for loss and 1 for norm, relative tolerance)
_CURVE = (
    (0, "loss of the first step", 0, 1e-6),
    (-1, "loss of the last step", 0, 1e-4),
    (-1, "gradient norm of the last step", 1, 1e-4),
)
BATCH = 8
MICROBATCH = 2
LAYERS = 4
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
    """Checks that a model trains the same in every layout, with its recipe reduced in size.

    Trains in float32 on the CPU: with plain PyTorch, with the trainer in one process, and in each
    layout.

    Args:
        recipe: Recipe, or name or path of one.
        layouts: Layouts to check, as keys of `parallel:`. Default: ten layouts of up to 8
            processes.
        most_processes: Maximum number of processes. Larger layouts are left out.
        run: Function that starts the processes, with the arguments of `run_ranks`.

    Returns:
        Report with one line per layout.

    Raises:
        AssertionError: A layout differs in initial weights, outputs, gradients, norms, losses or
            number of parameters. The message is the report.
        ConfigError: The recipe or its model class is invalid, or all layouts are left out.

    Example:
        >>> report = parallel3d.assert_conforms("palm.yaml", layouts=[{"tp": 2}, {"pp": 2}])
        >>> print(report)
    """
    if not isinstance(recipe, Recipe):
        recipe = named_recipe(str(recipe))
    alone = _small(recipe)
    check_model(alone)
    reference = run(record_plain, alone, WHOLE_STEPS, world_size=1)
    report: list[str] = []
    is_wrong = False
    checked = 0
    for settings in ({}, *layouts):
        parallel = ParallelConfig(**{"microbatch_size": MICROBATCH, **settings})
        job = replace(alone, parallel=parallel)
        ranks = parallel.world_size
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
            record = run(record_recipe, job, WHOLE_STEPS, world_size=ranks)
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
    """Returns the reduced recipe for one process, with sizes that all of `LAYOUTS` divide."""
    divisible = replace(
        recipe,
        parallel=ParallelConfig(microbatch_size=MICROBATCH, tp=2),
        train=replace(recipe.train, global_batch_size=BATCH),
        local_sgd=LocalSgdConfig(),
    )
    small = shrink(divisible, layers=LAYERS, steps=STEPS)
    train = replace(small.train, global_batch_size=BATCH)
    return replace(small, parallel=replace(small.parallel, tp=1), train=train)


def _differences(reference: TrainingRecord, record: TrainingRecord) -> Iterator[str]:
    """Yields lines on the differences of a layout. Of tensors that differ, describes only the
    first.
    """
    held = sum(next(iter(views.values())).size for views in record.initial.values())
    if not reference.parameter_count == record.parameter_count == held:
        yield (
            f"parameter counts differ: {reference.parameter_count:,} in one process, "
            f"{record.parameter_count:,} here, {held:,} on all ranks"
        )
    first = compare(reference, record).first
    if first is not None:
        yield from describe(first)
        return
    for step, what, at, limit in _CURVE:
        ours = record.curve[step][at]
        wanted = reference.curve[step][at]
        if not math.isclose(wanted, ours, rel_tol=limit):
            yield f"the {what} is {ours:.8g}, but {wanted:.8g} in one process (limit {limit:g})"
