"""Better numbers of devices or global batch sizes close to those of the request.

For example, with a batch of 512 sequences, 124 devices need 31 pipeline stages, but 128 devices
do not need a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from parallel3d.planner.search.best_layouts import fastest_by_closed_form
from parallel3d.planner.search.request import PlanRequest, Strategy
from parallel3d.planner.search.ties import TIE

_MOST = 2  # Maximum number of alternatives to try for each field.


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """The fastest layout, by the closed form, for a different number of devices or batch size.

    `gain` is its relative gain in tokens/s per device.
    """

    strategy: Strategy
    gain: float


def find_neighbours(request: PlanRequest, step_s: float) -> dict[str, Neighbour | None]:
    """Finds the nearest round `gpus` and `global_batch_size` with a gain of at least 5%, or None.

    `step_s` is the closed-form step time of the request's fastest layout.
    """
    node = request.cluster.gpus_per_node
    sequence_s = step_s * request.gpus / request.global_batch_size  # device-seconds per sequence
    # The unit is the largest power of two that divides a node: 8 for a rack of 72.
    sizes = _near_numbers(request.gpus, node & -node)
    batches = _near_numbers(request.global_batch_size, request.gpus)
    on_others = [replace(request, gpus=each) for each in sizes]
    with_others = [replace(request, global_batch_size=each) for each in batches]
    return {
        "gpus": _first_gain(on_others, sequence_s),
        "global_batch_size": _first_gain(with_others, sequence_s),
    }


def _near_numbers(number: int, unit: int) -> list[int]:
    """Returns the two roundest other numbers within a third of `number`, nearest first.

    Multiples of `unit` are roundest, then multiples of large powers of 2.
    """
    found = set()
    for step in (unit, *(2**power for power in range(number.bit_length()))):
        below = number // step * step
        found |= {below - step, below, below + step}
    near = [each for each in found - {number} if 2 * number <= 3 * each <= 4 * number]
    near.sort(key=lambda each: (each % unit == 0, each & -each), reverse=True)
    return sorted(near[:_MOST], key=lambda each: (abs(each - number), -each))


def _first_gain(requests: list[PlanRequest], sequence_s: float) -> Neighbour | None:
    """Returns the fastest layout of the first request that gains at least 5%, or None."""
    for other in requests:
        as_slow_s = sequence_s * other.global_batch_size / other.gpus
        best = fastest_by_closed_form(other, within_s=as_slow_s / (1 + TIE))
        if best and as_slow_s < inf:
            gain = as_slow_s / best.step_time_s - 1
            return Neighbour(strategy=Strategy(other, best.parallel), gain=gain)
    return None
