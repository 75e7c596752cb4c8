"""Benchmark of context parallelism: a Llama block on a long sequence, split over cp ranks.

The peers compute the full sequence on one rank: the same block, and the block in plain torch. All
start from the same weights. Outputs and input gradients must agree before timing.
"""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.config.recipe import ModelConfig
from parallel3d.layers.parameter import initial_weights
from parallel3d.layers.sequence import SequencePart
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.mesh import Axis
from parallel3d.models.llama import Llama
from parallel3d.pipeline.stage import BlockRange, cut
from parallel3d.tools.bench.harness import (
    Case,
    TimedCase,
    check_agreement,
    pass_both_ways,
    time_in_turn,
)
from parallel3d.tools.bench.plain_torch.llama import PlainLlama
from parallel3d.tools.bench.report import Options, ResultRow, Round, row_of
from parallel3d.tools.local_ranks import run_ranks

MODEL = ModelConfig(
    layers=1,
    hidden=512,
    heads=8,
    kv_heads=2,
    ffn_hidden=1376,
    vocab=64,
)
SEQ_LEN = 4096
CPU_BARS = {2: 1.3, 4: 1.35}  # Largest ratio of CPU time, all ranks / one process.
BUSIEST_BAR = 1.1  # Largest ratio of CPU time, busiest rank / mean of the ranks.
_MIDDLE = BlockRange(0, 1, is_first_stage=False, is_last_stage=False)


def context_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for cp, bar in CPU_BARS.items():
        for peer in ("ours", "plain torch"):
            cases[f"context: cp {cp} vs {peer} in one process"] = TimedCase(
                measure=measure,
                arguments=(peer,),
                world_size=cp,
                rounds=5,
                steps=2,
                cpu_bar=bar if peer == "ours" else None,
            )
        name = f"context: cp {cp}, busiest rank vs mean"
        cases[name] = partial(bench_balance, name, cp)
    return cases


def own_block() -> tuple[nn.Module, SequencePart]:
    """Returns the block over all ranks, and the part of the sequence that this rank has."""
    cp = Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    return block_of(cp), SequencePart(cp)


def block_of(cp: Axis | None) -> nn.Module:
    block = cut(Llama(MODEL, device="cpu", cp=cp), _MIDDLE)
    weights = initial_weights(Llama(MODEL, device="meta"), 0)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            local_tensor(parameter).copy_(weights[name])
    return block


def plain_block() -> nn.Module:
    plain = PlainLlama(MODEL)
    plain.embed = plain.norm = plain.head = None
    plain.load(initial_weights(Llama(MODEL, device="meta"), 0))
    return plain


def whole_input() -> tuple[Tensor, Tensor]:
    """Returns the input of a block and the gradient of its output."""
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 1, SEQ_LEN, MODEL.hidden, generator=generator)
    return x, grad


def measure(peer: str, rounds: int, steps: int) -> list[Round]:
    """Times the block over all ranks, and the peer on rank 0. Runs on every rank."""
    block, part = own_block()
    alone = block_of(None) if peer == "ours" else plain_block()
    x, grad = whole_input()
    own = part.take(x, 1), part.take(grad, 1)
    whole = [part.take(each, 1) for each in pass_both_ways(alone, x, grad)]
    check_agreement(
        zip(("output", "input gradient"), pass_both_ways(block, *own), whole, strict=True)
    )

    def step_alone(_: int) -> None:
        if dist.get_rank() == 0:
            pass_both_ways(alone, x, grad)

    return time_in_turn(
        lambda _: pass_both_ways(block, *own),
        step_alone,
        rounds=rounds,
        steps=steps,
    )


def bench_balance(case: str, cp: int, options: Options) -> list[ResultRow]:
    """Compares the CPU time of the busiest rank with the mean over the ranks."""
    times = run_ranks(cpu_of_ranks, options.steps or 5, world_size=cp)
    return [row_of(case, "cpu_s", [(max(times), sum(times) / cp)], BUSIEST_BAR)]


def cpu_of_ranks(steps: int) -> list[float]:
    """Returns the CPU time of each rank. Runs on every rank."""
    block, part = own_block()
    x, grad = (part.take(each, 1) for each in whole_input())
    pass_both_ways(block, x, grad)
    dist.barrier()
    start = time.process_time()
    for _ in range(steps):
        pass_both_ways(block, x, grad)
    times: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(times, time.process_time() - start)
    return times
