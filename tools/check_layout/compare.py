"""Two records of training, of one process and of a layout, compared: the first difference, and the
largest one of each step. Pure arithmetic on arrays: no process, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.check_layout.data import Array, StepRecord, TrainingRecord, Views

What = Literal["initial weight", "output", "loss", "gradient", "gradient norm", "parameter"]

# Relative to the largest entry, for parameters to the largest update. Right layouts differ by up to
# 1e-6 (losses and norms 2e-7, parameters 1e-4), because sums are taken in another order. Of the
# faults that tests plant, the mildest moves a norm by 1.5e-4.
LIMITS: dict[What, float] = {
    "initial weight": 1e-6,
    "output": 1e-4,
    "loss": 2e-6,
    "gradient": 1e-4,
    "gradient norm": 2e-6,
    "parameter": 1e-2,
}
# A tensor smaller than this share of the largest one of its kind is compared with that share.
_FLOOR = 1e-3
_ROUNDING = 4 * float(np.finfo(np.float32).eps)

# Usual causes, by the first kind that differs.
_CAUSES: dict[What, str] = {
    "initial weight": (
        "weights are drawn for the shape of a rank, or by a generator that depends on the rank, "
        "instead of drawn in full and then split"
    ),
    "output": (
        "all that was computed before agrees, so look inside this module: a missing or doubled sum "
        "over tp, a bias added on every rank before the sum, a gather in the wrong order"
    ),
    "loss": (
        "every output agrees: the loss is divided by another number, or summed over other ranks"
    ),
    "gradient": (
        "a reduction is missing, doubled or over other ranks; or the backward pass of a collective "
        "is not the conjugate of its forward pass (layers/regions.py)"
    ),
    "gradient norm": (
        "the gradients agree one by one: parameters are counted once for each rank that holds "
        "them, or for each use of a tied weight"
    ),
    "parameter": (
        "the gradients agree: the optimizer steps another tensor than the model uses, or with "
        "other weight decay, learning rate or clipping"
    ),
}

Sizes = dict[str, dict[int, float]]  # name -> rank -> size of the difference


@dataclass(frozen=True)
class Difference:
    """The first difference. `name` is that of a parameter, of a module if it is an output, and
    empty for a loss or norm."""

    step: int  # 0: before training
    what: What
    name: str
    size: float  # inf: missing, or not finite
    ranks: tuple[int, ...]
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


def compare(alone: TrainingRecord, layout: TrainingRecord) -> LayoutComparison:
    """Compares step by step, and within a step in the order in which things are computed."""
    weights = _sizes(alone.initial, layout.initial, _arrays(alone.initial))
    first = _first_difference(0, {"initial weight": weights})
    rows = []
    before = alone.start
    for number, (reference, ours) in enumerate(zip(alone.steps, layout.steps, strict=True), 1):
        found = _compare_step(reference, ours, before, layout.parallel)
        worst = {what: _worst(sizes) for what, sizes in found.items()}
        losses, norms = (reference.loss, ours.loss), (reference.grad_norm, ours.grad_norm)
        rows.append(StepRow(number, losses, norms, worst))
        before = reference.parameters
        if first is None:
            first = _first_difference(number, found)
        if first is not None and first.what == "gradient" and first.step == number:
            views = ours.gradients.get(first.name, {})
            wanted = reference.gradients.get(first.name, {})
            first = replace(first, causes=(*_gradient_pattern(wanted, views), *first.causes))
    return LayoutComparison(layout.parallel, tuple(rows), first)


def _compare_step(
    reference: StepRecord, ours: StepRecord, before: Views, parallel: ParallelConfig
) -> dict[What, Sizes]:
    updates = {name: views[0] - before[name][0] for name, views in reference.parameters.items()}
    outputs: Sizes = {}
    for name, views in reference.activations.items():
        scale = _largest(views[0]) or 1.0
        for rank, array in ours.activations.get(name, {}).items():
            part = expected_part(views[0], array.shape, rank, parallel)
            if part is not None:
                outputs.setdefault(name, {})[rank] = _distance(array, part, scale)
    wanted = _with_zeros(reference.gradients, ours.gradients)
    gradients = _sizes(wanted, ours.gradients, _arrays(wanted))
    norm = math.sqrt(sum(_square(views) for views in ours.gradients.values()))
    return {
        "output": outputs,
        "loss": {"": {0: _relative(ours.loss, reference.loss)}},
        # In the order of the backward pass, so that the nearest to the fault comes first.
        "gradient": dict(reversed(gradients.items())),
        "gradient norm": {"": {0: _relative(ours.grad_norm, norm)}},
        "parameter": _sizes(reference.parameters, ours.parameters, updates, rounding=_ROUNDING),
    }


def _first_difference(step: int, found: Mapping[What, Sizes]) -> Difference | None:
    """Returns the first kind of difference that is over its limit."""
    for what, sizes in found.items():
        names = [name for name, by in sizes.items() if max(by.values()) > LIMITS[what]]
        if names:
            by_rank = sizes[names[0]]
            ranks = tuple(rank for rank, size in by_rank.items() if size > LIMITS[what])
            largest, also = max(by_rank.values()), tuple(names[1:])
            return Difference(step, what, names[0], largest, ranks, also, (_CAUSES[what],))
    return None


def _gradient_pattern(wanted: Mapping[int, Array], views: Mapping[int, Array]) -> list[str]:
    """Returns a sentence on what is plainly wrong with the gradient of a parameter."""
    if not wanted:
        return ["one process has no gradient for it: it is frozen, or no forward pass uses it"]
    if not views:
        return ["no rank has a gradient for it: it is cut off from the loss, or frozen"]
    if len({id(view) for view in views.values()}) > 1:
        return ["the ranks hold different gradients of one parameter: a reduction is missing"]
    reference, ours = wanted[0], next(iter(views.values()))
    square = float(np.vdot(reference, reference))
    if ours.shape != reference.shape or square == 0.0:
        return []
    ratio = float(np.vdot(ours, reference)) / square
    if _largest(ours - ratio * reference) > 1e-3 * _largest(ours):
        return []
    return [f"it is {ratio:.4g} x the reference: summed instead of averaged, or the reverse"]


def _worst(sizes: Sizes) -> tuple[str, float]:
    largest = {name: max(by_rank.values()) for name, by_rank in sizes.items()}
    name = max(largest, key=largest.__getitem__, default="")
    return name, largest.get(name, 0.0)


def _with_zeros(reference: Views, ours: Views) -> Views:
    """Adds a gradient of zeros for each parameter that has a gradient only in the layout, such as a
    frozen one."""
    zeros: Views = {}
    for name, views in ours.items():
        zeros[name] = {0: np.zeros_like(next(iter(views.values())))}
    return {**zeros, **reference}


def _sizes(
    reference: Views, ours: Views, scaled_by: Mapping[str, Array], *, rounding: float = 0.0
) -> Sizes:
    """Returns the distance of the view of each rank from the reference, relative to the largest
    entry of the tensor in `scaled_by`."""
    scales = {name: _largest(array) for name, array in scaled_by.items()}
    floor = _FLOOR * max(scales.values(), default=0.0) or 1.0
    sizes: Sizes = {}
    for name, views in reference.items():
        scale, allowed = max(scales[name], floor), rounding * _largest(views[0])
        sizes[name] = {}
        for rank, array in ours.get(name, {0: np.empty(0)}).items():
            sizes[name][rank] = _distance(array, views[0], scale, allowed)
    return sizes


def expected_part(
    full: Array, shape: tuple[int, ...], rank: int, parallel: ParallelConfig
) -> Array | None:
    """Returns the part of the output of one process that `rank` should have: the batch of its
    data-parallel rank, and of each other dim all, or the shard of its tp rank. Returns None if the
    shapes do not say."""
    place = parallel.coordinates(rank)
    dp_rank = place.dp_replicate * parallel.dp_shard + place.dp_shard
    if len(shape) != full.ndim or shape[0] * parallel.dp != full.shape[0]:
        return None
    part = np.split(full, parallel.dp, axis=0)[dp_rank]
    for dim in range(1, full.ndim):
        if shape[dim] * parallel.tp == full.shape[dim]:
            part = np.split(part, parallel.tp, axis=dim)[place.tp]
        elif shape[dim] != full.shape[dim]:
            return None
    return part


def _distance(ours: Array, reference: Array, scale: float, allowed: float = 0.0) -> float:
    if ours.shape != reference.shape:
        return np.inf
    distance = _largest(ours - reference)
    # max() would lose a NaN
    return max(0.0, distance - allowed) / scale if np.isfinite(distance) else np.inf


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))


def _arrays(views: Views) -> dict[str, Array]:
    """Returns the tensors of a record of one process."""
    return {name: by_rank[0] for name, by_rank in views.items()}


def _square(views: Mapping[int, Array]) -> float:
    return float(np.square(next(iter(views.values())), dtype=np.float64).sum())


def _relative(ours: float, reference: float) -> float:
    distance = abs(ours - reference) / max(abs(reference), 1e-30)
    return distance if np.isfinite(distance) else np.inf
