"""Runs a function on several local processes that share a gloo group, one thread each, and returns rank 0's result."""

from __future__ import annotations

import datetime
import logging
import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import TypeVar

import torch
import torch.distributed as dist

from parallel3d.errors import Parallel3dError, RankError

T = TypeVar("T")
_TIMEOUT_S = 300.0


def run_ranks(function: Callable[..., T], *arguments: object, world_size: int) -> T:
    """Calls `function(*arguments)` on ranks 0 to world_size - 1 of the default group, and returns rank 0's result.
    Arguments and result are pickled.

    Raises this project's error that a rank raised, or RankError where a rank raised another one (its traceback is on
    stderr) or died. The other ranks are then stopped.
    """
    # Forked from a server that has imported once what each of them needs: seconds less for each process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__, "torch._dynamo"])
    ranks: list[ForkServerProcess] = []
    ends: list[Connection[None, T | Parallel3dError]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                end, far_end = context.Pipe(duplex=False)
                place = (f"file://{folder}/rendezvous", rank, world_size)
                process = context.Process(target=_rank, args=(far_end, place, function, arguments), daemon=True)
                process.start()
                far_end.close()  # ours: so that a dead rank's end reads as closed
                ranks.append(process)
                ends.append(end)
            return _collect(ends)
        finally:
            for process in ranks:
                process.terminate()
                process.join()


def _collect(ends: list[Connection[None, T | Parallel3dError]]) -> T:
    results: dict[int, T] = {}
    while len(results) < len(ends):
        for end in wait([end for rank, end in enumerate(ends) if rank not in results]):
            rank = next(rank for rank, other in enumerate(ends) if other is end)
            try:
                result = ends[rank].recv()
            except EOFError:
                raise RankError(f"rank {rank} of {len(ends)} died before its result") from None
            if isinstance(result, Parallel3dError):
                raise result
            results[rank] = result
    return results[0]


def _rank(
    end: Connection[T | Parallel3dError, None],
    place: tuple[str, int, int],
    function: Callable[..., T],
    arguments: tuple[object, ...],
) -> None:
    init_method, rank, world_size = place
    torch.set_num_threads(1)
    # DTensor recommends, per rank, a flattened mesh for the norm, which torch has no public function for.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    try:
        end.send(function(*arguments))
    except Parallel3dError as error:
        end.send(error)
    dist.destroy_process_group()
