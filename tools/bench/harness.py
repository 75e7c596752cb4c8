"""Common code of the benchmarks: times parallel3d and a peer alternately on local ranks, and runs
tables of cases."""

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

Step = Callable[[int], object]  # runs step i of a round
AGREEMENT = 1e-4  # largest difference, relative to the peer's largest absolute value


def lacks_devices(device_type: str, world_size: int) -> bool:
    """Returns True, with a message on stderr, if this host has fewer GPUs than ranks."""
    if device_type != "cuda" or world_size <= torch.cuda.device_count():
        return False
    print(f"  skipped: needs {world_size} GPUs", file=sys.stderr, flush=True)
    return True


def time_in_turn(
    ours: Step, peer: Step, *, rounds: int, steps: int, device: torch.device = CPU
) -> list[Round]:
    """Times both contestants alternately. Every rank must call it."""
    return [
        Round(ours=time_steps(ours, steps, device), peer=time_steps(peer, steps, device))
        for _ in range(rounds)
    ]


def time_steps(step: Step, steps: int, device: torch.device = CPU) -> Timing:
    """Returns the time per step: wall time between barriers, and CPU time summed over ranks.

    On a GPU, wall time is measured with events in the stream.
    """
    clock = DeviceClock(device)
    gc.collect()
    gc.freeze()  # Otherwise a full collection during the timing would visit all objects of torch.
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


def pass_both_ways(
    layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the output and the input gradient. Weight gradients accumulate over calls."""
    leaf = x.detach().requires_grad_()
    y = layer(leaf)
    y.backward(grad)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def check_agreement(
    results: Iterable[tuple[str, Tensor | float, Tensor | float]], tolerance: float = AGREEMENT
) -> None:
    """Raises RankError if the two values in any (name, ours, peer) differ.

    `tolerance` is relative to the peer's largest absolute value.
    """
    for what, ours, peer in results:
        mine = torch.as_tensor(ours)
        other = torch.as_tensor(peer)
        error = (mine - other).abs().max()
        if not error <= tolerance * other.abs().max():  # negated, so that NaN fails
            raise RankError(
                f"{what}: ours and the peer differ by {error:.2g}: not the same training"
            )


@dataclass(frozen=True, kw_only=True)
class TimedCase:
    """Comparison with a peer. `measure(*arguments, rounds, steps)` runs on every rank."""

    measure: Callable[..., list[Round]]
    arguments: tuple[object, ...]
    world_size: int
    rounds: int
    steps: int  # Steps per round.
    cpu_bar: float | None  # Largest ratio of CPU time, ours / peer. None: no limit.
    one_process: str = ""  # name of a case in one process, whose peer is a second reference
    wall_bar: float | None = None  # largest ratio of wall time, ours / peer


Case = TimedCase | Callable[[Options], list[ResultRow]]


def run_cases(cases: Mapping[str, Case], options: Options) -> list[ResultRow]:
    """Measures the selected cases and returns their rows.

    A case is also compared with the peer of its `one_process` case, if that was measured before.
    """
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
