"""Faults inside a rank, which no signal from outside can cause.

`Planted` is a Llama that looks for the file `plant` before each forward pass. The file names a rank
and a function of this module, which that rank then calls. Each rank writes its process id into the
file `rank<N>`, so that a test can signal it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.checkpoint import saver
from parallel3d.checkpoint.files import PlannedSave
from parallel3d.engine import Engine
from parallel3d.layers.positions import PackedDocuments
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.models.llama import Llama
from parallel3d.training.callbacks import Callback

FOLDER = "PARALLEL3D_TEST_FOLDER"  # the environment variable that names the folder of these files


class Pace(Callback):
    """Makes each step last a moment, so that a run does not end before its fault."""

    def step_done(self, run: object, result: object) -> None:
        time.sleep(0.05)


class Planted(Llama):
    """A Llama with a planted fault. `model.architecture` names it."""

    is_known = False  # the file with this process id is there

    def forward(
        self, x: Tensor, key: Tensor | None = None, documents: PackedDocuments | None = None
    ) -> Tensor:
        folder = Path(os.environ[FOLDER])
        if self.training:
            if not self.is_known:
                own = folder / f"rank{dist.get_rank()}"
                own.with_suffix(".partial").write_text(str(os.getpid()))
                own.with_suffix(".partial").rename(own)
                self.is_known = True
            with suppress(FileNotFoundError):
                rank, function = (folder / "plant").read_text().split()
                if rank == "all":
                    globals()[function](self)
                elif dist.get_rank() == int(rank):
                    (folder / "plant").unlink()
                    globals()[function](self)
        return super().forward(x, key, documents)


def loop_forever(model: nn.Module) -> None:
    while True:
        pass


def read_forever(model: nn.Module) -> None:
    """Waits for data that nobody writes, as a reader does when its file server is gone."""
    os.read(os.pipe()[0], 1)


def raise_error(model: nn.Module) -> None:
    raise ValueError("a planted fault")


def raise_in_backward(model: nn.Module) -> None:
    def fail(grad: Tensor) -> None:
        raise_error(model)

    def watch(block: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(fail)

    next(model.get_submodule("layers").children()).register_forward_hook(watch)


def exit_with_3(model: nn.Module) -> None:
    os._exit(3)


def raise_in_rank_1_while_others_loop(model: nn.Module) -> None:
    """Is planted in all ranks: the others are not in a collective, which would notice.

    If rank 1 began this forward before the plant was there, it waits for the others in a
    collective. They go on then, and all see the plant at the next forward.
    """
    raised = Path(os.environ[FOLDER]) / "raised"
    if dist.get_rank() == 1:
        raised.touch()
        raise_error(model)
    for _ in range(200):
        if raised.exists():
            loop_forever(model)
        time.sleep(0.01)


def save_slowly(model: nn.Module) -> None:
    """Makes each save of this rank take a minute longer."""
    write = saver.write_and_commit

    def slow(save: PlannedSave, group: dist.ProcessGroup | None) -> None:
        time.sleep(60)
        write(save, group)

    vars(saver)["write_and_commit"] = slow


def abort(model: nn.Module) -> None:
    """Ends the process as a failed assertion in C++ does."""
    os.abort()


def speak_and_abort(model: nn.Module) -> None:
    """Ends the process as a failed assertion in C does, with a message that Python does not see."""
    os.write(2, b"library.c:7: assertion failed\n")
    os.abort()


def spoil_a_gradient(model: nn.Module) -> None:
    """Makes one element of the summed gradient of this step NaN on this rank."""
    measure = Engine.squared_norm_share

    def spoiled(self: Engine) -> Tensor:
        Engine.squared_norm_share = measure  # type: ignore[method-assign]
        own = [p for p in self.trained if not p.is_copy]
        gradient = max(own, key=lambda p: (p.name.endswith("mlp.up.weight"), p.name)).local.grad
        assert gradient is not None
        gradient.view(-1)[0] = float("nan")
        return measure(self)

    Engine.squared_norm_share = spoiled  # type: ignore[method-assign]


def flip_a_bit(model: nn.Module) -> None:
    """Flips one bit of a weight in the memory of this rank."""
    weight = local_tensor(model.get_parameter("layers.1.mlp.up.weight").detach())
    weight.view(torch.int32).view(-1)[0] ^= 1 << 12
