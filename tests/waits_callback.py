"""What test_waits_of_a_run.py has a run do: rank 0 writes down how long each of its process groups
waits, by what the group is for, in the first forward and after each step. The file `waits` is in
the run's working directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.layers.positions import PackedDocuments
from parallel3d.models.llama import Llama
from parallel3d.torch_private import timeout_of
from parallel3d.training.callbacks import Callback, RunView
from parallel3d.training.step_result import StepResult

FILE = Path("waits")


def write_waits() -> None:
    groups = list(dist.distributed_c10d._world.pg_map)
    limits = {group.group_desc: timeout_of(group, torch.device("cpu")) for group in groups}
    waits = {name: limit.total_seconds() * 1000 for name, limit in limits.items()}
    assert len(waits) == len(groups)
    with FILE.open("a") as file:
        file.write(json.dumps(waits) + "\n")


class WritesInTheFirstForward(Llama):
    """A model that is asked while the first step is not done."""

    def forward(
        self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None
    ) -> Tensor:
        if dist.get_rank() == 0 and not FILE.exists():
            write_waits()
        return super().forward(x, key, documents)


class WritesAfterEachStep(Callback):
    """Is asked on rank 0, after the hooks of the step."""

    def step_done(self, run: RunView, result: StepResult) -> None:
        write_waits()
