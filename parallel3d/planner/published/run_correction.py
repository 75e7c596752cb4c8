"""Scales that correct the predictions for a cluster, fitted to measured runs on it.

One run scales all predictions equally, so the order of layouts does not change. Two or more give
separate scales for devices, links within a node, and the network. Logarithms are fitted by weighted
least squares with a prior scale of 1. The fit is iterated, because overlap makes step times
nonlinear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from parallel3d.planner.hardware.cluster import Scales, with_scales
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.time.step import step_cost

Logs = Collection[float]
# Standard deviations of logarithms (docs/explanation/planner.md): priors of the three scales
# separately (devices, node, network) and of a common one, prior of memory, error of a run.
_EACH = [0.15, 0.3, 0.5]
_ALIKE, _MEMORY = [0.2], [0.15]
_RUN = 0.1
_ROUNDS = 4  # iterations of the fit
_STEP = 0.02  # step of the numerical derivative


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A measured run. The cluster of `run` has no corrections."""

    run: PlannedRun
    step_time_s: float
    memory_bytes: float | None  # Peak of `torch.cuda.max_memory_allocated`. None: unknown.

    def scaled(self, scales: Scales) -> PlannedRun:
        """Returns the run on its cluster with these corrections."""
        return replace(self.run, cluster=with_scales(self.run.cluster, scales))


def scales_of(runs: Sequence[MeasuredRun]) -> Scales:
    """Returns the scales that best fit measured runs on one cluster."""
    weighed = [each for each in runs if each.memory_bytes]
    steps = [log(each.step_time_s) for each in runs]
    peaks = [log(each.memory_bytes or 1) for each in weighed]
    deviations = _ALIKE if len(runs) < 2 else _EACH

    def log_times(logs: Logs) -> list[float]:
        scales = _time_scales(logs)
        return [log(step_cost(each.scaled(scales)).step_time_s) for each in runs]

    def log_peaks(logs: Logs) -> list[float]:
        scales = Scales(memory=exp(*logs))
        return [log(worst_rank(each.scaled(scales)).allocated) for each in weighed]

    logs = _fit(log_times, steps, deviations)
    memory = _fit(log_peaks, peaks, _MEMORY)
    return replace(
        _time_scales(logs),
        memory=exp(*memory),
        timed=tuple(each.run.framework.name for each in runs),
        weighed=tuple(each.run.framework.name for each in weighed),
    )


def _fit(
    predict: Callable[[Logs], list[float]],
    measured: list[float],
    deviations: list[float],
) -> list[float]:
    """Returns the log scales at which `predict` best fits the log values `measured`, with priors of
    standard deviation `deviations`.
    """
    import numpy as np

    count = len(deviations)
    x = np.zeros(count)
    prior = np.diag(1 / np.square(deviations))
    for _ in range(_ROUNDS):
        here = np.array(predict(x))
        columns = []
        for axis in np.eye(count):
            there = np.array(predict(x + _STEP * axis))
            columns.append((there - here) / _STEP / _RUN)
        jacobian = np.stack(columns, axis=1)
        off = (np.array(measured) - here) / _RUN + jacobian @ x
        x = np.linalg.solve(prior + jacobian.T @ jacobian, jacobian.T @ off)
    return x.tolist()


def _time_scales(logs: Logs) -> Scales:
    """Returns the scales of devices, node and network from their logarithms, or a common one."""
    devices, node, network = [*logs] * (3 // len(logs))
    return Scales(arithmetic=exp(devices), node=exp(node), network=exp(network))
