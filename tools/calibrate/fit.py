"""Converts the measurements of `parallel3d-plan calibrate` into the values of a hardware file
(`planner.hardware.calibration`), by differences and slopes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from parallel3d.config.schema import adapter
from parallel3d.planner.hardware.calibration import OneProcess, Overhead
from parallel3d.planner.hardware.cluster import load_cluster
from parallel3d.planner.hardware.framework import PARALLEL3D
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.time.block import block_times, elementwise_bytes, head_times
from parallel3d.planner.time.roofline import Kernels
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.calibrate.probes import (
    LAYERS,
    MICROBATCHES,
    ON_CPU,
    TINY,
    LargerRuns,
    Probe,
    Size,
)

Times = Mapping[Probe, float]
Tree = dict[str, Any]
ANY = load_cluster("cpu", [HARDWARE])  # Placeholder, because only the measured curves are used.
_LEAST_REST = 0.02  # Minimum fraction of a block's time that is neither matmuls nor attention.


def process_tree(kernels: Tree, times: Times, larger: LargerRuns = ON_CPU) -> Tree:
    """Returns the hardware-file section of one process, from the measurements of its kernels and
    probes."""
    overhead = overhead_of(times, "alone", larger.parameters, larger)
    deep = LAYERS[-1]
    recompute = {}
    for kind in ("selective", "full"):
        _, microbatch_s = _over_microbatches(times, Probe(kind, TINY, deep, 0))
        block_s = (microbatch_s - overhead.microbatch) / deep
        recompute[kind] = max(0.0, block_s - overhead.block)
    tree: Tree = {
        **kernels,
        "byte_s": 1e-18,
        "gradient_s": 0.0,
        "logit_s": 0.0,
        "overhead": vars(overhead),
        "recompute": recompute,
    }
    # On a GPU, long kernels hide the dispatch, so it is not subtracted.
    hidden = 1.0 if larger.synchronous else 0.0
    # The time of a block outside matmuls and attention grows linearly with the memory traffic of
    # its other operators. The intercept is the time that depends on the number of weights.
    traffic = []
    rest = []
    for size in (larger.sizes[0], larger.sizes[-1]):
        run = larger_job(size, larger)
        microbatches_s = []
        for layers in LAYERS:
            probe = Probe("alone", larger.model, layers, 0, size)
            _, microbatch_s = _over_microbatches(times, probe)
            microbatches_s.append(microbatch_s)
        ends_s, block_s = _line(LAYERS, microbatches_s)
        block_s -= hidden * overhead.block
        products_s = _block_s(run, tree)
        traffic.append(sum(elementwise_bytes(run)))
        rest.append(max(_LEAST_REST * block_s, block_s - products_s))
    _, byte_s = _line(traffic, rest)
    byte_s = max(byte_s, _LEAST_REST * rest[1] / traffic[1])
    weights = _block_s(run, {**tree, "gradient_s": 1.0}) - products_s
    weights_s = max(0.0, rest[0] - traffic[0] * byte_s)
    tree |= {"byte_s": byte_s, "gradient_s": weights_s / weights}
    head_s = sum(head_times(run, _kernels(run, tree)))
    loss_s = ends_s - hidden * overhead.microbatch - head_s
    logits = run.tokens * run.rank_vocab
    tree["logit_s"] = max(0.0, loss_s / logits)
    return tree


def overheads(times: Times, ranks: int, larger: LargerRuns = ON_CPU) -> Tree:
    """Returns the results of probes on `ranks` processes: the overheads of each axis, and the
    seconds per microbatch of the pipeline.
    """
    axes = {}
    for axis in dict.fromkeys(probe.axis for probe in times):
        if axis == "pp":
            continue
        parameters = larger.parameters
        if axis.startswith("tp"):
            parameters /= ranks
        axes[axis] = vars(overhead_of(times, axis, parameters, larger))
    microbatches = [count * ranks for count in MICROBATCHES]
    steps_s = [times[Probe("pp", TINY, ranks, count)] for count in microbatches]
    _, microbatch_s = _line(microbatches, steps_s)
    return {"axes": axes, "pipeline": microbatch_s}


def together_tree(found: Mapping[str, Any], ranks: int, cores: int, alone: Overhead) -> Tree:
    """Returns the hardware-file section of `ranks` processes, with times as if each had its own
    core. `alone` is the overhead of a single process.
    """
    by_one, by_all = found["contention"]
    shared = max(1.0, ranks / cores) if cores else 1.0
    contention = max(1.0, by_all / by_one / shared)
    slowdown = shared * contention
    axes: dict[str, dict[str, float]] = {}
    for axis, taken in found["axes"].items():
        # With sharded optimizer states, a rank updates only its shard of the parameters.
        steps = ranks if axis in ("SHARD_OPTIMIZER", "FULL_SHARD") else 1
        base = {**vars(alone), "parameter": alone.parameter / steps}
        axes[axis] = {}
        for name, base_s in base.items():
            axes[axis][name] = max(0.0, taken[name] / slowdown - base_s)
    # Each pipeline rank has one tiny block and two actions per microbatch. Their overhead is the
    # measured time beyond that of blocks, embedding and head. With fewer cores than ranks, this is
    # the time of all ranks. Otherwise it is that of the first or last rank, with half of the time
    # of embedding and head.
    each = found["pipeline"] / contention
    if cores and ranks > cores:
        beyond_s = each * cores - ranks * alone.block - alone.microbatch
        action_s = beyond_s / (2 * ranks)
    else:
        beyond_s = each - alone.block - alone.microbatch / 2
        action_s = beyond_s / 2
    for rows in (found["transfers"], *found["collectives"].values()):
        for row in rows:
            row[1] /= slowdown
    return {
        "contention": contention,
        "action_s": max(0.0, action_s),
        "transfer": found["transfers"],
        "axes": axes,
        "collectives": found["collectives"],
    }


def overhead_of(
    times: Times, axis: str, parameters: float, larger: LargerRuns = ON_CPU
) -> Overhead:
    """Returns the overheads of training along an axis.

    A step takes `step + layers * layer + microbatches * (microbatch + layers * block)` seconds.
    Four runs of tiny models determine these values. Two runs of a larger model determine the time
    per parameter and step.
    """
    once = []
    each = []
    for layers in LAYERS:
        once_s, microbatch_s = _over_microbatches(times, Probe(axis, TINY, layers, 0))
        once.append(once_s)
        each.append(microbatch_s)
    step, layer = _line(LAYERS, once, least=0.0)
    microbatch, block = _line(LAYERS, each, least=0.0)
    deep = LAYERS[-1]
    probe = Probe(axis, larger.model, deep, 0, larger.sizes[1])
    larger_once, _ = _over_microbatches(times, probe)
    parameter = max(0.0, larger_once - step - deep * layer) / parameters
    return Overhead(block=block, microbatch=microbatch, layer=layer, step=step, parameter=parameter)


def _over_microbatches(times: Times, probe: Probe) -> tuple[float, float]:
    """Returns the seconds of a probe (per step, per microbatch)."""
    steps_s = [times[probe._replace(microbatches=count)] for count in MICROBATCHES]
    return _line(MICROBATCHES, steps_s)


def _line(
    at: Sequence[float], seconds: Sequence[float], *, least: float = -math.inf
) -> tuple[float, float]:
    """Returns the intercept and the slope of the line through two points, each at least `least`."""
    few, many = at
    first, second = seconds
    each = max(least, (second - first) / (many - few))
    at_zero = max(least, first - few * each)
    return at_zero, each


def larger_job(size: Size, larger: LargerRuns = ON_CPU) -> PlannedRun:
    seq, microbatch_size = size
    return PlannedRun(
        shape=from_config(larger.model),
        cluster=ANY,
        layout=RunLayout(microbatches=2, microbatch_size=microbatch_size),
        framework=PARALLEL3D,
        seq_len=seq,
        precision=larger.precision,
    )


def _kernels(run: PlannedRun, process: Tree) -> Kernels:
    return Kernels(
        device=run.cluster.device,
        precision=run.precision,
        process=adapter(OneProcess).validate_python(process),
    )


def _block_s(run: PlannedRun, process: Tree) -> float:
    """Returns the seconds of a block of the larger model, as estimated from the curves of
    `process`.
    """
    block = block_times(run, _kernels(run, process))
    return block.forward_s + block.backward_s
