"""`bench layers`: times a transformer block, forward and backward, against DTensor and one process.

Further cases are converted Hugging Face blocks (`converted`), a long sequence split over cp ranks
(`context`), mixtures of experts (`experts`), and the peak memory of the chunked loss.

The peer is the same block in plain torch with the same weights, parallelized by
`parallelize_module` (DTensor) as in `bench step`. Outputs and input gradients must agree before
timing. Overhead dominates at size `hidden 64`, matmuls at `hidden 1024`. On GPUs the block is that
of Llama 3 8B, and the peer is compiled.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.build_engine import compile_blocks
from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.layers.loss import vocab_parallel_cross_entropy
from parallel3d.layers.parameter import (
    ParallelContext,
    initial_weights,
    named_specs,
    set_fused_gradients,
)
from parallel3d.layers.vocabulary import VocabParallelHead, head_cross_entropy
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.mesh import Axis
from parallel3d.models.llama import Llama
from parallel3d.pipeline.stage import BlockRange, cut
from parallel3d.tools.bench.context import context_cases
from parallel3d.tools.bench.converted import converted_cases
from parallel3d.tools.bench.experts import expert_cases
from parallel3d.tools.bench.harness import (
    AGREEMENT,
    Case,
    check_agreement,
    lacks_devices,
    pass_both_ways,
    run_cases,
    time_in_turn,
)
from parallel3d.tools.bench.plain_torch.llama import PlainLlama
from parallel3d.tools.bench.plain_torch.stack import apply_tp
from parallel3d.tools.bench.report import Options, ResultRow, Round, row_of
from parallel3d.tools.bench.step import BF16_AGREEMENT, StepLayout, StepSize, timed_cases
from parallel3d.tools.local_ranks import own_device, run_ranks

# One block, without embedding and head.
_MIDDLE = BlockRange(0, 1, is_first_stage=False, is_last_stage=False)
SIZES = (
    StepSize(
        name="hidden 64",
        model=ModelConfig(
            layers=1,
            hidden=64,
            heads=4,
            kv_heads=2,
            ffn_hidden=176,
            vocab=64,
        ),
        seq_len=64,
        rounds=5,
        steps=30,
    ),
    StepSize(
        name="hidden 1024",
        model=ModelConfig(
            layers=1,
            hidden=1024,
            heads=16,
            kv_heads=8,
            ffn_hidden=2816,
            vocab=64,
        ),
        seq_len=512,
        rounds=5,
        steps=3,
    ),
)
_LLAMA_8B = StepSize(
    name="Llama 8B",
    model=ModelConfig(
        layers=1,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn_hidden=14336,
        vocab=64,
    ),
    seq_len=8192,
    rounds=5,
    steps=10,
    device="cuda",
    precision="bf16",
    wall_bar=1.15,
)
GPU_SIZES = (
    _LLAMA_8B,
    replace(_LLAMA_8B, name="Llama 8B, compiled", is_compiled=True, wall_bar=1.05),
)
TP_BARS = {"hidden 64": 0.4, "hidden 1024": 1.0}  # Largest ratio of CPU time, ours / DTensor.
LAYOUTS = (
    StepLayout(name="one process", parallel=ParallelConfig()),
    StepLayout(name="tp 2", parallel=ParallelConfig(tp=2), cpu_bars=TP_BARS),
    StepLayout(
        name="tp 2 sequence parallel",
        parallel=ParallelConfig(tp=2, sequence_parallel=True),
        cpu_bars=TP_BARS,
    ),
)
LOSS_VOCAB = 128_256
LOSS_HIDDEN = 64
LOSS_TOKENS = 1024
LOSS_CHUNK = 128
LOSS_BAR = 0.25


def bench_layers(options: Options) -> list[ResultRow]:
    """Measures the selected cases and returns their rows."""
    sizes = GPU_SIZES if options.device == "cuda" else SIZES
    cases: dict[str, Case] = {**timed_cases(measure, sizes, LAYOUTS, prefix="block of ")}
    if options.device == "cpu":
        cases |= converted_cases(SIZES, TP_BARS) | context_cases() | expert_cases()
    for tp in (1, 2):
        name = (
            f"loss of vocabulary {LOSS_VOCAB}, {LOSS_TOKENS} tokens in chunks of {LOSS_CHUNK}: tp "
            f"{tp}"
        )
        cases[name] = partial(bench_loss, name, tp)
    return run_cases(cases, options)


def measure(size: StepSize, parallel: ParallelConfig, rounds: int, steps: int) -> list[Round]:
    """Checks the block against its peer, then times both on one sequence. Runs on every rank."""
    model = size.model
    is_cut = parallel.sequence_parallel
    tp = init_device_mesh(size.device, (parallel.tp,)) if parallel.tp > 1 else None
    settings = size.peer_settings()
    dtype = torch.bfloat16 if size.precision == "bf16" else torch.float32
    device = settings.device
    weights = initial_weights(Llama(model, device="meta"), 0)
    ours = cut(Llama(model, tp=tp, sequence_parallel=is_cut, device=device), _MIDDLE).to(dtype)
    set_fused_gradients(ours, True)
    if size.is_compiled:
        compile_blocks(ours)
    with torch.no_grad():
        for name, spec in named_specs(ours):
            local_tensor(ours.get_parameter(name)).copy_(Axis.of(tp).part(weights[name], spec.dim))
    with device:
        peer = PlainLlama(model)
    peer.embed = peer.norm = peer.head = None
    peer.load(weights)
    peer.to(dtype)
    if tp is not None:
        apply_tp(peer, tp, is_cut)
    settings.compile(peer)
    x, grad = torch.randn(
        (2, 1, size.seq_len, model.hidden), generator=torch.Generator().manual_seed(0)
    ).to(device, dtype)
    if is_cut:
        x, grad = (
            part.chunk(parallel.tp, dim=1)[dist.get_rank()].contiguous() for part in (x, grad)
        )

    step = partial(pass_both_ways, x=x, grad=grad)
    results = zip(("output", "input gradient"), step(ours), step(peer), strict=True)
    check_agreement(results, AGREEMENT if dtype == torch.float32 else BF16_AGREEMENT)
    return time_in_turn(
        lambda _: step(ours), lambda _: step(peer), rounds=rounds, steps=steps, device=device
    )


def bench_loss(case: str, tp: int, options: Options) -> list[ResultRow]:
    """Compares the peak memory of head and loss, in chunks and for all tokens at once.

    Each is measured in new processes, as the increase during a forward and backward pass.
    """
    device = options.device
    if lacks_devices(device, tp):
        return []
    chunked, whole = (
        run_ranks(peak_of_loss, tp, in_chunks, device, world_size=tp, device=device)
        for in_chunks in (True, False)
    )
    return [row_of(case, "peak_mib", [(chunked / 2**20, whole / 2**20)], LOSS_BAR)]


def peak_of_loss(tp: int, in_chunks: bool, device_type: str) -> int:
    """Returns the peak increase in bytes, of the CUDA allocator or, on CPU, of this process. Runs
    on every rank."""
    device = own_device(device_type)
    mesh = init_device_mesh(device_type, (tp,)) if tp > 1 else None
    head = VocabParallelHead(LOSS_HIDDEN, LOSS_VOCAB, tp=ParallelContext(mesh, device=device))

    def step(tokens: int) -> None:
        x = torch.randn(1, tokens, LOSS_HIDDEN, device=device, requires_grad=True)
        labels = torch.randint(
            LOSS_VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0)
        ).to(device)
        if in_chunks:
            losses = head_cross_entropy(x, labels, head, chunk_tokens=LOSS_CHUNK)
        else:
            losses = vocab_parallel_cross_entropy(head(x), labels, mesh)
        losses.mean().backward()
        head.weight.grad = None

    step(8)  # Warmup, which loads libraries into memory.
    gc.collect()
    if device_type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step(LOSS_TOKENS)
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # Resets VmHWM, the peak memory of the process.
    before = _memory_bytes("VmRSS")
    step(LOSS_TOKENS)
    return _memory_bytes("VmHWM") - before


def _memory_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
