"""Runs a function on all ranks, and raises its error on all of them if it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from parallel3d.errors import Parallel3dError

WAITS_FOR_RANKS = True  # Makes parallel3d.watch.heartbeat count a rank as waiting in this module.

Own = TypeVar("Own")


def collect(
    step: Callable[[], Own],
    reply: Callable[[list[Own]], Any] = list,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Runs `step` on every rank, and `reply` on rank 0 with all results. Collective over the group.

    Returns this rank's item of the reply if the reply is a list, else the reply. If `step` or
    `reply` raises a Parallel3dError on any rank, it is raised on all ranks. Other exceptions are
    raised only where they occur.
    """
    size = dist.get_world_size(group)
    everyone: list[Any] | None = [None] * size if dist.get_rank(group) == 0 else None
    answers: list[Any] | None = None
    dist.gather_object(_result_or_error(step), everyone, dst=0, group=group)
    if everyone is not None:
        answer = _result_or_error(lambda: reply(_without_errors(everyone)))
        answers = answer if isinstance(answer, list) else [answer] * size
    own: list[Any] = [None]
    dist.scatter_object_list(own, answers, src=0, group=group)
    return _without_errors(own)[0]


def _result_or_error(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except Parallel3dError as error:
        return error


def _without_errors(results: list[Any]) -> list[Any]:
    """Returns the results of the ranks, or raises the first error among them."""
    for each in results:
        if isinstance(each, Parallel3dError):
            raise each
    return results
