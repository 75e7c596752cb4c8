"""Metrics that a report takes from every rank: peak memory, memory by kind, and time by cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.layers.collectives import all_gather_single
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.reporting.metrics import peak_memory_bytes
from parallel3d.timeline.recorder import CudaEvents
from parallel3d.training.trainer import Trainer
from parallel3d.watch.step_clock import CAUSES, CLOCK, WAITS


class RankMetrics:
    """Collects the metrics of all ranks. Every rank creates one."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._state_bytes: dict[str, int] = {}
        if trainer.device.type == "cuda":
            CLOCK.use(CudaEvents())

    def collect(self, steps: int, steps_s: float) -> dict[str, Any]:
        """Returns fields of `StepMetrics` for the last steps. Collective.

        Args:
            steps: Number of steps.
            steps_s: Seconds that they took on this rank.
        """
        if not self._state_bytes:  # The first step has created the optimizer states.
            self._state_bytes = state_bytes(self._trainer)
        kinds = [*self._state_bytes]
        peaks = peak_memory_bytes(self._trainer.device)
        times = [seconds / steps for seconds in (steps_s, *CLOCK.take().values())]
        rows = self._gather([*peaks, *self._state_bytes.values(), *times])
        peak, reserved, *states = max(rows)[: 2 + len(kinds)]
        memory: dict[str, int | None] = dict(zip(kinds, map(round, states), strict=True))
        is_cuda = self._trainer.device.type == "cuda"
        # On a CPU, the peak includes Python and torch.
        memory["activations"] = round(peak - sum(states)) if is_cuda else None
        names = ("step", *CAUSES)
        by_rank = [dict(zip(names, row[-len(names) :], strict=True)) for row in rows]
        slowest = min(by_rank, key=lambda own: sum(own[cause] for cause in WAITS))
        spread = {}
        for cause in CAUSES:
            each = [own[cause] for own in by_rank]
            spread[cause] = (min(each), max(each))
        return {
            "step_time_s": slowest.pop("step"),
            "peak_memory_bytes": round(peak),
            "peak_reserved_bytes": round(reserved) or None,
            "memory_bytes": memory,
            "data_wait_s": spread["data"][1],
            "time_s": slowest,
            "time_spread_s": spread,
        }

    def _gather(self, own: list[float]) -> list[list[float]]:
        """Returns the numbers of each rank. Collective."""
        numbers = torch.tensor([own], dtype=torch.float64, device=self._trainer.device)
        rows = numbers.new_empty(dist.get_world_size(), len(own))
        all_gather_single(rows, numbers)
        return rows.tolist()


def state_bytes(trainer: Trainer) -> dict[str, int]:
    """Returns the bytes of this rank's states on its device, by kind.

    `gradients` are those that the optimizer reads, without those of single microbatches.
    """
    modules = [stage.module for stage in trainer.stages]
    parameters = [*chain.from_iterable(module.parameters() for module in modules)]
    local = [part.local for part in trainer.parameters]
    gradients = [each for each in parameters if each.requires_grad]
    held = {
        "parameters": chain(parameters, local),
        # Sharded gradients exist only within a step, in the form of the parameters.
        "gradients": (each if each.grad is None else each.grad for each in gradients),
        "optimizer": _tensors_in(trainer.optimizer.state.values()),
        "buffers": chain.from_iterable(module.buffers() for module in modules),
    }
    return {kind: _bytes_on(trainer.device, tensors) for kind, tensors in held.items()}


def _tensors_in(states: Iterable[dict[str, Any]]) -> Iterator[Tensor]:
    for state in states:
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes_on(device: torch.device, tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' storages on a device, each counted once."""
    storages = {}
    for tensor in tensors:
        own = local_tensor(tensor.detach())
        if own.device == device:
            storage = own.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
