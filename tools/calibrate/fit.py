"""From what `parallel3d-plan calibrate` has timed to the figures of a hardware file (`planner.measured`): differences
and slopes, nothing fitted by eye. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from parallel3d.planner.hardware.calibration import OneProcess, Overhead, one_process_from_tree
from parallel3d.planner.hardware.cluster import Cluster
from parallel3d.planner.hardware.program import MEASURED_PARALLEL3D
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.time.block import block_times, elementwise_bytes, head_times
from parallel3d.planner.time.roofline import Kernels
from parallel3d.tools.calibrate.probes import (
    LARGER,
    LARGER_LAYERS,
    LARGER_MICROBATCHES,
    LARGER_SEQ,
    LARGER_SIZES,
    TINY,
    TINY_LAYERS,
    TINY_MICROBATCHES,
    TINY_SEQ,
    probe_name,
)

Times = Mapping[str, float]
Tree = dict[str, Any]
_LEAST_REST = 0.02  # least share of a block that is neither products nor attention
_NOTHING_ELSE = {"byte_s": 1e-18, "gradient_s": 0.0, "logit_s": 0.0}  # until it is known


def process_tree(kernels: Tree, times: Times, cluster: Cluster) -> Tree:
    """Returns the section of one process, from its kernels and its probes. `cluster` may be any with a device."""
    overhead = overhead_of(times, "alone", _larger_parameters())
    recompute = {kind: _recompute_s(times, kind, overhead) for kind in ("selective", "full")}
    tree: Tree = {**kernels, **_NOTHING_ELSE, "overhead": vars(overhead), "recompute": recompute}
    blocks = {size: _block_s(times, size) for size in LARGER_SIZES}
    tree |= _beside_products(tree, cluster, {size: block_s - overhead.block for size, block_s in blocks.items()})
    largest = LARGER_SIZES[-1]
    shallow = LARGER_LAYERS[0]
    ends = _per_microbatch_s(times, largest, shallow) - shallow * blocks[largest] - overhead.microbatch
    run = larger_job(cluster, largest)
    head = sum(head_times(run, _kernels(one_process_from_tree(tree), cluster)))
    tree["logit_s"] = max(0.0, (ends - head) / (run.tokens * run.loss_vocab))
    return tree


def _beside_products(tree: Tree, cluster: Cluster, blocks: Mapping[tuple[int, int], float]) -> Tree:
    """Returns `byte_s` and `gradient_s`. `blocks` are the seconds of whole blocks by sequence and microbatch: what a
    block takes beside its products grows with the traffic of the other operators, and starts from what the weights
    take."""
    bare = _kernels(one_process_from_tree(tree), cluster)
    found = []
    for size in (LARGER_SIZES[0], LARGER_SIZES[-1]):
        run = larger_job(cluster, size)
        rest = max(_LEAST_REST * blocks[size], blocks[size] - _block_model_s(run, bare))
        found.append((sum(elementwise_bytes(run)), rest))
    (few, short_s), (many, long_s) = found
    byte_s = max(_LEAST_REST * long_s / many, (long_s - short_s) / (many - few))
    weights = _block_model_s(run, replace(bare, process=one_process_from_tree({**tree, "gradient_s": 1.0})))
    return {"byte_s": byte_s, "gradient_s": max(0.0, short_s - few * byte_s) / (weights - _block_model_s(run, bare))}


def _per_microbatch_s(times: Times, size: tuple[int, int], layers: int) -> float:
    few, many = LARGER_MICROBATCHES
    return (_larger(times, "alone", layers, many, size) - _larger(times, "alone", layers, few, size)) / (many - few)


def _block_s(times: Times, size: tuple[int, int]) -> float:
    shallow, deep = LARGER_LAYERS
    return (_per_microbatch_s(times, size, deep) - _per_microbatch_s(times, size, shallow)) / (deep - shallow)


def together_tree(found: Mapping[str, Any], ranks: int, cores: int, alone: Overhead) -> Tree:
    """Returns the section of `ranks` processes that run at once. `alone` is what a process adds by itself."""
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
    """Returns what an axis adds to a process alone, each rank as if it had a core to itself."""
    parameters = _larger_parameters() / (ranks if axis.startswith("tp") else 1)
    found = overhead_of(times, axis, parameters)
    # Where the optimizer's states are split a rank steps only its own.
    steps = ranks if axis in ("SHARD_OPTIMIZER", "FULL_SHARD") else 1
    base = {**vars(alone), "parameter": alone.parameter / steps}
    return {name: max(0.0, value / slowdown - base[name]) for name, value in vars(found).items()}


def _action_s(times: Times, ranks: int, cores: int, contention: float, alone: Overhead) -> float:
    """Returns what an action of a pipeline adds. The pipeline has one tiny block a rank, and what its microbatch takes
    beyond blocks, embedding and head is divided by the actions: all of it with fewer cores than ranks, else that of the
    first or the last rank."""
    few, many = (m * ranks for m in TINY_MICROBATCHES)
    first, second = (times[probe_name("pp", TINY, ranks, m, TINY_SEQ, 1)] for m in (few, many))
    each = (second - first) / (many - few) / contention
    if cores and ranks > cores:
        return max(0.0, (each * cores - ranks * alone.block - alone.microbatch) / (2 * ranks))
    return max(0.0, (each - alone.block - alone.microbatch / 2) / 2)


def overhead_of(times: Times, axis: str, parameters: float) -> Overhead:
    """Returns the program's own times. A step takes step + layers * layer + microbatches * (microbatch + layers *
    block): four runs of tiny models give these four, and two of a larger one what each parameter takes once a step."""
    (few_layers, many_layers), (few, many) = TINY_LAYERS, TINY_MICROBATCHES

    def tiny(layers: int, microbatches: int) -> float:
        return times[probe_name(axis, TINY, layers, microbatches, TINY_SEQ, 1)]

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


def _larger(times: Times, axis: str, layers: int, microbatches: int, size: tuple[int, int] = (LARGER_SEQ, 1)) -> float:
    return times[probe_name(axis, LARGER, layers, microbatches, *size)]


def _larger_parameters() -> int:
    return total_parameters(from_config(replace(LARGER, layers=LARGER_LAYERS[-1])))


def _recompute_s(times: Times, kind: str, overhead: Overhead) -> float:
    """Returns what a tiny block takes more where it is recomputed."""
    few, many = TINY_MICROBATCHES
    deep = TINY_LAYERS[-1]
    first, second = (times[probe_name(kind, TINY, deep, m, TINY_SEQ, 1)] for m in (few, many))
    each = (second - first) / (many - few)
    return max(0.0, (each - overhead.microbatch) / deep - overhead.block)


def larger_job(cluster: Cluster, size: tuple[int, int]) -> PlannedRun:
    seq, microbatch_size = size
    return PlannedRun(
        shape=from_config(LARGER),
        cluster=cluster,
        layout=RunLayout(microbatches=2, microbatch_size=microbatch_size),
        program=MEASURED_PARALLEL3D,
        seq_len=seq,
        precision="fp32",
    )


def _kernels(process: OneProcess, cluster: Cluster) -> Kernels:
    return Kernels(device=cluster.device, precision="fp32", process=process)


def _block_model_s(run: PlannedRun, kernels: Kernels) -> float:
    """Returns the seconds of a block of the larger model by the curves alone."""
    block = block_times(run, kernels)
    return block.forward_s + block.backward_s
