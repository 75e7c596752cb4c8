"""A step that all ranks take together, and that fails on all of them if it fails on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from parallel3d.errors import Parallel3dError

Mine = TypeVar("Mine")
Reply = TypeVar("Reply")


def collect(
    step: Callable[[], Mine], reply: Callable[[list[Mine]], Sequence[Reply]], group: dist.ProcessGroup | None = None
) -> Reply:
    """Runs `step` on every rank, and `reply` on rank 0 with what each has returned; gives each rank its item of the
    reply. An error of this project in either is raised on all ranks, so that none waits for one that has given up."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    try:
        mine: tuple[Mine | None, Parallel3dError | None] = (step(), None)
    except Parallel3dError as error:
        mine = (None, error)
    everyone: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(mine, everyone, dst=0, group=group)
    answers: list[tuple[Reply | None, Parallel3dError | None]] | None = None
    if everyone is not None:
        failed = next((error for _, error in everyone if error is not None), None)
        try:
            if failed is not None:
                raise failed
            answers = [(each, None) for each in reply([value for value, _ in everyone])]
        except Parallel3dError as error:
            answers = [(None, error)] * ranks
    own: list[Any] = [None]
    dist.scatter_object_list(own, answers, src=0, group=group)
    answer, failure = own[0]
    if failure is not None:
        raise failure
    own_answer: Reply = answer
    return own_answer
