"""One rank of `parallel3d-plan calibrate`: measures what its world has to measure; rank 0 writes it
as JSON. And how worlds of local ranks are started."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from parallel3d.config.recipe import Recipe
from parallel3d.errors import RankError
from parallel3d.launch.local import cores, launch_local
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.tools.calibrate.fit import overheads, process_tree
from parallel3d.tools.calibrate.kernels import measure_kernels
from parallel3d.tools.calibrate.links import (
    measure_collectives,
    measure_contention,
    measure_transfers,
)
from parallel3d.tools.calibrate.probes import LargerRuns, Probe, probes, time_probes

RESULTS = "measured.json"  # what rank 0 of a world writes into its run_dir
_PRELOAD = ("torch", __name__, "parallel3d.training.trainer", "parallel3d.models.llama")
# from four rows of features on, so that few ranks divide them
_COLLECTIVES = [2**n for n in range(12, 25, 2)]
_TRANSFERS = [2**n for n in range(10, 23, 3)]


def run_workers(work: Callable[[Recipe, Rendezvous], None], recipe: Recipe) -> Any:
    """Runs `measure` or `train` in as many local processes as the recipe's layout has ranks, and
    returns what rank 0 writes. Raises RankError where a worker failed."""
    ranks = recipe.parallel.world_size
    with tempfile.TemporaryDirectory(prefix="parallel3d-calibrate-") as folder:
        target = f"{__name__}:{work.__name__}"
        status = launch_local(target, replace(recipe, run_dir=folder), ranks, preload=_PRELOAD)
        if status != 0:
            raise RankError(f"calibrate: {ranks} workers did not finish (exit status {status})")
        return json.loads((Path(folder) / RESULTS).read_text())


def measure(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """Measures on every rank, in seconds; `recipe.train.steps` of 1 asks for quick measurements.
    One process is measured with one thread, and with as many threads as there are cores."""
    quick = recipe.train.steps == 1
    size = rendezvous.world_size
    with process_group(recipe, rendezvous) as device:
        found = _host(device)
        larger = LargerRuns.on(device.type)

        def times() -> dict[Probe, float]:
            runs = probes(size, larger)
            seconds = time_probes([*runs.values()], device, rounds=6 if quick else 16)
            return dict(zip(runs, seconds, strict=True))

        if size > 1:
            found["contention"] = measure_contention(device)
            found["collectives"] = measure_collectives(size, device, _COLLECTIVES)
            found["transfers"] = measure_transfers(size, device, _TRANSFERS)
            found |= overheads(times(), size, larger)
        else:
            found["processes"] = {}  # by threads
            for threads in sorted({1, cores()} if device.type == "cpu" else {1}):
                torch.set_num_threads(threads)
                kernels = measure_kernels(device, quick=quick)
                found["processes"][threads] = process_tree(kernels, times(), larger)
    _write(found, recipe, rendezvous)


def train(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """Times the recipe's own steps on every rank."""
    with process_group(recipe, rendezvous) as device:
        (seconds,) = time_probes([recipe], device, rounds=5)
    _write(seconds, recipe, rendezvous)


def _write(found: object, recipe: Recipe, rendezvous: Rendezvous) -> None:
    assert recipe.run_dir is not None
    if rendezvous.rank == 0:
        (Path(recipe.run_dir) / RESULTS).write_text(json.dumps(found))


def _host(device: torch.device) -> dict[str, Any]:
    """Returns what a device is called and has: its memory, and a GPU's multiprocessors."""
    found = {"device": "CPU", "torch": str(torch.__version__), "cores": cores(), "processors": 1}
    if device.type == "cpu":
        found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        gpu = torch.cuda.get_device_properties(device)
        found |= {"device": gpu.name, "cores": 0, "processors": gpu.multi_processor_count}
        found["memory_bytes"] = gpu.total_memory
    return found
