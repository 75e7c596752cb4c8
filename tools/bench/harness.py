"""The frame of the benchmarks: local processes that share a process group (gloo on CPUs, with one thread each, and NCCL
on GPUs); two contestants that agree, timed there in turn; and a table of such cases, measured one after the other."""

from __future__ import annotations

import datetime
import logging
import multiprocessing
import os
import sys
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

from parallel3d.config.named_class import BESIDE_RECIPES
from parallel3d.errors import Parallel3dError, RankError
from parallel3d.launch.local import start_fork_server
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
from parallel3d.tools.clock import DeviceClock

T = TypeVar("T")
Step = Callable[[int], object]  # does step i of a round
_TIMEOUT_S = 300.0
AGREEMENT = 1e-4  # relative to the peer's largest number
CPU = torch.device("cpu")
# NCCL takes ranks for ranks of several hosts by these, and lets them share a GPU; it then sends through sockets.
_HOST_OF_ITS_OWN = {
    **{"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"},
    **{"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"},
}


def run_ranks(function: Callable[..., T], *arguments: object, world_size: int, device: str = "cpu") -> T:
    """Calls `function(*arguments)` on ranks 0 to world_size - 1 of the default group, and returns rank 0's result.
    Arguments and result are pickled. With `device` "cuda" each rank has a GPU, which is torch's current device; where
    the host has fewer, ranks share one (`device_of_rank`).

    Raises this project's error that a rank raised, or RankError where a rank raised another one (its traceback is on
    stderr) or died. The other ranks are then stopped.
    """
    # Forked from a server that has imported once what each of them needs: seconds less for each process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__, "torch._dynamo"])
    start_fork_server()
    ranks: list[ForkServerProcess] = []
    waiting: dict[Connection[None, T | Parallel3dError], int] = {}
    results: dict[int, T] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                near_end, far_end = context.Pipe(duplex=False)
                place = (f"file://{folder}/rendezvous", rank, world_size)
                args = (far_end, place, device, function, arguments, BESIDE_RECIPES)
                process = context.Process(target=_rank, args=args, daemon=True)
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
    device_type: str,
    function: Callable[..., T],
    arguments: tuple[object, ...],
    beside_recipes: list[str],
) -> None:
    BESIDE_RECIPES.extend(beside_recipes)
    init_method, rank, world_size = place
    torch.set_num_threads(1)
    # DTensor recommends, per rank, a flattened mesh for the norm, which torch has no public function for.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    backend = "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(device_of_rank(device_type, rank, world_size))
        backend = "cpu:gloo,cuda:nccl"
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    try:
        end.send(function(*arguments))
    except Parallel3dError as error:
        end.send(error)
    dist.destroy_process_group()


def device_of_rank(device_type: str, rank: int, world_size: int) -> torch.device:
    """Returns the device of a rank of this host. Where the host has fewer GPUs than ranks they share them, each as if
    it were on a host of its own, which has to be said before NCCL starts."""
    if device_type != "cuda":
        return CPU
    gpus = max(1, torch.cuda.device_count())
    if gpus < world_size:
        os.environ.update(_HOST_OF_ITS_OWN, NCCL_HOSTID=f"r{rank}")
    return torch.device("cuda", rank % gpus)


def lacks_devices(device_type: str, world_size: int) -> bool:
    """Returns whether this host has fewer GPUs than ranks, and says on stderr that a case is left out for that."""
    if device_type != "cuda" or world_size <= torch.cuda.device_count():
        return False
    print(f"  left out: it needs {world_size} GPUs", file=sys.stderr, flush=True)
    return True


def own_device(device_type: str) -> torch.device:
    """Returns the device of this rank, inside of `run_ranks`."""
    return torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else CPU


def time_in_turn(ours: Step, peer: Step, *, rounds: int, steps: int, device: torch.device = CPU) -> list[Round]:
    """Times both contestants round after round. Every rank calls it, and every rank gets the same processor times."""
    return [Round(ours=time_steps(ours, steps, device), peer=time_steps(peer, steps, device)) for _ in range(rounds)]


def time_steps(step: Step, steps: int, device: torch.device = CPU) -> Timing:
    """Returns what one step takes: wall time between barriers (the stream's, on a GPU), and processor time summed over
    the ranks."""
    clock = DeviceClock(device)
    dist.barrier()
    start, cpu = clock.mark(), time.process_time()
    for index in range(steps):
        step(index)
    total_cpu = torch.tensor(time.process_time() - cpu, dtype=torch.float64, device=device)
    dist.barrier()
    wall = clock.seconds_between(start, clock.mark())
    dist.all_reduce(total_cpu)
    return Timing(wall_s=wall / steps, cpu_s=total_cpu.item() / steps)


def check_agreement(
    results: Iterable[tuple[str, Tensor | float, Tensor | float]], tolerance: float = AGREEMENT
) -> None:
    """Compares what, ours and the peer's of each result; `tolerance` is relative. Raises RankError where they differ:
    the timings would compare two different things."""
    for what, ours, peer in results:
        mine, other = torch.as_tensor(ours), torch.as_tensor(peer)
        error = (mine - other).abs().max()
        if not error <= tolerance * other.abs().max():  # not: NaN differs from all
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
    wall_bar: float | None = None  # wall time, ours / peer's


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
        if lacks_devices(options.device, case.world_size):
            continue
        rounds, steps = options.rounds or case.rounds, options.steps or case.steps
        found = run_ranks(
            case.measure, *case.arguments, rounds, steps, world_size=case.world_size, device=options.device
        )
        rows += rows_against_peer(name, found, case.cpu_bar, case.wall_bar)
        if case.one_process in timed:
            rows += rows_against_one_process(name, found, timed[case.one_process])
        timed[name] = found
    return rows
