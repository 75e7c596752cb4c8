"""Mistakes that the checks of `tests/test_fake_cuda.py` must find, planted into a trainer as hooks of its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.layers.collectives import gather
from parallel3d.mesh import Axis
from parallel3d.training.hooks import StepHook
from parallel3d.training.trainer import Trainer


@dataclass
class _After(StepHook):
    """Calls a function once, when the optimizer has stepped."""

    act: Callable[[], object]

    def after_step(self, step: int) -> None:
        self.act()


def _number(trainer: Trainer) -> Tensor:
    return torch.zeros((), device=trainer.device)


def _cpu_tensor(trainer: Trainer, rank: int) -> None:
    torch.zeros(4, device=trainer.device).add_(torch.zeros(4))


def _cpu_number(trainer: Trainer, rank: int) -> None:
    torch.stack([_number(trainer), torch.zeros(())])


def _state_on_cpu(trainer: Trainer, rank: int) -> None:
    trainer.optimizer.state[trainer.parameters[0].local]["late"] = torch.zeros(3)


def _buffer_on_cpu(trainer: Trainer, rank: int) -> None:
    trainer.stages[0].module.register_buffer("late", torch.zeros(3))


def _item(trainer: Trainer, rank: int) -> None:
    for _ in range(2):
        _number(trainer).item()


def _list(trainer: Trainer, rank: int) -> None:
    torch.zeros(3, device=trainer.device).tolist()


def _branch(trainer: Trainer, rank: int) -> None:
    if _number(trainer) > 0:
        pass


def _to_cpu(trainer: Trainer, rank: int) -> None:
    _number(trainer).cpu()


def _mask(trainer: Trainer, rank: int) -> None:
    x = torch.zeros(3, device=trainer.device)
    x[x > 0] = torch.ones(3, device=trainer.device)


def _nonzero(trainer: Trainer, rank: int) -> None:
    torch.zeros(3, device=trainer.device).nonzero()


def _constant(trainer: Trainer, rank: int) -> None:
    torch.tensor([1.0, 2.0], device=trainer.device)


def _reduce(trainer: Trainer, axis: str, x: Tensor) -> None:
    dist.all_reduce(x, group=trainer.mesh[axis].get_group())


def _reduce_on_cpu(trainer: Trainer, rank: int) -> None:
    _reduce(trainer, "tp", torch.zeros(4))


def _reduce_int16(trainer: Trainer, rank: int) -> None:
    _reduce(trainer, "tp", torch.zeros(4, dtype=torch.int16, device=trainer.device))


def _reduce_transposed(trainer: Trainer, rank: int) -> None:
    _reduce(trainer, "tp", torch.zeros(4, 2, device=trainer.device).t())


def _reduce_other_dtype(trainer: Trainer, rank: int) -> None:
    _reduce(trainer, "tp", torch.zeros(4, dtype=(torch.float32, torch.bfloat16)[rank], device=trainer.device))


def _reduce_on_one_rank(trainer: Trainer, rank: int) -> None:
    if rank == 1:
        _reduce(trainer, "tp", _number(trainer))


def _orders_in_a_ring(trainer: Trainer, rank: int) -> None:
    """Lets each of four ranks wait for the next: no two of them are in two groups together."""
    axes = ("tp", "dp_shard") if rank in (0, 3) else ("dp_shard", "tp")
    for axis in axes:
        _reduce(trainer, axis, _number(trainer))


def _message_too_short(trainer: Trainer, rank: int) -> None:
    group, x = trainer.mesh["pp"].get_group(), torch.zeros(4 + rank, device=trainer.device)
    if rank == 0:
        dist.isend(x, group=group, group_dst=1)
    else:
        dist.irecv(x, group=group, group_src=0)


def _message_without_a_receiver(trainer: Trainer, rank: int) -> None:
    if rank == 0:
        dist.isend(_number(trainer), group=trainer.mesh["pp"].get_group(), group_dst=1)


def _gather_first(tp: Axis, block: nn.Module, args: tuple[Tensor]) -> None:
    gather(args[0], tp)


# What is done once in a step, by the names that `layouts.FAULTY` has.
_ACTS: dict[str, Callable[[Trainer, int], None]] = {
    "a CPU tensor added": _cpu_tensor,
    "a CPU number stacked": _cpu_number,
    "a state on the CPU": _state_on_cpu,
    "a buffer on the CPU": _buffer_on_cpu,
    "a number read": _item,
    "a list read": _list,
    "a branch": _branch,
    "a copy to the CPU": _to_cpu,
    "a mask as an index": _mask,
    "places of what is not zero": _nonzero,
    "a constant copied": _constant,
    "a CPU tensor reduced": _reduce_on_cpu,
    "int16 reduced": _reduce_int16,
    "a transposed tensor reduced": _reduce_transposed,
    "two dtypes reduced": _reduce_other_dtype,
    "reduced by one rank": _reduce_on_one_rank,
    "orders in a ring": _orders_in_a_ring,
    "a message too short": _message_too_short,
    "a message without a receiver": _message_without_a_receiver,
}


def plant(fault: str, trainer: Trainer, rank: int) -> None:
    """Makes the trainer's steps do the mistake of this name on `rank`."""
    if fault == "one more gather in each block":
        for block in trainer.stages[0].module.get_submodule("layers").children():
            tp = Axis.of(trainer.mesh["tp"])
            block.register_forward_pre_hook(partial(_gather_first, tp))
    else:
        trainer.hooks.append(_After(partial(_ACTS[fault], trainer, rank)))
