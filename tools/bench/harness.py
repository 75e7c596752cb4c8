"""The frame of the benchmarks: local processes that share a gloo group, one thread each; two contestants that agree,
timed there in turn; and a table of such cases, measured one after the other."""

from __future__ import annotations

import datetime
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.errors import Parallel3dError, RankError
from parallel3d.tools.bench.report import (
    Options,
    ResultRow,
    Round,
    Timing,
    announced,
    chosen,
    rows_against_one_process,
    rows_against_peer,
)

T = TypeVar("T")
Step = Callable[[int], object]  # does step i of a round
_TIMEOUT_S = 300.0
_AGREEMENT = 1e-4  # relative to the peer's largest number


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
    waiting: dict[Connection[None, T | Parallel3dError], int] = {}
    results: dict[int, T] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                near_end, far_end = context.Pipe(duplex=False)
                place = (f"file://{folder}/rendezvous", rank, world_size)
                process = context.Process(target=_rank, args=(far_end, place, function, arguments), daemon=True)
                process.start()
                far_end.close()  # ours: so that a dead rank's end reads as closed
                ranks.append(process)
                waiting[near_end] = rank
            while waiting:
                ready = wait(list(waiting))
                for end in [end for end in waiting if end in ready]:
                    rank = waiting.pop(end)
                    try:
                        result = end.recv()
                    except EOFError:
                        raise RankError(f"rank {rank} of {world_size} died before its result") from None
                    if isinstance(result, Parallel3dError):
                        raise result
                    results[rank] = result
            return results[0]
        finally:
            for process in ranks:
                process.terminate()
                process.join()


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


def time_in_turn(ours: Step, peer: Step, *, rounds: int, steps: int) -> list[Round]:
    """Times both contestants round after round. Every rank calls it, and every rank gets the same processor times."""
    return [Round(ours=time_steps(ours, steps), peer=time_steps(peer, steps)) for _ in range(rounds)]


def time_steps(step: Step, steps: int) -> Timing:
    """Returns what one step takes: wall time between barriers, and processor time summed over the ranks."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for index in range(steps):
        step(index)
    total_cpu = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
    dist.barrier()
    wall = time.perf_counter() - wall
    dist.all_reduce(total_cpu)
    return Timing(wall_s=wall / steps, cpu_s=total_cpu.item() / steps)


def check_agreement(results: Iterable[tuple[str, Tensor | float, Tensor | float]]) -> None:
    """Compares what, ours and the peer's of each result. Raises RankError where they differ: the timings would compare
    two different things."""
    for what, ours, peer in results:
        mine, other = torch.as_tensor(ours), torch.as_tensor(peer)
        error = (mine - other).abs().max()
        if not error <= _AGREEMENT * other.abs().max():  # not: NaN differs from all
            raise RankError(f"{what}: ours and the peer's differ by {error:.2g}: not the same training")


@dataclass(frozen=True, kw_only=True)
class TimedCase:
    """Ours and a peer, which `measure(*arguments, rounds, steps)` times in turn; it runs on every rank."""

    measure: Callable[..., list[Round]]
    arguments: tuple[object, ...]
    world_size: int
    rounds: int
    steps: int  # in a round
    cpu_bar: float | None  # processor time, ours / peer's
    one_process: str = ""  # the case whose peer, in one process, ours is compared with as well


Case = TimedCase | Callable[[Options], list[ResultRow]]


def run_cases(cases: Mapping[str, Case], options: Options) -> list[ResultRow]:
    """Measures every case that `options` names, says each on stderr when its turn comes, and returns their rows. Rows
    against one process need its case among those that are named."""
    rows: list[ResultRow] = []
    timed: dict[str, list[Round]] = {}
    for name in announced(chosen(cases, options)):
        case = cases[name]
        if not isinstance(case, TimedCase):
            rows += case(options)
            continue
        rounds, steps = options.rounds or case.rounds, options.steps or case.steps
        found = run_ranks(case.measure, *case.arguments, rounds, steps, world_size=case.world_size)
        rows += rows_against_peer(name, found, case.cpu_bar)
        if case.one_process in timed:
            rows += rows_against_one_process(name, found, timed[case.one_process])
        timed[name] = found
    return rows
