"""Two records of training, of one process and of a layout, compared; the first difference, and how large each step's
largest is. Pure arithmetic on arrays: no process, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.check_layout.data import Array, StepRecord, TrainingRecord, Views
from parallel3d.tools.check_layout.diagnosis import (
    CheckedLayout,
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
    rows: tuple[StepRow, ...]
    first: Difference | None  # None: the same model


def compare(alone: TrainingRecord, layout: TrainingRecord, parallel: ParallelConfig) -> LayoutComparison:
    """Compares step by step; within a step in the order in which things are computed."""
    case = CheckedLayout(parallel, layout.split, frozenset(layout.tied))
    first = _first_weight(alone, layout, case)
    rows = []
    before, start = alone.start, layout.start
    for number, (reference, ours) in enumerate(zip(alone.steps, layout.steps, strict=True), start=1):
        found = _sizes(reference, ours, before, case)
        rows.append(_row(number, reference, ours, found))
        if first is None:
            first = _first_of_step(number, reference, ours, found, case, start)
        before, start = reference.parameters, ours.parameters
    return LayoutComparison(tuple(rows), first)


Sizes = dict[str, dict[int, float]]  # name -> rank -> size of the difference


def _sizes(reference: StepRecord, ours: StepRecord, before: Views, case: CheckedLayout) -> dict[What, Sizes]:
    updates = {name: views[0] - before[name][0] for name, views in reference.parameters.items()}
    return {
        "output": _output_sizes(reference.activations, ours.activations, case),
        "loss": {"": {0: _relative(ours.loss, reference.loss)}},
        "gradient": _view_sizes(reference.gradients, ours.gradients, _scales(_only(reference.gradients))),
        "gradient norm": {"": {0: _relative(ours.grad_norm, reference.grad_norm)}},
        "parameter": _view_sizes(reference.parameters, ours.parameters, _scales(updates), rounding=_ROUNDING),
    }


def _first_weight(alone: TrainingRecord, layout: TrainingRecord, case: CheckedLayout) -> Difference | None:
    sizes = _view_sizes(alone.initial, layout.initial, _scales(_only(alone.initial)))

    def causes(name: str, ranks: tuple[int, ...]) -> list[str]:
        return causes_of_weights(alone.initial[name][0], layout.initial.get(name, {}), case)

    return _difference(0, "initial weight", sizes, causes)


def _first_of_step(
    number: int, reference: StepRecord, ours: StepRecord, found: dict[What, Sizes], case: CheckedLayout, start: Views
) -> Difference | None:
    def causes(what: What) -> Callable[[str, tuple[int, ...]], list[str]]:
        def of(name: str, ranks: tuple[int, ...]) -> list[str]:
            match what:
                case "output":
                    return causes_of_output(name, reference.activations[name][0], ours.activations[name], start, case)
                case "loss":
                    return causes_of_loss(ours.loss, reference.loss, case)
                case "gradient":
                    differing = _differing(found[what], LIMITS[what])
                    return causes_of_gradient(name, differing, _only(reference.gradients), ours.gradients, case)
                case "gradient norm":
                    norms = (reference.grad_norm, ours.grad_norm)
                    return list(causes_of_norm(norms, _only(reference.gradients), case)[1])
                case "parameter":
                    return causes_of_parameter(ours.parameters.get(name, {}), start.get(name, {}))
            return []

        return of

    for what, sizes in found.items():
        difference = _difference(number, what, sizes, causes(what))
        if difference is None:
            continue
        if what == "gradient norm":
            named, _ = causes_of_norm((reference.grad_norm, ours.grad_norm), _only(reference.gradients), case)
            return _with_parameters(difference, tuple(named))
        if what == "loss":
            return _with_parameters(difference, tuple(_differing(found["gradient"], LIMITS["gradient"])))
        if what == "output":
            return _with_parameters(difference, _parameters_of(difference.name, reference.parameters))
        return difference
    return None


def _difference(
    step: int, what: What, sizes: Sizes, causes: Callable[[str, tuple[int, ...]], list[str]]
) -> Difference | None:
    names = _differing(sizes, LIMITS[what])
    if not names:
        return None
    name = names[0]
    ranks = tuple(rank for rank, size in sizes[name].items() if size > LIMITS[what])
    size = max(sizes[name].values())
    return Difference(
        step, what, name, size, ranks, (name,) if name else (), tuple(names[1:]), tuple(causes(name, ranks))
    )


def _with_parameters(difference: Difference, parameters: tuple[str, ...]) -> Difference:
    return Difference(**{**vars(difference), "parameters": parameters})


def _parameters_of(module: str, parameters: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the parameters that the module itself has, or else those of the modules inside it."""
    below = [name for name in parameters if name.startswith(f"{module}.")]
    own = [name for name in below if name.count(".") == module.count(".") + 1]
    return tuple(own or below)


def _differing(sizes: Sizes, limit: float) -> list[str]:
    return [name for name, by_rank in sizes.items() if not all(size <= limit for size in by_rank.values())]


def _row(number: int, reference: StepRecord, ours: StepRecord, found: dict[What, Sizes]) -> StepRow:
    worst: dict[What, tuple[str, float]] = {}
    for what, sizes in found.items():
        worst[what] = max(
            ((name, size) for name, by_rank in sizes.items() for size in by_rank.values()),
            key=lambda pair: pair[1],
            default=("", 0.0),
        )
    return StepRow(number, (reference.loss, ours.loss), (reference.grad_norm, ours.grad_norm), worst)


def _view_sizes(reference: Views, ours: Views, scales: Mapping[str, float], *, rounding: float = 0.0) -> Sizes:
    """Returns how far each rank's view of each tensor is from the reference, in units of the tensor's scale."""
    sizes: Sizes = {}
    for name, views in reference.items():
        allowed = rounding * float(np.abs(views[0]).max(initial=0.0))
        seen = ours.get(name, {})
        sizes[name] = {rank: _distance(array, views[0], scales[name], allowed) for rank, array in seen.items()}
        if not seen:
            sizes[name] = {0: np.inf}
    return sizes


def _output_sizes(reference: Views, ours: Views, case: CheckedLayout) -> Sizes:
    """Does what `_view_sizes` does, for outputs, of which each rank has a part. An output is left out where shapes do
    not say which part."""
    sizes: Sizes = {}
    for name, views in reference.items():
        scale = float(np.abs(views[0]).max(initial=0.0)) or 1.0
        for rank, array in ours.get(name, {}).items():
            part = expected_part(views[0], array.shape, rank, case.parallel)
            if part is not None:
                sizes.setdefault(name, {})[rank] = _distance(array, part, scale, 0.0)
    return sizes


def _distance(ours: Array, reference: Array, scale: float, allowed: float) -> float:
    if ours.shape != reference.shape:
        return np.inf
    distance = float(np.abs(ours - reference).max(initial=0.0))
    return max(0.0, distance - allowed) / scale if np.isfinite(distance) else np.inf  # max() would lose a NaN


def _scales(tensors: Mapping[str, Array]) -> dict[str, float]:
    largest = {name: float(np.abs(array).max(initial=0.0)) for name, array in tensors.items()}
    floor = _FLOOR * max(largest.values(), default=0.0) or 1.0
    return {name: max(size, floor) for name, size in largest.items()}


def _only(views: Views) -> dict[str, Array]:
    """Returns the tensors of a record of one process."""
    return dict(_items(views))


def _items(views: Views) -> Iterator[tuple[str, Array]]:
    for name, by_rank in views.items():
        yield name, by_rank[0]


def _relative(ours: float, reference: float) -> float:
    distance = abs(ours - reference) / max(abs(reference), 1e-30)
    return distance if np.isfinite(distance) else np.inf
