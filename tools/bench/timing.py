"""The clock of the benchmarks: two contestants, in turn in the same processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel3d.tools.bench.report import Round, Timing

Step = Callable[[int], object]  # does step i of a round


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
