"""Two records of training, of one process and of a layout, compared; the first difference, and how large each step's
largest is. Pure arithmetic on arrays: no process, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.check_layout.data import Array, StepRecord, TrainingRecord, Views
from parallel3d.tools.check_layout.diagnosis import (
    causes_of_gradient,
    causes_of_loss,
    causes_of_norm,
    causes_of_output,
    causes_of_parameter,
    causes_of_weights,
    expected_part,
)

What = Literal["initial weight", "output", "loss", "gradient", "gradient norm", "parameter"]

# Shares of the largest entry, for parameters of the largest update. Layouts that are right differ by up to 1e-6 (losses
# and norms 2e-7, parameters 1e-4), for sums in another order; of the faults that tests plant the mildest moves a norm
# by 1.5e-4.
LIMITS: dict[What, float] = {
    "initial weight": 1e-6,
    "output": 1e-4,
    "loss": 2e-6,
    "gradient": 1e-4,
    "gradient norm": 2e-6,
    "parameter": 1e-2,
}
_FLOOR = 1e-3  # a tensor smaller than this share of the largest one of its kind is compared with that share
_ROUNDING = 4 * float(np.finfo(np.float32).eps)


@dataclass(frozen=True)
class Difference:
    """The first difference. `name` is that of a parameter, or of a module for an output, and empty for a loss."""

    step: int  # 0: before training
    what: What
    name: str
    size: float  # inf: missing, or not finite
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]  # where to look, nearest first
    also: tuple[str, ...]  # others of the kind that differ in this step
    causes: tuple[str, ...]


@dataclass(frozen=True)
class StepRow:
    """One step: both losses and norms, and the largest difference of each kind with its name."""

    step: int
    loss: tuple[float, float]  # one process, layout
    grad_norm: tuple[float, float]
    worst: Mapping[What, tuple[str, float]]


@dataclass(frozen=True)
class LayoutComparison:
    parallel: ParallelConfig
    rows: tuple[StepRow, ...]
    first: Difference | None  # None: the same model


Sizes = dict[str, dict[int, float]]  # name -> rank -> size of the difference


def compare(alone: TrainingRecord, layout: TrainingRecord) -> LayoutComparison:
    """Compares step by step; within a step in the order in which things are computed."""
    pairs = zip(alone.steps, layout.steps, strict=True)
    alone = replace(alone, steps=[_with_zeros(reference, ours) for reference, ours in pairs])
    weights = _view_sizes(alone.initial, layout.initial, _only(alone.initial))
    first = _first_difference(0, {"initial weight": weights}, alone, layout)
    rows = []
    before = alone.start
    for number, (reference, ours) in enumerate(zip(alone.steps, layout.steps, strict=True), start=1):
        found = _sizes(reference, ours, before, layout.parallel)
        worst = {}
        for what, sizes in found.items():
            named = [(name, size) for name, by_rank in sizes.items() for size in by_rank.values()]
            worst[what] = max(named, key=lambda pair: pair[1], default=("", 0.0))
        rows.append(StepRow(number, (reference.loss, ours.loss), (reference.grad_norm, ours.grad_norm), worst))
        if first is None:
            first = _first_difference(number, found, alone, layout)
        before = reference.parameters
    return LayoutComparison(layout.parallel, tuple(rows), first)


def _with_zeros(reference: StepRecord, ours: StepRecord) -> StepRecord:
    """Adds a gradient of zeros for each parameter that only the layout has one of, such as a frozen parameter."""
    zeros = {name: {0: np.zeros_like(next(iter(views.values())))} for name, views in ours.gradients.items()}
    return replace(reference, gradients={**zeros, **reference.gradients})


def _sizes(reference: StepRecord, ours: StepRecord, before: Views, parallel: ParallelConfig) -> dict[What, Sizes]:
    updates = {name: views[0] - before[name][0] for name, views in reference.parameters.items()}
    outputs: Sizes = {}  # without those whose shapes do not say which part of the whole a rank has
    for name, views in reference.activations.items():
        scale = _largest(views[0]) or 1.0
        for rank, array in ours.activations.get(name, {}).items():
            part = expected_part(views[0], array.shape, rank, parallel)
            if part is not None:
                outputs.setdefault(name, {})[rank] = _distance(array, part, scale)
    gradients = _view_sizes(reference.gradients, ours.gradients, _only(reference.gradients))
    return {
        "output": outputs,
        "loss": {"": {0: _relative(ours.loss, reference.loss)}},
        "gradient": dict(reversed(gradients.items())),  # as the backward gives them, nearest to the fault first
        "gradient norm": {"": {0: _relative(ours.grad_norm, _norm(ours.gradients))}},
        "parameter": _view_sizes(reference.parameters, ours.parameters, updates, rounding=_ROUNDING),
    }


def _first_difference(
    number: int, found: Mapping[What, Sizes], alone: TrainingRecord, layout: TrainingRecord
) -> Difference | None:
    """Returns the first kind of difference in step `number` that is over its limit; 0 is before training."""
    differing = {}
    for kind, sizes in found.items():
        differing[kind] = [name for name, by_rank in sizes.items() if max(by_rank.values()) > LIMITS[kind]]
    what = next((what for what, names in differing.items() if names), None)
    if what is None:
        return None
    name, *also = differing[what]
    parameters: Sequence[str] = [name]
    if what == "initial weight":
        causes = causes_of_weights(alone.initial[name][0], layout.initial.get(name, {}), layout)
    else:
        reference, ours = alone.steps[number - 1], layout.steps[number - 1]
        start = layout.steps[number - 2].parameters if number > 1 else layout.start
        gradients = _only(reference.gradients)
        match what:
            case "output":
                causes = causes_of_output(name, reference.activations[name][0], ours.activations[name], start, layout)
                # The parameters that the module itself has, or else those of the modules inside it.
                below = [parameter for parameter in reference.parameters if parameter.startswith(f"{name}.")]
                parameters = [p for p in below if p.count(".") == name.count(".") + 1] or below
            case "loss":
                causes = causes_of_loss(ours.loss, reference.loss, layout)
                parameters = differing["gradient"]
            case "gradient":
                causes = causes_of_gradient(name, differing[what], gradients, ours.gradients, layout)
            case "gradient norm":
                parameters, causes = causes_of_norm((reference.grad_norm, ours.grad_norm), gradients, layout)
            case "parameter":
                causes = causes_of_parameter(ours.parameters.get(name, {}), start.get(name, {}))
    return Difference(
        step=number,
        what=what,
        name=name,
        size=max(found[what][name].values()),
        ranks=tuple(rank for rank, size in found[what][name].items() if size > LIMITS[what]),
        parameters=tuple(parameters),
        also=tuple(also),
        causes=tuple(causes),
    )


def _view_sizes(reference: Views, ours: Views, scaled_by: Mapping[str, Array], *, rounding: float = 0.0) -> Sizes:
    """Returns how far each rank's view of each tensor is from the reference, in units of the largest entry that
    `scaled_by` has of its name."""
    scales = {name: _largest(array) for name, array in scaled_by.items()}
    floor = _FLOOR * max(scales.values(), default=0.0) or 1.0
    sizes: Sizes = {}
    for name, views in reference.items():
        scale, allowed = max(scales[name], floor), rounding * _largest(views[0])
        seen = ours.get(name, {})
        sizes[name] = {rank: _distance(array, views[0], scale, allowed) for rank, array in seen.items()} or {0: np.inf}
    return sizes


def _distance(ours: Array, reference: Array, scale: float, allowed: float = 0.0) -> float:
    if ours.shape != reference.shape:
        return np.inf
    distance = _largest(ours - reference)
    return max(0.0, distance - allowed) / scale if np.isfinite(distance) else np.inf  # max() would lose a NaN


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))


def _only(views: Views) -> dict[str, Array]:
    """Returns the tensors of a record of one process."""
    return {name: by_rank[0] for name, by_rank in views.items()}


def _norm(views: Views) -> float:
    """Returns the norm of all tensors, each counted once."""
    arrays = [next(iter(by_rank.values())) for by_rank in views.values()]
    return math.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays))


def _relative(ours: float, reference: float) -> float:
    distance = abs(ours - reference) / max(abs(reference), 1e-30)
    return distance if np.isfinite(distance) else np.inf
