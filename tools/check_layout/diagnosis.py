"""The usual causes of a difference, by its pattern: what a person who has met the fault before would look at first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import numpy as np

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.check_layout.data import Array, TrainingRecord, Views

_NEAR = 1e-3  # two arrays are alike where they differ by less than this share of their norm
_MOST_BLOCKS = 4  # of which every order is tried


def causes_of_weights(reference: Array, views: Mapping[int, Array], layout: TrainingRecord) -> list[str]:
    """Returns the usual causes of weights that differ before training."""
    if len({id(view) for view in views.values()}) > 1:
        return ["the ranks drew other values: a generator that depends on the rank"]
    return [
        *_orders(reference, next(iter(views.values()), reference), layout),
        "weights are drawn for this rank's shape, not drawn whole and then cut: every layout starts from another model",
    ]


def causes_of_output(
    name: str, reference: Array, views: Mapping[int, Array], weights: Views, layout: TrainingRecord
) -> list[str]:
    """Returns the usual causes of a module's output that differs while all that was computed before agrees."""
    causes: list[str] = []
    for rank, view in views.items():
        part = expected_part(reference, view.shape, rank, layout.parallel)
        if part is None or _alike(view, part):
            continue
        bias = weights.get(f"{name}.bias", {}).get(rank)
        if bias is not None and bias.shape == view.shape[-1:]:
            times = _ratio((view - part).reshape(-1, bias.size).mean(axis=0), bias)
            if times is not None and _alike(view - part, np.broadcast_to(times * bias, view.shape)):
                causes.append(
                    f"{name}.bias is added {times + 1:.3g} times{_is(times + 1, layout)}: add it after the sum "
                    f"over tp, not on every rank before it"
                )
        ratio = _ratio(view, part)
        if ratio is not None:
            causes.append(
                f"the output is {ratio:.4g} x the reference{_is(ratio, layout)}: a sum over tp too many or few"
            )
        causes += _orders(part, view, layout)
        break
    return causes or [
        f"all that was computed before {name} agrees, so look inside it: a missing or doubled sum over tp, a gather in "
        f"the wrong order, or a mask, a position or a dropout that is another on each rank"
    ]


def causes_of_loss(ours: float, reference: float, layout: TrainingRecord) -> list[str]:
    """Returns the usual causes of a loss that differs while every output agrees."""
    ratio = ours / reference if reference else float("nan")
    return [
        f"the loss is {ratio:.4g} x the reference{_is(ratio, layout)}, and every output agrees: look at what it is "
        f"divided by, and over which ranks it is summed"
    ]


def causes_of_gradient(
    name: str, differing: Sequence[str], reference: Mapping[str, Array], ours: Views, layout: TrainingRecord
) -> list[str]:
    """Returns the usual causes of gradients that differ while the loss and every output agree."""
    parallel, views, wanted = layout.parallel, ours.get(name, {}), reference[name]
    if not views:
        return ["no rank has a gradient for it: it is cut off from the loss, frozen, or on no pipeline stage"]
    if not wanted.any():
        return ["one process has no gradient for it: it is frozen (requires_grad=False), or no forward pass uses it"]
    causes = [*_missing_sums(wanted, views, layout)]
    ratios = [r for n in differing if ours.get(n) and (r := _ratio(next(iter(ours[n].values())), reference[n]))]
    ratio = _ratio(next(iter(views.values())), wanted)
    if ratio is not None and not causes:
        everywhere = len(differing) == len(reference) == len(ratios) and max(ratios) - min(ratios) < _NEAR * ratio
        causes += _causes_of_ratio(ratio, name, layout, everywhere=everywhere)
    causes += _orders(wanted, next(iter(views.values())), layout)
    if not causes and all(layout.split.get(n, 0) is None for n in differing) and parallel.tp > 1:
        causes.append(
            "only parameters that tp replicates differ: their gradients are sums over tp that are not taken, or taken "
            "where they are whole already"
        )
    if not causes and all(layout.split.get(n) == 0 for n in differing) and parallel.tp > 1:
        causes.append(
            "only column-parallel weights differ, and the loss agrees: their input is gathered again in the backward, "
            "in the wrong rank order"
        )
    return causes or ["the backward of a collective is not the conjugate of its forward; see layers/regions.py"]


def causes_of_norm(
    norms: tuple[float, float], gradients: Mapping[str, Array], layout: TrainingRecord
) -> tuple[list[str], list[str]]:
    """Returns the parameters to blame for a norm that differs while the gradients agree one by one, and the causes."""
    squares = {name: float(np.square(gradient.astype(np.float64)).sum()) for name, gradient in gradients.items()}
    excess, parallel = norms[1] ** 2 - norms[0] ** 2, layout.parallel
    groups = [
        ("replicated over tp", [name for name in squares if layout.split.get(name, 0) is None]),
        ("tied", [name for name in squares if name in layout.tied]),
        ("all", list(squares)),
        *((f"{name} alone", [name]) for name in squares),
    ]
    for label, names in groups:
        total = sum(squares[name] for name in names)
        for times in sorted({2, 3, *parallel.axes.values(), parallel.dp, parallel.world_size} - {1}):
            for counted in (float(times), 1 / times):
                if total and abs(total * (counted - 1) - excess) <= 1e-2 * abs(excess):
                    found = sorted(names, key=lambda name: -squares[name])
                    why = f"parameters counted {counted:.3g} times{_is(counted, layout)} in the squared norm: {label}"
                    return found, [f"{why}; count each once, whatever the number of ranks that hold it"]
    return [], ["the squares are not summed over every rank that holds a part, or over some twice"]


def causes_of_parameter(views: Mapping[int, Array], before: Mapping[int, Array]) -> list[str]:
    """Returns the usual causes of a parameter that differs after a step whose gradients and norm agree."""
    if not views:
        return ["no rank has it"]
    if len({id(view) for view in views.values()}) > 1:
        return ["the ranks' copies differ from each other: not every rank takes the step, or from other moments"]
    rank = next(iter(views))
    if rank in before and np.array_equal(views[rank], before[rank]):
        return ["it has not moved: the optimizer steps another tensor than the model uses, or does not know it"]
    return ["the optimizer treats it otherwise: its weight decay, its learning rate, or clipping by another norm"]


def expected_part(whole: Array, shape: tuple[int, ...], rank: int, parallel: ParallelConfig) -> Array | None:
    """Returns the part of one process's output that `rank` should have: its data rank's share of the batch, and of each
    other dim all or its tp rank's share. Returns None where the shapes do not say."""
    place = parallel.coordinates(rank)
    dp_rank = place.dp_replicate * parallel.dp_shard + place.dp_shard
    if len(shape) != whole.ndim or shape[0] * parallel.dp != whole.shape[0]:
        return None
    part = np.split(whole, parallel.dp, axis=0)[dp_rank]
    for dim in range(1, whole.ndim):
        if shape[dim] * parallel.tp == whole.shape[dim]:
            part = np.split(part, parallel.tp, axis=dim)[place.tp]
        elif shape[dim] != whole.shape[dim]:
            return None
    return part


def _missing_sums(wanted: Array, views: Mapping[int, Array], layout: TrainingRecord) -> Iterator[str]:
    """Yields, for copies that should agree and do not, what a sum or a mean over an axis would make of them."""
    parallel = layout.parallel
    for axis, size in (("tp", parallel.tp), ("dp_replicate", parallel.dp_replicate), ("dp_shard", parallel.dp_shard)):
        places = {rank: vars(parallel.coordinates(rank)) for rank in views}
        first = next(iter(places.values()))
        peers = [views[rank] for rank, place in places.items() if all(place[a] == first[a] for a in place if a != axis)]
        if size == 1 or len(peers) != size or all(peer is peers[0] for peer in peers):
            continue
        total = np.sum(peers, axis=0)
        if _alike(total, wanted):
            sequence = " (under sequence parallelism each sees other tokens)" if axis == "tp" else ""
            yield f"each {axis} rank has a summand of it{sequence}: its gradient is not summed over {axis}"
        elif _alike(total / size, wanted):
            yield f"the {axis} ranks' gradients are not averaged: their mean is right"
        else:
            yield f"the {axis} ranks hold different gradients of what should be one parameter: a missing reduction"


def _causes_of_ratio(ratio: float, name: str, layout: TrainingRecord, *, everywhere: bool) -> list[str]:
    """Returns the causes of a gradient that is a plain multiple of what it should be."""
    dp, tp, is_tied = layout.parallel.dp, layout.parallel.tp, name in layout.tied
    rows = [
        (is_tied, 2, "", "a tied weight's gradient is summed between its two uses once too often"),
        (everywhere, dp, "dp", "summed over data ranks and not averaged, or the loss divided by one rank's tokens"),
        (everywhere, 1 / dp, "1 / dp", "averaged over the data ranks though the loss is divided by all tokens already"),
        (True, tp, "tp", "summed over tp though each rank has the whole of it, or its input's gradient is"),
        (True, 1 / tp, "1 / tp", "averaged over tp, where the ranks' parts add up"),
        (not everywhere, dp, "dp", "summed over the data ranks where the others are averaged"),
        (not is_tied, 2, "", "counted twice, by a parameter that is used twice or a hook that runs twice"),
    ]
    said = f"{'every' if everywhere else 'the'} gradient is {ratio:.4g} x the reference"
    return [
        f"{said}{f', which is {what}' if what else ''}: {why}"
        for holds, times, what, why in rows
        if holds and times != 1 and abs(ratio - times) <= _NEAR * times
    ]


def _orders(reference: Array, ours: Array, layout: TrainingRecord) -> list[str]:
    """Returns a cause where the blocks of some dim are right but stand in another order."""
    if ours.shape != reference.shape or not np.any(reference):
        return []
    far = float(np.linalg.norm(ours - reference))
    for axis, n in (("tp", layout.parallel.tp), ("dp_shard", layout.parallel.dp_shard), ("dp", layout.parallel.dp)):
        for dim in range(reference.ndim):
            if not 1 < n <= _MOST_BLOCKS or reference.shape[dim] % n:
                continue
            blocks = np.split(reference, n, axis=dim)
            for order in permutations(range(n)):
                permuted = np.concatenate([blocks[i] for i in order], axis=dim)
                if float(np.linalg.norm(ours - permuted)) < 1e-3 * far:
                    return [
                        f"dim {dim} has the right {n} blocks in the order {list(order)}: a gather over {axis} that "
                        f"joins the ranks in the wrong order"
                    ]
    return []


def _ratio(ours: Array, reference: Array) -> float | None:
    """Returns k where ours is k x reference; None where ours is not a multiple."""
    square = float(np.vdot(reference, reference))
    if ours.shape != reference.shape or square == 0.0:
        return None
    k = float(np.vdot(ours, reference)) / square
    return k if _alike(ours, k * reference) else None


def _alike(a: Array, b: Array) -> bool:
    return float(np.linalg.norm(a - b)) <= _NEAR * max(float(np.linalg.norm(b)), 1e-12)


def _is(number: float, layout: TrainingRecord) -> str:
    """Returns a remark that names the axis whose size, or its inverse, a number is; empty where there is no such
    axis."""
    axes = {**layout.parallel.axes, "dp": layout.parallel.dp}
    named = [axis for axis, size in axes.items() if size > 1 and abs(number - size) < _NEAR * size]
    inverse = [f"1 / {axis}" for axis, size in axes.items() if size > 1 and abs(number * size - 1) < _NEAR]
    return f" (which is {' or '.join(named + inverse)})" if named or inverse else ""
