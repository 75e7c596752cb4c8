"""Runs one rank of a layout on fake `cuda:0` tensors, and writes down what its step does. All private names of torch
that these tests use are in this file.

The trainer, its model, sharding, pipeline and optimizer are the real ones, built as a dry run builds them. Four things
stand in for what a CPU build lacks: `guard.cpp`, streams and events for `fully_shard` (`_DeviceHandle`), torch's
"fake" process group in the place of NCCL, and numbers for the few values that the host reads (`_VALUES`).
"""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.mesh import build_mesh
from parallel3d.sharding.counting import as_group
from parallel3d.tools.verify.dry_run import Chunks, ShapesOnly, build_dry
from parallel3d.torch_private import (
    READ_A_VALUE,
    FakeTensor,
    TorchDispatchMode,
    collective_name,
    cutting_by,
    tree_iter,
    world_of_none,
)
from parallel3d.training.trainer import Trainer
from tests.fake_cuda.facts import Operand, Program, Sent
from tests.fake_cuda.faults import plant
from tests.fake_cuda.layouts import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda:0")

# A fake tensor has no numbers, and a program that reads one gets 1: a finite loss, a norm, a label. One place would
# take that for a failure, because it counts the pseudo-gradients that are not finite.
_VALUES = {"training/local_sgd/replicas.py LocalSgd._receive": [0.0]}

# The operators whose result has a shape, or is a number, that the host has to ask the device for.
_ASKING = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::equal",
    "aten::repeat_interleave.Tensor",
    "aten::bincount",
}
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")


class _Event:
    """An event of the device, at which nothing happens."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    """A stream of the device. It has no `synchronize`, by which the host would wait."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()


class _DeviceHandle:
    """What `fully_shard` and a mesh ask of `torch.cuda`."""

    Stream, Event = _Stream, _Event

    def __init__(self) -> None:
        self._current = _Stream()

    def current_stream(self, device: Any = None) -> _Stream:
        return self._current

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 8

    def is_initialized(self) -> bool:
        return True

    def stream(self, stream: _Stream) -> Any:
        return nullcontext()


@contextmanager
def _streams() -> Iterator[None]:
    """Gives `fully_shard` and meshes streams and events for a block."""
    handle = _DeviceHandle()
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            is_asking = name.startswith(("torch.distributed.fsdp.", "torch.distributed.device_mesh"))
            if is_asking and "_get_device_handle" in vars(module):
                patches.enter_context(mock.patch.object(module, "_get_device_handle", lambda device_type: handle))
        yield


class Census(TorchDispatchMode):
    """Writes into a program what the operators of a block do between the host and the device, and what is sent."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program
        self._groups = _group_labels()

    def __enter__(self) -> Census:
        census, read = self, FakeTensor.tolist

        def tolist(tensor: FakeTensor) -> Any:
            """Reads all numbers at once, which torch's own fake tensor does one by one."""
            if tensor.device.type == "cpu" or tensor.ndim != 1:
                return read(tensor)
            return census.read(tensor)

        self._patch = mock.patch.object(FakeTensor, "tolist", tolist)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def read(self, tensor: Tensor) -> list[float]:
        """Counts a wait, and returns the numbers that the program reads."""
        place = self._count(self._program.waits)
        return _VALUES.get(place, [1.0] * tensor.numel())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is READ_A_VALUE and args[0].device.type == "cuda":
            value = self.read(args[0])[0]
            dtype = args[0].dtype
            return bool(value) if dtype is torch.bool else value if dtype.is_floating_point else int(value)
        if collective_name(func) is not None:
            self._send(func, args)
        else:
            self._look(func, args, kwargs)
        return func(*args, **kwargs)

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        """Notes an operator that crosses between the host and the device."""
        tensors = [
            each for arg in args for each in (arg if isinstance(arg, list) else (arg,)) if isinstance(each, Tensor)
        ]
        kinds = {tensor.device.type for tensor in tensors}
        name = func.name()
        if name.startswith(_COPIES):
            to = kwargs.get("device", None) if name == "aten::_to_copy" else tensors[0].device
            source = tensors[0] if name == "aten::_to_copy" else tensors[-1]
            if to is not None and (source.device.type, torch.device(to).type) == ("cuda", "cpu"):
                self._count(self._program.waits)
            elif to is not None and (source.device.type, torch.device(to).type) == ("cpu", "cuda"):
                self._count(self._program.copies)
        elif "cpu" in kinds and "cuda" in kinds:
            self._count(self._program.mixed, f": {name}")
        by_mask = name.startswith(("aten::index.", "aten::index_put")) and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if "cuda" in kinds and (name in _ASKING or by_mask):
            self._count(self._program.waits)

    def _send(self, func: Any, args: Any) -> None:
        """Notes a collective. Raises NotImplementedError for the functional ones, which only compiled code calls."""
        op = collective_name(func)
        if func.namespace != "c10d":
            raise NotImplementedError(f"{func}: only the collectives of c10d are looked at")
        group = next(group for arg in args if (group := as_group(arg)) is not None)
        ranks = dist.get_process_group_ranks(group)
        # The order of c10d's own arguments: the tensors, the group, and here the other rank.
        peer = ranks[args[2]] if op in ("send", "recv_") else None
        operands = tuple(
            Operand(str(x.dtype).removeprefix("torch."), x.numel(), str(x.device), x.is_contiguous())
            for x in tree_iter(args)
            if isinstance(x, Tensor)
        )
        assert op is not None
        if op == "barrier":  # its operand is torch's own, and no tensor of the program
            operands = ()
        parts: tuple[tuple[int, int, int], ...] = ()
        if op == "alltoall_base_":  # output, input, group, rows of each rank in the output and in the input
            received, sent = (_elements(args[at], args[3 + at], len(ranks)) for at in (0, 1))
            parts = tuple(zip(ranks, received, sent, strict=True))
        self._program.sent.append(Sent(op, self._groups(group), peer, operands, self._place(), parts))

    def _count(self, counter: Counter[str], more: str = "") -> str:
        place = self._place()
        counter[place + more] += 1
        return place

    def _place(self) -> str:
        """Returns the innermost function of the project on the stack, and remembers the line in it."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(str(ROOT)) and file != __file__:
                path = Path(file).relative_to(ROOT)
                below = path.parts[1:] if path.parts[0] == "parallel3d" else path.parts
                if below[0] in _SOURCES or (below[0] == "tests" and path.name == "faults.py"):
                    function = frame.f_code.co_qualname.split(".<locals>")[0]
                    place = f"{'/'.join(below)} {function}"
                    self._program.lines[place] = f"{path.as_posix()}:{frame.f_lineno}"
                    return place
            frame = frame.f_back
        return "outside the project"


_SOURCES = {path.name for path in (ROOT / "parallel3d").iterdir()}


def _group_labels() -> Any:
    """Returns a function that names a group by its ranks, and by its number among the groups of the same ranks, in the
    order in which they were made: all members make them in one order, or the names are not the same."""
    numbers: dict[str, str] = {}

    def label(group: dist.ProcessGroup) -> str:
        if group.group_name not in numbers:
            made: Counter[tuple[int, ...]] = Counter()
            for other, members in dist.distributed_c10d._world.pg_group_ranks.items():
                if not isinstance(other, dist.ProcessGroup):  # groups that this rank is no member of
                    continue
                ranks = tuple(sorted(members))
                made[ranks] += 1
                numbers[other.group_name] = f"{','.join(map(str, ranks))} #{made[ranks]}"
        return numbers[group.group_name]

    return label


def _elements(tensor: Tensor, rows: list[int], ranks: int) -> list[int]:
    """Returns the elements of each rank's part of a tensor, which is cut evenly where `rows` is empty."""
    if not rows:
        return [tensor.numel() // ranks] * ranks
    return [row * tensor[0].numel() for row in rows]


def run(layout: str, rank: int, faults: tuple[str, ...] = ()) -> Program:
    """Trains a step of one rank of a layout, with data ranks the second one, and returns what the step does. An error
    is told in the program."""
    recipe, program, start = LAYOUTS[layout], Program(layout, rank, faults), time.perf_counter()
    try:
        with world_of_none(recipe.parallel.world_size, rank), _streams():
            mesh = build_mesh(recipe.parallel, "cuda")
            with ShapesOnly(), cutting_by(Chunks):
                trainer, batch = build_dry(recipe, mesh, DEVICE, gpu_bytes=80 * 2**30)
                if recipe.parallel.dp > 1:  # the data ranks leave something from one step to the next
                    with Census(Program(layout, rank)):
                        trainer.train_step(batch)
                for fault in faults:
                    plant(fault, trainer, rank)
                with Census(program):
                    trainer.train_step(batch, observe=lambda parameter: _check_gradient(program, parameter))
                program.strays += _strays(trainer)
    except Exception as error:
        inside = [each for each in traceback.extract_tb(error.__traceback__) if str(ROOT) in each.filename]
        places = " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in inside[:-4:-1])
        program.error = f"{type(error).__name__}: {error} ({places})"
    program.seconds = time.perf_counter() - start
    return program


def _check_gradient(program: Program, parameter: Any) -> None:
    gradient = parameter.local.grad
    if gradient is not None and gradient.device != DEVICE:
        program.strays.append(f"gradient of {parameter.name}")


def _strays(trainer: Trainer) -> list[str]:
    """Returns the parameters, buffers and optimizer states that are not on the device."""
    held: dict[str, Tensor] = {f"parameter {each.name}": each.local for each in trainer.parameters}
    for stage in trainer.stages:
        held |= {f"parameter {name} of its module": each for name, each in stage.module.named_parameters()}
        held |= {f"buffer {name}": each for name, each in stage.module.named_buffers()}
    for each in trainer.parameters:
        states = trainer.optimizer.state[each.local].items()
        held |= {f"state {key} of {each.name}": state for key, state in states if isinstance(state, Tensor)}
    if trainer.local_sgd is not None:
        for outer in trainer.local_sgd.parameters:
            held[f"outer value of {outer.inner.name}"] = outer.value
            for key, state in trainer.local_sgd.optimizer.state[outer.value].items():
                held[f"outer state {key} of {outer.inner.name}"] = state
    return [name for name, tensor in held.items() if tensor.device != DEVICE]
