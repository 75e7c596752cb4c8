"""What goes wrong inside a rank, where no signal from outside can do it: a Llama that looks for a file before each
forward, which says on which rank to call which function of this module. `fault.plant` writes it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.checkpoint import saver
from parallel3d.checkpoint.files import PlannedSave
from parallel3d.layers.gradients import local_tensor
from parallel3d.layers.positions import PackedDocuments
from parallel3d.mesh import Axis
from parallel3d.models.llama import Llama
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.training import update

PLANT = "PARALLEL3D_FAULT_PLANT"  # the environment variable with the file's path


class Planted(Llama):
    """A Llama with a fault planted in it. `model.architecture` names it."""

    def forward(self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None) -> Tensor:
        plant = Path(os.environ.get(PLANT, "/nonexistent"))
        if self.training and plant.exists():
            with suppress(FileNotFoundError):  # the rank that is meant may just have taken it
                rank, function = plant.read_text().split()
                if dist.get_rank() == int(rank):
                    plant.unlink()
                    globals()[function](self)
        return super().forward(x, key, documents)


def loop_for_ever(model: nn.Module) -> None:
    """Never returns, and keeps its core busy."""
    while True:
        pass


def sleep_for_ever(model: nn.Module) -> None:
    """Never returns, and does nothing."""
    while True:
        time.sleep(60)


def read_for_ever(model: nn.Module) -> None:
    """Waits for what nobody writes, as a reader of a file system does whose server has gone."""
    os.read(os.pipe()[0], 1)


def raise_error(model: nn.Module) -> None:
    """Fails as a bug does."""
    raise ValueError("a planted fault")


def save_slowly(model: nn.Module) -> None:
    """Makes each save of this rank take a minute longer, as a disk does that hardly answers."""
    write = saver.write_and_commit

    def slow(save: PlannedSave, group: dist.ProcessGroup | None) -> None:
        time.sleep(60)
        write(save, group)

    vars(saver)["write_and_commit"] = slow


def abort(model: nn.Module) -> None:
    """Ends the process as a failed assertion of a C++ library does."""
    os.abort()


def spoil_a_gradient(model: nn.Module) -> None:
    """Makes one element of the step's gradient NaN on this rank, in its last block where it has one. The gradient is
    summed and not yet looked at."""
    measure = update.squared_norm

    def spoiled(parameters: Sequence[LocalParameter], axes: Mapping[str, Axis]) -> Tensor:
        update.squared_norm = measure
        own = [p for p in parameters if not p.is_copy]
        gradient = max(own, key=lambda p: (p.name.endswith("mlp.up.weight"), p.name)).local.grad
        assert gradient is not None
        gradient.view(-1)[0] = float("nan")
        return measure(parameters, axes)

    update.squared_norm = spoiled


def flip_a_bit(model: nn.Module) -> None:
    """Flips one bit of a weight in this rank's memory."""
    weight = local_tensor(model.get_parameter("layers.1.mlp.up.weight").detach())
    weight.view(torch.int32).view(-1)[0] ^= 1 << 12
