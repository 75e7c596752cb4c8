"""From what `parallel3d-plan calibrate` has timed to the figures of a hardware file
(`planner.measured`): differences and slopes, nothing fitted by eye. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from parallel3d.config.recipe import ModelConfig
from parallel3d.planner.hardware.calibration import Overhead, one_process_from_tree
from parallel3d.planner.hardware.cluster import Cluster
from parallel3d.planner.hardware.program import MEASURED_PARALLEL3D
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.time.block import block_times, elementwise_bytes, head_times
from parallel3d.planner.time.roofline import Kernels
from parallel3d.tools.calibrate.probes import (
    LARGER_LAYERS,
    LARGER_MICROBATCHES,
    ON_CPU,
    TINY,
    TINY_LAYERS,
    TINY_MICROBATCHES,
    TINY_SEQ,
    LargerRuns,
    probe_name,
)

Times = Mapping[str, float]
Tree = dict[str, Any]
_LEAST_REST = 0.02  # least share of a block that is neither products nor attention


def process_tree(
    kernels: Tree, times: Times, cluster: Cluster, larger: LargerRuns = ON_CPU
) -> Tree:
    """Returns the section of one process, from its kernels and its probes. `cluster` may be any
    with a device."""
    overhead = overhead_of(times, "alone", larger.parameters, larger)
    deep = TINY_LAYERS[-1]
    recompute = {}
    for kind in ("selective", "full"):
        _, each = _over_microbatches(times, kind, TINY, deep)
        # that a block takes more
        recompute[kind] = max(0.0, (each - overhead.microbatch) / deep - overhead.block)
    unknown = {"byte_s": 1e-18, "gradient_s": 0.0, "logit_s": 0.0}
    tree: Tree = {**kernels, **unknown, "overhead": vars(overhead), "recompute": recompute}
    # What a block takes beside its products grows with the traffic of the other operators, and
    # starts from what the weights take.
    traffic = []
    rest = []
    # A GPU hides the dispatch behind kernels that take longer, as these do.
    hidden = replace(overhead, block=0.0, microbatch=0.0)
    beside = overhead if larger.synchronous else hidden
    for size in (larger.sizes[0], larger.sizes[-1]):
        run = larger_job(cluster, size, larger)
        each_s = [
            _over_microbatches(times, "alone", larger.model, layers, size)[1]
            for layers in LARGER_LAYERS
        ]
        ends_s, block_s = _line(LARGER_LAYERS, each_s)
        block_s -= beside.block
        products_s = _block_s(run, tree)
        traffic.append(sum(elementwise_bytes(run)))
        rest.append(max(_LEAST_REST * block_s, block_s - products_s))
    byte_s = max(_LEAST_REST * rest[1] / traffic[1], _line(traffic, rest)[1])
    weights = _block_s(run, {**tree, "gradient_s": 1.0}) - products_s
    tree |= {"byte_s": byte_s, "gradient_s": max(0.0, rest[0] - traffic[0] * byte_s) / weights}
    head_s = sum(head_times(run, _kernels(run, tree)))
    tree["logit_s"] = max(
        0.0, (ends_s - beside.microbatch - head_s) / (run.tokens * run.loss_vocab)
    )
    return tree


def together_tree(
    found: Mapping[str, Any], ranks: int, cores: int, alone: Overhead, larger: LargerRuns = ON_CPU
) -> Tree:
    """Returns the section of `ranks` processes that run at once. `alone` is what a process adds by
    itself."""
    by_one, by_all = found["contention"]
    shared = max(1.0, ranks / cores) if cores else 1.0
    contention = max(1.0, by_all / by_one / shared)
    (times,) = found["probes"].values()
    axes = dict.fromkeys(name.partition(" ")[0] for name in times if not name.startswith("pp "))
    return {
        "contention": contention,
        "action_s": _action_s(times, ranks, cores, contention, alone),
        "transfer": [[size, seconds / shared / contention] for size, seconds in found["transfers"]],
        "axes": {
            axis: _added_tree(times, axis, ranks, alone, shared * contention, larger)
            for axis in axes
        },
        "collectives": {
            kind: [[size, seconds / shared / contention] for size, seconds in rows]
            for kind, rows in found["collectives"].items()
        },
    }


def _added_tree(
    times: Times, axis: str, ranks: int, alone: Overhead, slowdown: float, larger: LargerRuns
) -> Tree:
    """Returns what an axis adds to a process alone, each rank as if it had a core to itself."""
    found = overhead_of(
        times, axis, larger.parameters / (ranks if axis.startswith("tp") else 1), larger
    )
    # Where the optimizer's states are split a rank steps only its own.
    steps = ranks if axis in ("SHARD_OPTIMIZER", "FULL_SHARD") else 1
    base = {**vars(alone), "parameter": alone.parameter / steps}
    return {name: max(0.0, value / slowdown - base[name]) for name, value in vars(found).items()}


def _action_s(times: Times, ranks: int, cores: int, contention: float, alone: Overhead) -> float:
    """Returns what an action of a pipeline adds. The pipeline has one tiny block a rank, and what
    its microbatch takes beyond blocks, embedding and head is divided by the actions: all of it with
    fewer cores than ranks, else that of the first or the last rank."""
    microbatches = [m * ranks for m in TINY_MICROBATCHES]
    seconds = [times[probe_name("pp", TINY, ranks, m, TINY_SEQ, 1)] for m in microbatches]
    each = _line(microbatches, seconds)[1] / contention
    if cores and ranks > cores:
        return max(0.0, (each * cores - ranks * alone.block - alone.microbatch) / (2 * ranks))
    return max(0.0, (each - alone.block - alone.microbatch / 2) / 2)


def overhead_of(
    times: Times, axis: str, parameters: float, larger: LargerRuns = ON_CPU
) -> Overhead:
    """Returns the program's own times. A step takes step + layers * layer + microbatches *
    (microbatch + layers * block): four runs of tiny models give these four, and two of a larger one
    what each parameter takes once a step."""
    once, each = zip(
        *(_over_microbatches(times, axis, TINY, layers) for layers in TINY_LAYERS), strict=True
    )
    step, layer = _line(TINY_LAYERS, once, least=0.0)
    microbatch, block = _line(TINY_LAYERS, each, least=0.0)
    larger_once, _ = _over_microbatches(
        times, axis, larger.model, LARGER_LAYERS[-1], larger.sizes[1]
    )
    parameter = max(0.0, larger_once - step - LARGER_LAYERS[-1] * layer) / parameters
    return Overhead(block=block, microbatch=microbatch, layer=layer, step=step, parameter=parameter)


def _over_microbatches(
    times: Times, axis: str, model: ModelConfig, layers: int, size: tuple[int, int] = (TINY_SEQ, 1)
) -> tuple[float, float]:
    """Returns the seconds that a probe's step takes once, and those that each microbatch takes."""
    microbatches = TINY_MICROBATCHES if model is TINY else LARGER_MICROBATCHES
    return _line(
        microbatches, [times[probe_name(axis, model, layers, m, *size)] for m in microbatches]
    )


def _line(
    at: Sequence[float], seconds: Sequence[float], *, least: float = -math.inf
) -> tuple[float, float]:
    """Returns the value at 0 and the slope of the line through two points, each at least
    `least`."""
    (few, many), (first, second) = at, seconds
    each = max(least, (second - first) / (many - few))
    return max(least, first - few * each), each


def larger_job(cluster: Cluster, size: tuple[int, int], larger: LargerRuns = ON_CPU) -> PlannedRun:
    seq, microbatch_size = size
    return PlannedRun(
        shape=from_config(larger.model),
        cluster=cluster,
        layout=RunLayout(microbatches=2, microbatch_size=microbatch_size),
        program=MEASURED_PARALLEL3D,
        seq_len=seq,
        precision=larger.precision,
    )


def _kernels(run: PlannedRun, process: Tree) -> Kernels:
    return Kernels(
        device=run.cluster.device, precision=run.precision, process=one_process_from_tree(process)
    )


def _block_s(run: PlannedRun, process: Tree) -> float:
    """Returns the seconds of a block of the larger model by the curves alone."""
    block = block_times(run, _kernels(run, process))
    return block.forward_s + block.backward_s
