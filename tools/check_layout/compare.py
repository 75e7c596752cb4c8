"""Two records of training, of one process and of a layout, compared: the first difference, and the
largest one of each step. Pure arithmetic on arrays: no process, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
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
class Pair:
    """A number of one process, and that of the layout."""

    reference: float
    layout: float


@dataclass(frozen=True)
class Worst:
    """The largest difference of a kind."""

    name: str
    difference: float


@dataclass(frozen=True)
class StepRow:
    """One step of both runs, and the largest difference of each kind."""

    step: int
    loss: Pair
    gradient_norm: Pair
    worst: Mapping[What, Worst]


@dataclass(frozen=True)
class LayoutComparison:
    parallel: ParallelConfig
    rows: tuple[StepRow, ...]
    first: Difference | None  # None: the same model


def compare(alone: TrainingRecord, layout: TrainingRecord) -> LayoutComparison:
    """Compares step by step, and within a step in the order in which things are computed."""
    weights = _sizes(alone.initial, layout.initial)
    first = _first_difference(0, {"initial weight": weights})
    rows = []
    before = alone.start
    for number, (reference, ours) in enumerate(zip(alone.steps, layout.steps, strict=True), 1):
        found = _compare_step(reference, ours, before, layout.parallel)
        worst = {what: _worst(sizes) for what, sizes in found.items()}
        loss = Pair(reference.loss, ours.loss)
        rows.append(StepRow(number, loss, Pair(reference.grad_norm, ours.grad_norm), worst))
        before = reference.parameters
        if first is None:
            first = _first_difference(number, found, reference.gradients, ours.gradients)
    return LayoutComparison(layout.parallel, tuple(rows), first)


def _compare_step(
    reference: StepRecord, ours: StepRecord, before: Views, parallel: ParallelConfig
) -> dict[What, Sizes]:
    updates = {name: views[0] - before[name][0] for name, views in reference.parameters.items()}
    outputs: Sizes = {}
    for name, views in reference.activations.items():
        for rank, array in ours.activations.get(name, {}).items():
            part = expected_part(views[0], array.shape, rank, parallel)
            if part is not None:
                scale = _largest(views[0]) or 1.0
                outputs.setdefault(name, {})[rank] = _distance(array, part, scale)
    # A parameter that has a gradient only in the layout, such as a frozen one, should have zeros.
    wanted = {name: {0: np.zeros_like(_any(views))} for name, views in ours.gradients.items()}
    gradients = _sizes(wanted | reference.gradients, ours.gradients)
    return {
        "output": outputs,
        "loss": _of_numbers(ours.loss, reference.loss),
        # In the order of the backward pass, so that the nearest to the fault comes first.
        "gradient": dict(reversed(gradients.items())),
        "gradient norm": _of_numbers(ours.grad_norm, norm_of(ours.gradients)),
        "parameter": _sizes(reference.parameters, ours.parameters, updates, rounding=_ROUNDING),
    }


def _first_difference(
    step: int,
    found: Mapping[What, Sizes],
    reference: Views | None = None,
    ours: Views | None = None,
) -> Difference | None:
    """Returns the first kind of difference that is over its limit. `reference` and `ours` are the
    gradients, which tell its causes."""
    for what, sizes in found.items():
        names = [name for name, by_rank in sizes.items() if max(by_rank.values()) > LIMITS[what]]
        if not names:
            continue
        first, *also = names
        causes = [_CAUSES[what]]
        if what == "gradient" and reference is not None and ours is not None:
            causes = _gradient_pattern(reference.get(first), ours.get(first)) + causes
        ranks = tuple(rank for rank, size in sizes[first].items() if size > LIMITS[what])
        largest = max(sizes[first].values())
        return Difference(step, what, first, largest, ranks, tuple(also), tuple(causes))
    return None


def _gradient_pattern(
    wanted: Mapping[int, Array] | None, views: Mapping[int, Array] | None
) -> list[str]:
    """Returns a sentence on what is plainly wrong with the gradient of a parameter."""
    if wanted is None:
        return ["one process has no gradient for it: it is frozen, or no forward pass uses it"]
    if views is None:
        return ["no rank has a gradient for it: it is cut off from the loss, or frozen"]
    if len({id(view) for view in views.values()}) > 1:
        return ["the ranks hold different gradients of one parameter: a reduction is missing"]
    reference, ours = wanted[0], _any(views)
    square = float(np.vdot(reference, reference))
    if ours.shape != reference.shape or square == 0.0:
        return []
    ratio = float(np.vdot(ours, reference)) / square
    if _largest(ours - ratio * reference) > 1e-3 * _largest(ours):
        return []
    return [f"it is {ratio:.4g} x the reference: summed instead of averaged, or the reverse"]


def _worst(sizes: Sizes) -> Worst:
    largest = [Worst(name, max(by_rank.values())) for name, by_rank in sizes.items()]
    return max(largest, key=attrgetter("difference"), default=Worst("", 0.0))


def _sizes(
    reference: Views,
    ours: Views,
    scaled_by: Mapping[str, Array] | None = None,
    *,
    rounding: float = 0.0,
) -> Sizes:
    """Returns the distance of the view of each rank from the reference, relative to the largest
    entry of the tensor in `scaled_by` (default: of the reference)."""
    if scaled_by is None:
        scaled_by = {name: views[0] for name, views in reference.items()}
    scales = {name: _largest(array) for name, array in scaled_by.items()}
    floor = _FLOOR * max(scales.values(), default=0.0) or 1.0
    sizes: Sizes = {}
    for name, views in reference.items():
        scale, allowed = max(scales[name], floor), rounding * _largest(views[0])
        sizes[name] = {}
        for rank, array in ours.get(name, {0: np.empty(0)}).items():
            sizes[name][rank] = _distance(array, views[0], scale, allowed)
    return sizes


def norm_of(gradients: Views) -> float:
    """Returns the norm of all gradients together."""
    squares = [np.square(_any(views), dtype=np.float64).sum() for views in gradients.values()]
    return math.sqrt(sum(squares))


def _of_numbers(ours: float, reference: float) -> Sizes:
    scale = abs(reference) or 1.0
    return {"": {0: _distance(np.array(ours), np.array(reference), scale)}}


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


def _any(views: Mapping[int, Array]) -> Array:
    return next(iter(views.values()))
