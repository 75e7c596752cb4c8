"""One rank of `parallel3d-plan calibrate`: measures what its world has to measure; rank 0 writes it as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallel3d.config.recipe import Recipe
from parallel3d.launch.rendezvous import Rendezvous, choose_device, process_group
from parallel3d.launch.worker_process import cores
from parallel3d.tools.calibrate.hardware_file import host_memory_bytes
from parallel3d.tools.calibrate.kernels import measure_kernels
from parallel3d.tools.calibrate.links import measure_collectives, measure_contention, measure_transfers
from parallel3d.tools.calibrate.probes import probes, time_probes

RESULTS = "measured.json"
_COLLECTIVES = [2**n for n in range(12, 25, 2)]  # from four rows of features on, so that few ranks divide them
_TRANSFERS = [2**n for n in range(10, 23, 3)]


@dataclass
class Measurements:
    """What the ranks of one world have measured, in seconds."""

    device: str
    torch: str
    cores: int
    memory_bytes: int
    processors: int  # multiprocessors of a GPU
    kernels: dict[int, dict[str, Any]] = field(default_factory=dict)  # by threads
    probes: dict[int, dict[str, float]] = field(default_factory=dict)  # by threads, by name
    contention: tuple[float, float] = (1.0, 1.0)
    collectives: dict[str, Any] = field(default_factory=dict)
    transfers: list[list[float]] = field(default_factory=list)


def worker(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """Measures on every rank. Rank 0 writes the results into `recipe.run_dir`; `recipe.train.steps` of 1 asks for quick
    ones."""
    assert recipe.run_dir is not None
    quick = recipe.train.steps == 1
    device = choose_device(recipe.train.device, rendezvous)
    with process_group(rendezvous, device, recipe.train.timeout_s):
        found = _alone(device, quick=quick) if rendezvous.world_size == 1 else _together(rendezvous, device, quick)
    if rendezvous.rank == 0:
        Path(recipe.run_dir).mkdir(parents=True, exist_ok=True)
        (Path(recipe.run_dir) / RESULTS).write_text(json.dumps(vars(found)))


def _alone(device: torch.device, *, quick: bool) -> Measurements:
    """Measures one process with one thread, and with as many threads as there are cores."""
    found = _nothing_yet(device)
    for threads in sorted({1, cores()}) if device.type == "cpu" else [1]:
        if device.type == "cpu":
            torch.set_num_threads(threads)
        found.kernels[threads] = measure_kernels(device, quick=quick)
        found.probes[threads] = _time_probes(1, device, quick=quick)
    return found


def _together(rendezvous: Rendezvous, device: torch.device, quick: bool) -> Measurements:
    size = rendezvous.world_size
    found = _nothing_yet(device)
    found.contention = measure_contention(device)
    found.collectives = measure_collectives(size, device, _COLLECTIVES)
    found.transfers = measure_transfers(size, device, _TRANSFERS)
    found.probes[torch.get_num_threads()] = _time_probes(size, device, quick=quick)
    return found


def _time_probes(world_size: int, device: torch.device, *, quick: bool) -> dict[str, float]:
    found = probes(world_size)
    seconds = time_probes([each.recipe for each in found], device, rounds=6 if quick else 16)
    return {each.name: taken for each, taken in zip(found, seconds, strict=True)}


def _nothing_yet(device: torch.device) -> Measurements:
    version = str(torch.__version__)
    if device.type == "cpu":
        return Measurements("CPU", version, cores(), host_memory_bytes(), 1)
    properties = torch.cuda.get_device_properties(device)
    memory, processors = properties.total_memory, properties.multi_processor_count
    return Measurements(properties.name, version, cores(), memory, processors)
