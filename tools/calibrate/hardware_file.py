"""The hardware file that `parallel3d-plan calibrate` writes: the general values of a device,
followed by the measurements."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import yaml

from parallel3d.planner.hardware.calibration import Overhead
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.tools.calibrate.fit import Tree, together_tree

Rows = list[list[float]]
_MOST_CPU_RANKS = 8
_SHARE = 0.98  # Fraction of GPU memory that a process can use.
# A guess, because one host has no network to measure.
_NETWORK = {"gb_per_s": 1.0, "latency_us": 500.0, "efficiency": 0.8}


def hardware_text(worlds: Mapping[int, Any], *, date: str) -> str:
    """Returns the text of the file. `worlds` has the measurements, keyed by world size."""
    alone = worlds[1]
    on_cpu = alone["device"] == "CPU"
    cores = alone["cores"]
    processes = alone["processes"]
    ranks: dict[int, Tree] = {}
    for size, found in worlds.items():
        if size > 1:
            share = max(1, cores // size)
            threads = max(count for count in processes if count <= share)
            overhead = Overhead(**processes[threads]["overhead"])
            ranks[size] = together_tree(found, size, cores, overhead)
    # A host without GPUs can run any number of ranks. `measured` already accounts for ranks that
    # share its cores.
    most = max(_MOST_CPU_RANKS, *worlds) if on_cpu else max(worlds)
    tree = {
        "device": _device_tree(alone, processes[1], sharing=most if on_cpu else 1),
        "node": _node_tree(ranks, most),
        "network": _NETWORK,
        "measured": {"cores": cores, "synchronous": on_cpu, "processes": processes, "ranks": ranks},
    }
    host = platform.node() or "this host"
    head = (
        f"# {alone['device']} of {host}, measured by parallel3d-plan calibrate on {date}\n# "
        f"{cores} shared cores, worlds of {', '.join(map(str, worlds))} ranks; torch "
        f"{alone['torch']}\n# Keys: docs/reference/hardware-files.md. `network` is a guess, "
        "because only one host was measured.\n"
    )
    return head + yaml.safe_dump(
        rounded(tree, digits=4), sort_keys=False, default_flow_style=None, width=120
    )


def _device_tree(alone: Mapping[str, Any], process: Tree, *, sharing: int) -> Tree:
    """Returns the `device` section. Peaks are the best measured values, so efficiencies are 1.
    `sharing` ranks share the memory.
    """
    peaks = {precision: _best(rows) for precision, rows in process["matmul"].items()}
    bytes_, seconds = process["memory"][-1]
    attention = process["attention"]["bf16"]
    return {
        "name": alone["device"],
        "peak_tflops": {**peaks, "fp16": peaks["bf16"]},
        "memory_gib": alone["memory_bytes"] * _SHARE / GIB / sharing,
        "memory_gb_per_s": bytes_ / seconds / 1e9,
        "processors": alone["processors"],
        "matmul_efficiency": 1.0,
        "memory_efficiency": 1.0,
        "attention_tflops": {way: _best(rows) for way, rows in attention.items()},
    }


def _best(rows: Rows) -> float:
    return max(rate for _, _, rate in rows) / 1e12


def _node_tree(ranks: Mapping[int, Tree], most: int) -> Tree:
    """Returns the `node` section, for world sizes that were not measured: a fit to the all-gather
    of the largest world, or a guess if only one process was measured.
    """
    if not ranks:
        return {"gpus": most, "gb_per_s": 1.0, "latency_us": 300.0, "efficiency": 1.0}
    size = max(ranks)
    rows = ranks[size]["collectives"]["all_gather"]
    least, latency = rows[0]
    bytes_, seconds = rows[-1]
    moved = (bytes_ - least) * (size - 1) / size
    moving_s = max(1e-9, seconds - latency)
    return {
        "gpus": most,
        "gb_per_s": moved / moving_s / 1e9,
        "latency_us": latency / (size - 1) * 1e6,
        "efficiency": 1.0,
    }
