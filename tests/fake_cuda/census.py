"""`python -m tests.fake_cuda.census GUARD`: trains a step of each rank of each layout on fake
`cuda:0` tensors, and writes what the step does as a pickled list of `Program`.

Trainer, model, sharding, pipeline and optimizer are the real ones, built as a dry run builds them.
Four things replace what a CPU build of torch lacks: `guard.cpp`, streams and events for
`fully_shard`, the "fake" process group instead of NCCL, and 1 for each number that the host reads.
All private names of torch that these tests use are in this file.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import pickle
import sys
import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

if __name__ == "__main__":  # the guard has to be loaded before torch
    SPEC = importlib.util.find_spec("torch")
    assert SPEC is not None
    assert SPEC.origin is not None
    for library in ("libtorch_global_deps.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(SPEC.origin).parent / "lib" / library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(sys.argv[1])

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.mesh import build_mesh
from parallel3d.tools.bench.counting import as_group, collective_name
from parallel3d.tools.verify.dry_run import Chunks, ShapesOnly, build_dry
from parallel3d.tools.verify.fakes import (
    READ_A_VALUE,
    READ_THE_DEVICE,
    FakeTensor,
    cutting_by,
    world_of_none,
)
from parallel3d.torch_private import TorchDispatchMode, tree_iter
from parallel3d.training.trainer import Trainer
from tests.fake_cuda.layouts import LAYOUTS
from tests.fake_cuda.program import Operand, Program, Sent

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda:0")
COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")
# Operators whose result has a shape, or is a number, that the host has to ask the device for.
ASKING = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal", "aten::bincount"}


@contextmanager
def streams() -> Iterator[None]:
    """Stands in for the part of `torch.cuda` that `fully_shard` and meshes use. A stream has no
    `synchronize`, by which the host would wait."""
    stream = mock.Mock(spec=["wait_stream", "wait_event", "record_event"])
    handle = mock.MagicMock()
    handle.Stream.return_value = handle.current_stream.return_value = stream
    handle.current_device.return_value = 0
    handle.device_count.return_value = 8
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            is_torchs = name.startswith(
                ("torch.distributed.fsdp.", "torch.distributed.device_mesh")
            )
            if is_torchs and "_get_device_handle" in vars(module):
                patches.enter_context(
                    mock.patch.object(module, "_get_device_handle", lambda device_type: handle)
                )
        # Memory that a copy need not wait for, which fake tensors do not have.
        patches.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor))
        patches.enter_context(mock.patch.object(Tensor, "is_pinned", lambda tensor: True))
        yield


class Census(TorchDispatchMode):
    """Writes into a program where the host waits for the device or copies to it, and what is
    sent."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self._label = group_labels()

    def read_all(self, tensor: Tensor) -> list[float]:
        """Reads a vector at once, which fake tensors do number by number."""
        self.program.waits[place()] += 1
        return [1.0] * tensor.numel()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READ_THE_DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        if func is READ_A_VALUE and args[0].device.type == "cuda":
            self.program.waits[place()] += 1
            if args[0].dtype is torch.bool:
                return True
            return 1.0 if args[0].dtype.is_floating_point else 1
        if collective_name(func) is not None:
            self._send(func, args)
        else:
            self._cross(func.name(), args, kwargs)
        return func(*args, **kwargs)

    def _cross(self, name: str, args: Any, kwargs: Any) -> None:
        """Notes an operator that crosses between the host and the device."""
        tensors = [leaf for leaf in tree_iter(args) if isinstance(leaf, Tensor)]
        kinds = {tensor.device.type for tensor in tensors if tensor.ndim > 0}
        if name == "aten::_to_copy" and kwargs.get("device") is not None:
            self._copy(tensors[0].device.type, torch.device(kwargs["device"]).type)
        elif name.startswith(COPIES):
            self._copy(tensors[-1].device.type, tensors[0].device.type)
        elif kinds == {"cpu", "cuda"}:
            self.program.misplaced.append(f"{place()}: {name} mixes devices")
        elif name in ASKING and "cuda" in kinds:
            self.program.waits[place()] += 1

    def _copy(self, source: str, target: str) -> None:
        if (source, target) == ("cuda", "cpu"):
            self.program.waits[place()] += 1
        if (source, target) == ("cpu", "cuda"):
            self.program.copies[place()] += 1

    def _send(self, func: Any, args: Any) -> None:
        op = collective_name(func)
        assert op is not None
        assert func.namespace == "c10d"
        group = next(group for arg in args if (group := as_group(arg)) is not None)
        ranks = dist.get_process_group_ranks(group)
        peer = ranks[args[2]] if op in ("send", "recv_") else None
        operands = []
        for x in tree_iter(args):
            if isinstance(x, Tensor) and op != "barrier":
                dtype = str(x.dtype).removeprefix("torch.")
                operands.append(Operand(dtype, x.numel(), str(x.device), x.is_contiguous()))
        sent = Sent(op, self._label(group), tuple(ranks), peer, tuple(operands), place())
        self.program.sent.append(sent)


def place() -> str:
    """Returns the innermost line of the project on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.name != "census.py":
            return f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside the project"


def group_labels() -> Any:
    """Returns a function that names a group by its ranks, and by its number among the groups of
    the same ranks: all members make them in one order."""
    labels: dict[str, str] = {}

    def label(group: dist.ProcessGroup) -> str:
        if group.group_name not in labels:
            made: Counter[tuple[int, ...]] = Counter()
            for other, members in dist.distributed_c10d._world.pg_group_ranks.items():
                if isinstance(other, dist.ProcessGroup):
                    ranks = tuple(sorted(members))
                    made[ranks] += 1
                    labels[other.group_name] = f"{ranks} #{made[ranks]}"
        return labels[group.group_name]

    return label


def run(layout: str, rank: int) -> Program:
    """Trains a step of one rank, the second one if there are data-parallel ranks."""
    recipe = LAYOUTS[layout]
    program = Program(layout, rank)
    try:
        with world_of_none(recipe.parallel.world_size, rank), streams():
            mesh = build_mesh(recipe.parallel, "cuda")
            with ShapesOnly(), cutting_by(Chunks):
                trainer, batch = build_dry(recipe, mesh, DEVICE, gpu_bytes=80 * 2**30)
                if recipe.parallel.dp > 1:
                    trainer.train_step(batch)
                census = Census(program)
                read = FakeTensor.tolist

                def tolist(tensor: FakeTensor) -> Any:
                    is_vector = tensor.device.type == "cuda" and tensor.ndim == 1
                    return census.read_all(tensor) if is_vector else read(tensor)

                with census, mock.patch.object(FakeTensor, "tolist", tolist):
                    trainer.train_step(batch)
                program.misplaced += strays(trainer)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if str(ROOT) in f.filename]
        program.error = f"{type(error).__name__}: {error} ({' < '.join(lines[:-4:-1])})"
    return program


def strays(trainer: Trainer) -> list[str]:
    """Returns the parameters, gradients and optimizer states that are not on the GPU, or with
    offload not on the CPU, and the buffers that are not on the GPU."""
    held: dict[str, Tensor | None] = {}
    device = torch.device("cpu") if trainer.recipe.parallel.offload else DEVICE
    for stage in trainer.stages:
        held |= dict(stage.module.named_parameters())
    for each in trainer.parameters:
        held |= {f"local {each.name}": each.local, f"gradient of {each.name}": each.local.grad}
        for key, state in trainer.optimizer.state[each.local].items():
            held[f"state {key} of {each.name}"] = state if isinstance(state, Tensor) else None
    found = [name for name, x in held.items() if x is not None and x.device != device]
    for stage in trainer.stages:
        found += [name for name, x in stage.module.named_buffers() if x.device != DEVICE]
    return found


if __name__ == "__main__":
    # A collection looks at the modules of torch, a million objects.
    gc.disable()
    found = []
    for layout, recipe in LAYOUTS.items():
        found += [run(layout, rank) for rank in range(recipe.parallel.world_size)]
    pickle.dump(found, sys.stdout.buffer)
