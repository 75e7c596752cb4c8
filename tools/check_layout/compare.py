"""Compares the training records of one process and of a layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from parallel3d.config.recipe import ParallelConfig
from parallel3d.layers.sequence import SequencePart
from parallel3d.mesh import SPLIT_SEQUENCES, Axis, Role, dp_rank
from parallel3d.tools.check_layout.data import Array, TrainingRecord, Views

What = Literal[
    "initial weight", "choice", "output", "loss", "gradient", "gradient norm", "parameter", "load"
]

# Largest allowed differences, relative to a tensor's largest entry, or for parameters to the
# largest update. Correct layouts differ by up to 1e-6 (losses and norms 2e-7, parameters 1e-4),
# because they sum in a different order. The mildest fault in the tests changes a norm by 1.5e-4.
LIMITS: dict[What, float] = {
    "initial weight": 1e-6,
    "choice": 1e-5,
    "output": 1e-4,
    "loss": 2e-6,
    "gradient": 1e-4,
    "gradient norm": 2e-6,
    "parameter": 1e-2,
    "load": 0.0,
}
# Differences of very small tensors are relative to this fraction of the largest entry or update of
# any tensor.
_FLOOR = 1e-3
# Tolerated rounding, relative to a parameter's largest entry.
_ROUNDING = 4 * float(np.finfo(np.float32).eps)

# Usual causes, keyed by the first kind of value that differs.
_CAUSES: dict[What, str] = {
    "initial weight": (
        "weights are initialized with the shape of a rank's shard, or from a generator that "
        "depends on the rank, instead of initializing the full weight and then sharding it"
    ),
    "choice": (
        "all earlier outputs agree, so check the router: its precision, the order of equal "
        "scores, a bias that differs between ranks. The size is the margin between the scores"
    ),
    "output": (
        "all earlier outputs agree, so check this module: a missing or duplicate sum over tp, a "
        "bias added on every rank before the sum, a gather in the wrong order, positions that are "
        "not those of the rank's tokens"
    ),
    "loss": (
        "every output agrees: the loss is divided by a wrong number, or summed over wrong ranks"
    ),
    "gradient": (
        "a reduction is missing, duplicate or over the wrong ranks, or the backward pass of a "
        "collective is not the conjugate of its forward pass (layers/regions.py)"
    ),
    "gradient norm": (
        "all gradients agree: parameters are counted once per rank that holds them, or once per "
        "use of a tied weight"
    ),
    "parameter": (
        "the gradients agree: the optimizer updates a different tensor than the model uses, or "
        "uses a different weight decay, learning rate or clipping"
    ),
    "load": (
        "the choices agree: tokens of an expert are counted on several ranks, again in a "
        "recomputation, or not summed over the mesh"
    ),
}

Sizes = dict[str, dict[int, float]]  # Relative differences, keyed by name and then by rank.


@dataclass(frozen=True)
class Difference:
    """The first difference above its limit. `name` is that of a parameter or, for an output, of a
    module. It is empty for a loss or gradient norm.
    """

    step: int  # Step of the difference, counted from 1. 0: before training.
    what: What
    name: str
    size: float  # Relative size. inf: missing, not finite, or of a different shape.
    ranks: tuple[int, ...]
    causes: tuple[str, ...]


@dataclass(frozen=True)
class LayoutComparison:
    """Result of a comparison: the largest difference of each kind, and the first one above its
    limit."""

    parallel: ParallelConfig
    steps: int
    largest: Mapping[What, float]
    first: Difference | None  # The first difference above its limit. None: the same model.


def compare(alone: TrainingRecord, layout: TrainingRecord) -> LayoutComparison:
    """Compares two records step by step, and each step in the order of computation."""
    largest: dict[What, float] = {}
    first: Difference | None = None
    for step, what, sizes in _sizes_of_all(alone, layout):
        for name, by_rank in sizes.items():
            size = max(by_rank.values())
            largest[what] = max(largest.get(what, 0.0), size)
            if first is None and size > LIMITS[what]:
                ranks = tuple(rank for rank, each in by_rank.items() if each > LIMITS[what])
                causes = [_CAUSES[what]]
                if what == "gradient":
                    wanted = alone.steps[step - 1].gradients.get(name, {})
                    views = layout.steps[step - 1].gradients.get(name, {})
                    causes = _gradient_pattern(wanted, views) + causes
                first = Difference(step, what, name, size, ranks, tuple(causes))
    return LayoutComparison(layout.parallel, len(layout.steps), largest, first)


def _sizes_of_all(
    alone: TrainingRecord, layout: TrainingRecord
) -> Iterator[tuple[int, What, Sizes]]:
    yield 0, "initial weight", _sizes(alone.initial, layout.initial)
    before = alone.start
    for step, (reference, ours) in enumerate(zip(alone.steps, layout.steps, strict=True), 1):
        for name, views in reference.activations.items():  # In the order of computation.
            what: What = "choice" if name in reference.loads else "output"
            sizes: Sizes = {}
            for rank, array in ours.activations.get(name, {}).items():
                part = expected_part(views[0], array.shape, rank, layout.parallel)
                if part is not None and what == "choice":
                    token, margin = _first_other_choice(part, array)
                    sizes.setdefault(f"{name}, token {token}", {})[rank] = margin
                elif part is not None:
                    scale = _largest(views[0]) or 1.0
                    sizes.setdefault(name, {})[rank] = _distance(array, part, scale)
            yield step, what, sizes
        yield step, "loss", _of_numbers(ours.loss, reference.loss)
        # A gradient that exists only in the layout, such as that of a frozen parameter, must be
        # zero.
        wanted = {name: {0: np.zeros_like(_any(views))} for name, views in ours.gradients.items()}
        gradients = _sizes(wanted | reference.gradients, ours.gradients)
        # Backward order, so that the first difference is the closest to its cause.
        yield step, "gradient", dict(reversed(gradients.items()))
        yield step, "gradient norm", _of_numbers(ours.grad_norm, norm_of(ours.gradients))
        yield step, "parameter", _sizes(reference.parameters, ours.parameters, before)
        yield step, "load", _sizes(reference.loads, ours.loads)
        before = reference.parameters


def _gradient_pattern(wanted: Mapping[int, Array], views: Mapping[int, Array]) -> list[str]:
    """Describes a typical error that a parameter's gradient shows, if any."""
    if not wanted or not views:
        return ["only one side has a gradient for it: it is frozen, or not connected to the loss"]
    if len({id(view) for view in views.values()}) > 1:
        return ["the ranks hold different gradients of one parameter: a reduction is missing"]
    reference = wanted[0]
    ours = _any(views)
    square = float(np.vdot(reference, reference))
    if ours.shape != reference.shape or square == 0.0:
        return []
    ratio = float(np.vdot(ours, reference)) / square
    if _largest(ours - ratio * reference) > 1e-3 * _largest(ours):
        return []
    return [f"it is {ratio:.4g} x the reference: summed instead of averaged, or the reverse"]


def _sizes(reference: Views, ours: Views, before: Views | None = None) -> Sizes:
    """Returns the largest difference of each rank's view from the reference, relative to the
    largest entry of the reference. With `before`, it is relative to the largest change since
    `before`, and rounding of the reference is subtracted.
    """
    scales = {}
    for name, views in reference.items():
        scales[name] = _largest(views[0] - before[name][0] if before else views[0])
    floor = _FLOOR * max(scales.values(), default=0.0) or 1.0
    sizes: Sizes = {}
    for name, views in reference.items():
        allowed = _ROUNDING * _largest(views[0]) if before else 0.0
        sizes[name] = {}
        for rank, array in ours.get(name, {0: np.empty(0)}).items():
            scale = max(scales[name], floor)
            sizes[name][rank] = _distance(array, views[0], scale, allowed)
    return sizes


def norm_of(gradients: Views) -> float:
    squares = [np.square(_any(views), dtype=np.float64).sum() for views in gradients.values()]
    return math.sqrt(sum(squares))


def _of_numbers(ours: float, reference: float) -> Sizes:
    scale = abs(reference) or 1.0
    return {"": {0: _distance(np.array(ours), np.array(reference), scale)}}


def expected_part(
    full: Array, shape: tuple[int, ...], rank: int, parallel: ParallelConfig
) -> Array | None:
    """Returns the part of a single-process output that `rank` should have: the batch of its
    data-parallel rank, its part of the sequence (dimension 1), and in each dimension all of these
    entries or the shard of its tp rank. Returns None if `shape` does not match.
    """
    coordinates = parallel.coordinates(rank)._asdict()
    shards = parallel.axes[Role.SPLIT_TENSORS]
    if len(shape) != full.ndim or shape[0] * parallel.dp != full.shape[0]:
        return None
    part = np.split(full, parallel.dp, axis=0)[dp_rank(parallel, rank)]
    if parallel.cp > 1 and part.shape[1] % parallel.sequence_chunks == 0:
        sequence = SequencePart(Axis(parallel.cp, coordinates[SPLIT_SEQUENCES], None))
        part = sequence.take(torch.from_numpy(part), 1).numpy()
    for dim in range(1, full.ndim):
        if shape[dim] * shards == part.shape[dim]:
            part = np.split(part, shards, axis=dim)[coordinates[Role.SPLIT_TENSORS]]
        elif shape[dim] != part.shape[dim]:
            return None
    return part


def _first_other_choice(expected: Array, own: Array) -> tuple[int, float]:
    """Returns the first token with other experts than in one process, and its margin there.

    Both arrays are those of `record.choices_of`. The margin is 0 if no choice differs by more than
    the limit.
    """
    wanted, found = (each.reshape(-1, each.shape[-1]) for each in (expected, own))
    differs = (wanted[:, :-1] != found[:, :-1]).any(1) & (wanted[:, -1] > LIMITS["choice"])
    token = int(differs.argmax())
    return token, float(wanted[token, -1]) if differs.any() else 0.0


def _distance(ours: Array, reference: Array, scale: float, allowed: float = 0.0) -> float:
    if ours.shape != reference.shape:
        return np.inf
    distance = _largest(ours - reference)
    if not np.isfinite(distance):  # max() would ignore a NaN.
        return np.inf
    return max(0.0, distance - allowed) / scale


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))


def _any(views: Mapping[int, Array]) -> Array:
    return next(iter(views.values()))
