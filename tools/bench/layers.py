"""`bench layers`: a transformer block, forward and backward, against torch's own tensor parallelism and one process;
and the peak memory of the loss in chunks against the whole.

The peer of a block is the same block in plain torch, laid out by `parallelize_module` (DTensor) as `bench step` lays it
out. Both start from the same weights, see the same activations, and must agree in their outputs and input gradients
before anything is timed. Two sizes: `hidden 64`, where overhead rules, and `hidden 1024`, where matrix products do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh

from parallel3d.config.recipe import ModelConfig
from parallel3d.errors import RankError
from parallel3d.layers.head import VocabParallelHead, head_cross_entropy
from parallel3d.layers.init import initial_weights
from parallel3d.layers.loss import vocab_parallel_cross_entropy
from parallel3d.layers.parameter import local_tensor, named_specs, set_fused_gradients
from parallel3d.mesh import Axis
from parallel3d.models.llama import Llama
from parallel3d.pipeline.stage import BlockRange, cut
from parallel3d.tools.bench.plain_llama import PlainLlama
from parallel3d.tools.bench.ranks import run_ranks
from parallel3d.tools.bench.report import (
    Options,
    ResultRow,
    Round,
    announced,
    chosen,
    rows_against_one_process,
    rows_against_peer,
)
from parallel3d.tools.bench.timing import time_in_turn
from parallel3d.tools.bench.torch_stack import apply_tp

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # input, output gradient -> output, input gradient

_AGREEMENT = 1e-4  # relative to the largest number
_MIDDLE = BlockRange(0, 1, is_first_stage=False, is_last_stage=False)  # a block without embedding and head


@dataclass(frozen=True, kw_only=True)
class BlockSize:
    """A block, the shape of the activations that it gets, and how long to measure the block."""

    name: str
    model: ModelConfig
    batch: int
    seq_len: int
    rounds: int
    steps: int  # in a round
    cpu_bar: float  # processor time over tp 2, ours / DTensor's


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """How many ranks share the block, and whether its activations are split along the sequence between the matrices."""

    name: str
    tp: int
    sequence_parallel: bool


SIZES = (
    BlockSize(
        name="hidden 64",
        model=ModelConfig(layers=1, hidden=64, heads=4, kv_heads=2, ffn_hidden=176, vocab=64),
        batch=1,
        seq_len=64,
        rounds=5,
        steps=30,
        cpu_bar=0.4,
    ),
    BlockSize(
        name="hidden 1024",
        model=ModelConfig(layers=1, hidden=1024, heads=16, kv_heads=8, ffn_hidden=2816, vocab=64),
        batch=1,
        seq_len=512,
        rounds=5,
        steps=3,
        cpu_bar=1.0,
    ),
)
_ALONE = BlockLayout(name="one process", tp=1, sequence_parallel=False)
LAYOUTS = (
    _ALONE,
    BlockLayout(name="tp 2", tp=2, sequence_parallel=False),
    BlockLayout(name="tp 2 sequence parallel", tp=2, sequence_parallel=True),
)
LOSS_VOCAB, LOSS_HIDDEN, LOSS_TOKENS, LOSS_CHUNK = 128_256, 64, 1024, 128
LOSS_BAR = 0.25


def bench_layers(options: Options) -> list[ResultRow]:
    """Measures every case that `options` names, and returns their rows. Rows against one process need the size's case
    `one process` among them."""
    blocks = {f"block of {size.name}: {layout.name}": (size, layout) for size in SIZES for layout in LAYOUTS}
    losses = {loss_case(tp): tp for tp in (1, 2)}
    rows: list[ResultRow] = []
    alone: dict[str, Sequence[Round]] = {}
    for name in announced(chosen([*blocks, *losses], options)):
        if name in losses:
            rows.append(bench_loss(losses[name]))
            continue
        size, layout = blocks[name]
        rounds = run_ranks(
            measure, size, layout, options.rounds or size.rounds, options.steps or size.steps, world_size=layout.tp
        )
        rows += rows_against_peer(name, rounds, size.cpu_bar if layout.tp > 1 else None)
        if layout is _ALONE:
            alone[size.name] = rounds
        elif size.name in alone:
            rows += rows_against_one_process(name, rounds, alone[size.name])
    return rows


def loss_case(tp: int) -> str:
    return f"loss of vocabulary {LOSS_VOCAB}, {LOSS_TOKENS} tokens in chunks of {LOSS_CHUNK}: tp {tp}"


def measure(size: BlockSize, layout: BlockLayout, rounds: int, steps: int) -> list[Round]:
    """Runs on every rank: checks both contestants against each other, then times them in turn."""
    tp = init_device_mesh("cpu", (layout.tp,)) if layout.tp > 1 else None
    weights = initial_weights(Llama(size.model, device="meta"), 0)
    ours = as_step(build_ours(size.model, tp, layout.sequence_parallel, weights))
    peer = as_step(build_peer(size.model, tp, layout.sequence_parallel, weights))
    shape = (2, size.batch, size.seq_len, size.model.hidden)
    x, grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if layout.sequence_parallel:
        x, grad = (part.chunk(layout.tp, dim=1)[dist.get_rank()].contiguous() for part in (x, grad))
    check_agreement(ours(x, grad), peer(x, grad))
    return time_in_turn(lambda _: ours(x, grad), lambda _: peer(x, grad), rounds=rounds, steps=steps)


def build_ours(model: ModelConfig, tp: DeviceMesh | None, sp: bool, weights: dict[str, Tensor]) -> nn.Module:
    block = cut(Llama(model, tp=tp, sequence_parallel=sp), _MIDDLE)
    set_fused_gradients(block, True)
    with torch.no_grad():
        for name, spec in named_specs(block):
            parameter = block.get_parameter(name)
            local_tensor(parameter).copy_(spec.local_part(weights[name], Axis.of(tp)))
    return block


def build_peer(model: ModelConfig, tp: DeviceMesh | None, sp: bool, weights: dict[str, Tensor]) -> nn.Module:
    block = PlainLlama(model)
    block.embed = block.norm = block.head = None
    block.load(weights)
    if tp is not None:
        apply_tp(block, tp, sp)
    return block


def as_step(block: nn.Module) -> Step:
    """Returns the forward and backward of a block; the weights' gradients add up, as over microbatches."""

    def step(x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = block(x)
        y.backward(grad)
        assert x.grad is not None
        return y.detach(), x.grad

    return step


def check_agreement(ours: tuple[Tensor, Tensor], peer: tuple[Tensor, Tensor]) -> None:
    """Raises RankError where outputs or gradients differ: the timings would compare two things."""
    for what, mine, other in zip(("output", "input gradient"), ours, peer, strict=True):
        error = ((mine - other).abs().max() / other.abs().max()).item()
        if not error <= _AGREEMENT:  # not: NaN differs from all
            raise RankError(f"our {what} and the peer's differ by {error:.2g} of the largest: not the same block")


def bench_loss(tp: int) -> ResultRow:
    """Compares the peak memory, above what was there before, of head and loss in chunks with that of all tokens at
    once. Forward and backward count, and each runs in a fresh process."""
    chunked, whole = (run_ranks(peak_of_loss, tp, in_chunks, world_size=tp) for in_chunks in (True, False))
    ratio = chunked / whole
    return ResultRow(
        case=loss_case(tp), ours=chunked / 2**20, peer=whole / 2**20, unit="peak_mib", ratio=ratio, bar=LOSS_BAR
    )


def peak_of_loss(tp: int, in_chunks: bool) -> int:
    """Runs on every rank, and returns rank 0's peak in bytes."""
    mesh = init_device_mesh("cpu", (tp,)) if tp > 1 else None
    head = VocabParallelHead(LOSS_HIDDEN, LOSS_VOCAB, tp=mesh)

    def step(tokens: int) -> None:
        x = torch.randn(1, tokens, LOSS_HIDDEN, requires_grad=True)
        labels = torch.randint(LOSS_VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))
        if in_chunks:
            losses = head_cross_entropy(x, labels, head, chunk_tokens=LOSS_CHUNK)
        else:
            losses = vocab_parallel_cross_entropy(head(x), labels, mesh)
        losses.mean().backward()
        head.weight.grad = None

    step(8)  # the libraries' own pages come into memory when first used
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's peak starts anew
    before = _memory_bytes("VmRSS")
    step(LOSS_TOKENS)
    return _memory_bytes("VmHWM") - before


def _memory_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
