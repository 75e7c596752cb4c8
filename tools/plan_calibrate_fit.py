"""From what `parallel3d-plan calibrate` has timed to the figures of a hardware file (`planner.measured`): differences
and slopes, nothing fitted by eye. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parallel3d.planner.block import block_times, head_times
from parallel3d.planner.engine import PARALLEL3D
from parallel3d.planner.hardware import Cluster
from parallel3d.planner.job import Job, Layout
from parallel3d.planner.measured import Overhead, Process, process_from_tree
from parallel3d.planner.roofline import Kernels
from parallel3d.planner.shapes import from_config, total_parameters
from parallel3d.tools.plan_calibrate_probes import (
    LARGER,
    LARGER_LAYERS,
    LARGER_MICROBATCHES,
    LARGER_SEQ,
    TINY,
    TINY_LAYERS,
    TINY_MICROBATCHES,
    probe_name,
)

Times = Mapping[str, float]
Tree = dict[str, Any]
_LEAST_REST = 0.02  # of a block, that is not products and attention


def process_tree(kernels: Tree, times: Times, cluster: Cluster) -> Tree:
    """The section of one process, from its kernels and its probes; `cluster` is any with a device."""
    overhead = overhead_of(times, "alone", _larger_parameters())
    recompute = {kind: _recompute_s(times, kind, overhead) for kind in ("selective", "full")}
    # As if it were nothing, until it is known.
    tree: Tree = {**kernels, "byte_s": 1e-18, "logit_s": 0.0, "overhead": vars(overhead), "recompute": recompute}
    few, many = LARGER_MICROBATCHES
    shallow, deep = LARGER_LAYERS
    per_microbatch = {
        layers: (_larger(times, "alone", layers, many) - _larger(times, "alone", layers, few)) / (many - few)
        for layers in LARGER_LAYERS
    }
    block_s = (per_microbatch[deep] - per_microbatch[shallow]) / (deep - shallow) - overhead.block
    without = _block_model_s(process_from_tree(tree), cluster)
    one_s_a_byte = _block_model_s(process_from_tree({**tree, "byte_s": 1.0}), cluster)
    tree["byte_s"] = max(_LEAST_REST * block_s, block_s - without) / one_s_a_byte
    process = process_from_tree(tree)
    job = _larger_job(cluster)
    ends = per_microbatch[shallow] - shallow * (block_s + overhead.block) - overhead.microbatch
    head = sum(head_times(job, _kernels(process, cluster)))
    tree["logit_s"] = max(0.0, (ends - head) / (job.tokens * job.loss_vocab))
    return tree


def together_tree(found: Mapping[str, Any], ranks: int, cores: int, alone: Overhead) -> Tree:
    """The section of so many ranks at once. `alone`: what one of them adds by itself."""
    by_one, by_all = found["contention"]
    shared = max(1.0, ranks / cores) if cores else 1.0
    contention = max(1.0, by_all / by_one / shared)
    (times,) = found["probes"].values()
    axes = {axis: _added_tree(times, axis, ranks, alone, shared * contention) for axis in _AXES if _has(times, axis)}
    collectives = {
        kind: [[size, seconds / shared / contention] for size, seconds in rows]
        for kind, rows in found["collectives"].items()
    }
    transfer = [[size, seconds / shared / contention] for size, seconds in found["transfers"]]
    action = _action_s(times, ranks, cores, contention, alone)
    return {
        "contention": contention,
        "action_s": action,
        "transfer": transfer,
        "axes": axes,
        "collectives": collectives,
    }


_AXES = ("tp", "tp_sequence", "NO_SHARD", "SHARD_OPTIMIZER", "FULL_SHARD", "HYBRID_SHARD")


def _has(times: Times, axis: str) -> bool:
    return any(name.startswith(f"{axis} ") for name in times)


def _added_tree(times: Times, axis: str, ranks: int, alone: Overhead, slowdown: float) -> Tree:
    """What an axis adds to a process alone, each rank as if it had a core to itself."""
    parameters = _larger_parameters() / (ranks if axis.startswith("tp") else 1)
    found = overhead_of(times, axis, parameters)
    # Where the optimizer's states are split a rank steps only its own.
    steps = ranks if axis in ("SHARD_OPTIMIZER", "FULL_SHARD") else 1
    base = {**vars(alone), "parameter": alone.parameter / steps}
    return {name: max(0.0, value / slowdown - base[name]) for name, value in vars(found).items()}


def _action_s(times: Times, ranks: int, cores: int, contention: float, alone: Overhead) -> float:
    """A pipeline of one tiny block a rank: what a microbatch takes beyond its blocks, embedding and head, over its
    actions. With fewer cores than ranks all of it counts, else the first or the last rank's."""
    few, many = (m * ranks for m in TINY_MICROBATCHES)
    first, second = (times[probe_name("pp", TINY, ranks, m)] for m in (few, many))
    each = (second - first) / (many - few) / contention
    if cores and ranks > cores:
        return max(0.0, (each * cores - ranks * alone.block - alone.microbatch) / (2 * ranks))
    return max(0.0, (each - alone.block - alone.microbatch / 2) / 2)


def overhead_of(times: Times, axis: str, parameters: float) -> Overhead:
    """A step's time is step + layers * layer + microbatches * (microbatch + layers * block): the four from four runs of
    tiny models, and from two of a larger one what each parameter takes once a step."""
    (few_layers, many_layers), (few, many) = TINY_LAYERS, TINY_MICROBATCHES

    def tiny(layers: int, microbatches: int) -> float:
        return times[probe_name(axis, TINY, layers, microbatches)]

    slope = {layers: (tiny(layers, many) - tiny(layers, few)) / (many - few) for layers in TINY_LAYERS}
    block = max(0.0, (slope[many_layers] - slope[few_layers]) / (many_layers - few_layers))
    microbatch = max(0.0, slope[few_layers] - few_layers * block)
    once = {layers: tiny(layers, few) - few * slope[layers] for layers in TINY_LAYERS}
    layer = max(0.0, (once[many_layers] - once[few_layers]) / (many_layers - few_layers))
    step = max(0.0, once[few_layers] - few_layers * layer)
    deep, (few, many) = LARGER_LAYERS[-1], LARGER_MICROBATCHES
    first, second = _larger(times, axis, deep, few), _larger(times, axis, deep, many)
    larger_once = first - few * (second - first) / (many - few)
    parameter = max(0.0, larger_once - step - deep * layer) / parameters
    return Overhead(block=block, microbatch=microbatch, layer=layer, step=step, parameter=parameter)


def _larger(times: Times, axis: str, layers: int, microbatches: int) -> float:
    return times[probe_name(axis, LARGER, layers, microbatches)]


def _larger_parameters() -> int:
    return total_parameters(from_config(replace(LARGER, layers=LARGER_LAYERS[-1])))


def _recompute_s(times: Times, kind: str, overhead: Overhead) -> float:
    """What a tiny block takes more where it is recomputed."""
    few, many = TINY_MICROBATCHES
    deep = TINY_LAYERS[-1]
    first, second = (times[probe_name(kind, TINY, deep, m)] for m in (few, many))
    each = (second - first) / (many - few)
    return max(0.0, (each - overhead.microbatch) / deep - overhead.block)


def _larger_job(cluster: Cluster) -> Job:
    return Job(
        shape=from_config(LARGER),
        cluster=cluster,
        layout=Layout(microbatches=2),
        engine=replace(PARALLEL3D, elementwise=1.0, launches=0, loss_passes=0.0),
        seq_len=LARGER_SEQ,
        precision="fp32",
    )


def _kernels(process: Process, cluster: Cluster) -> Kernels:
    return Kernels(device=cluster.device, precision="fp32", process=process)


def _block_model_s(process: Process, cluster: Cluster) -> float:
    """A block of the larger model by the curves alone."""
    block = block_times(_larger_job(cluster), _kernels(process, cluster))
    return block.forward_s + block.backward_s
