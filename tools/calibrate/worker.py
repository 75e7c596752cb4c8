"""Measurements that each rank of `parallel3d-plan calibrate` makes."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from parallel3d.launch.local import cores
from parallel3d.tools.calibrate.fit import overheads, process_tree
from parallel3d.tools.calibrate.kernels import measure_kernels
from parallel3d.tools.calibrate.links import (
    measure_collectives,
    measure_contention,
    measure_transfers,
)
from parallel3d.tools.calibrate.probes import LargerRuns, Probe, probes, time_probes
from parallel3d.tools.local_ranks import own_device

# Sizes of full tensors in bytes. The smallest has four rows, so that four ranks can share it.
_COLLECTIVES = [2**n for n in range(12, 25, 2)]
_TRANSFERS = [2**n for n in range(10, 23, 3)]


def measure(device_type: str, quick: bool) -> dict[str, Any]:
    """Returns the measurements of this rank. Every rank must call it. A single CPU process is
    measured with one thread and with one thread per core.
    """
    device = own_device(device_type)
    size = dist.get_world_size()
    larger = LargerRuns.on(device_type)
    found = _host(device)

    def times() -> dict[Probe, float]:
        runs = probes(size, larger)
        rounds = 6 if quick else 16
        seconds = time_probes(list(runs.values()), device, rounds=rounds)
        return dict(zip(runs, seconds, strict=True))

    if size > 1:
        torch.set_num_threads(max(1, cores() // size))
        found["contention"] = measure_contention(device)
        found["collectives"] = measure_collectives(size, device, _COLLECTIVES)
        found["transfers"] = measure_transfers(size, device, _TRANSFERS)
        return found | overheads(times(), size, larger)
    processes = {}  # Results of one process, keyed by its number of threads.
    counts = {1, cores()} if device_type == "cpu" else {1}
    for threads in sorted(counts):
        torch.set_num_threads(threads)
        kernels = measure_kernels(device, quick=quick)
        processes[threads] = process_tree(kernels, times(), larger)
    return found | {"processes": processes}


def _host(device: torch.device) -> dict[str, Any]:
    version = str(torch.__version__)
    if device.type == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES")
        return {
            "device": "CPU",
            "torch": version,
            "cores": cores(),
            "processors": 1,
            "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        }
    gpu = torch.cuda.get_device_properties(device)
    return {
        "device": gpu.name,
        "torch": version,
        "cores": 0,
        "processors": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
    }
