"""The frame of the benchmarks: two contestants that agree are timed in turn on local ranks, and a
table of such cases is measured one after the other."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.errors import RankError
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
from parallel3d.tools.local_ranks import CPU, run_ranks

Step = Callable[[int], object]  # does step i of a round
AGREEMENT = 1e-4  # relative to the peer's largest number


def lacks_devices(device_type: str, world_size: int) -> bool:
    """Returns whether this host has fewer GPUs than ranks, and says on stderr that a case is left
    out for that."""
    if device_type != "cuda" or world_size <= torch.cuda.device_count():
        return False
    print(f"  left out: it needs {world_size} GPUs", file=sys.stderr, flush=True)
    return True


def time_in_turn(
    ours: Step, peer: Step, *, rounds: int, steps: int, device: torch.device = CPU
) -> list[Round]:
    """Times both contestants round after round. Every rank calls it, and every rank gets the same
    processor times."""
    return [
        Round(ours=time_steps(ours, steps, device), peer=time_steps(peer, steps, device))
        for _ in range(rounds)
    ]


def time_steps(step: Step, steps: int, device: torch.device = CPU) -> Timing:
    """Returns what one step takes: wall time between barriers (the stream's, on a GPU), and
    processor time summed over the ranks."""
    clock = DeviceClock(device)
    gc.collect()
    gc.freeze()  # a full collection visits all objects of torch, whoever makes it due
    dist.barrier()
    start = clock.mark()
    cpu = time.process_time()
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
    """Compares what, ours and the peer's of each result; `tolerance` is relative. Raises RankError
    where they differ: the timings would compare two different things."""
    for what, ours, peer in results:
        mine = torch.as_tensor(ours)
        other = torch.as_tensor(peer)
        error = (mine - other).abs().max()
        if not error <= tolerance * other.abs().max():  # not: NaN differs from all
            raise RankError(
                f"{what}: ours and the peer's differ by {error:.2g}: not the same training"
            )


@dataclass(frozen=True, kw_only=True)
class TimedCase:
    """Ours and a peer, which `measure(*arguments, rounds, steps)` times in turn; it runs on every
    rank."""

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
    """Measures every case that `options` names, says each on stderr when its turn comes, and
    returns their rows. Rows against one process need its case among those that are named."""
    rows: list[ResultRow] = []
    timed: dict[str, list[Round]] = {}
    for name in announced(chosen(cases, options)):
        case = cases[name]
        if not isinstance(case, TimedCase):
            rows += case(options)
            continue
        if lacks_devices(options.device, case.world_size):
            continue
        rounds = options.rounds or case.rounds
        steps = options.steps or case.steps
        found = run_ranks(
            case.measure,
            *case.arguments,
            rounds,
            steps,
            world_size=case.world_size,
            device=options.device,
        )
        rows += rows_against_peer(name, found, case.cpu_bar, case.wall_bar)
        if case.one_process in timed:
            rows += rows_against_one_process(name, found, timed[case.one_process])
        timed[name] = found
    return rows
