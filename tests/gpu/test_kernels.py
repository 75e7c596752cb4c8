"""Layers by themselves: their kernels, memory, speed and sums, and the calibration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.config.recipe import ParallelConfig
from parallel3d.layers.attention import AttentionOptions, ParallelAttention
from parallel3d.layers.context_parallel import attend_chunks
from parallel3d.layers.experts import ParallelExperts, grouped
from parallel3d.layers.fused_attention import attend
from parallel3d.layers.parameter import ParallelContext, set_fused_gradients
from parallel3d.layers.sequence import SequencePart
from parallel3d.layers.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelHead,
    head_cross_entropy,
)
from parallel3d.layers.weight_gradients import add_product
from parallel3d.mesh import Axis
from parallel3d.tools.bench.layers import GPU_SIZES, measure
from parallel3d.tools.bench.report import rows_against_peer
from parallel3d.tools.bench.step import StepSize
from parallel3d.tools.clock import DeviceClock
from parallel3d.tools.local_ranks import run_ranks
from tests.gpu.conftest import Measure
from tests.gpu.training import kernels_of

GPU = torch.device("cuda")
CLOCK = DeviceClock(GPU)
GIB = 2**30
# Llama 3 8B
SEQ = 8192
HIDDEN = 4096
HEADS = 32
VOCAB = 128_256


def attention(dtype: torch.dtype, window: int | None = None) -> ParallelAttention:
    tp = ParallelContext(device=GPU, dtype=dtype)
    options = AttentionOptions(window=window)
    return ParallelAttention(HIDDEN, HEADS, HEADS // 4, tp=tp, options=options)


def hidden_states(dtype: torch.dtype) -> Tensor:
    return torch.randn(1, SEQ, HIDDEN, device=GPU, dtype=dtype, requires_grad=True)


def step(layer: ParallelAttention, x: Tensor) -> None:
    layer(x).sum().backward()
    for tensor in (x, *layer.parameters()):
        tensor.grad = None


def peak_gib(work: Callable[[], object]) -> float:
    """Returns the most that the allocator holds during `work`, beyond what it held before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return (torch.cuda.max_memory_allocated() - before) / GIB


@pytest.mark.parametrize("window", [None, SEQ // 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_never_writes_the_scores(
    dtype: torch.dtype, window: int | None, measured: Measure
) -> None:
    work = partial(step, attention(dtype, window), hidden_states(dtype))
    work()
    measured("ms", CLOCK.seconds(work, 3) * 1e3)
    assert measured("peak GiB", peak_gib(work)) <= 0.6 * dtype.itemsize
    names = {kernel.name for kernel in kernels_of(work)}
    assert not [name for name in names if "softmax" in name.lower()]


@pytest.mark.parametrize("cp", [2, 8])
def test_the_parts_of_a_sequence_cost_what_the_whole_costs(cp: int, measured: Measure) -> None:
    """Each rank of cp computes its part in turn, without communication."""
    tokens = 4 * SEQ
    shapes = [(1, tokens, heads, HIDDEN // HEADS) for heads in (HEADS, HEADS // 4, HEADS // 4)]
    q, k, v = (torch.randn(shape, device=GPU, dtype=torch.bfloat16) for shape in shapes)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    grad = torch.randn_like(q)

    def whole() -> Tensor:
        y = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, causal=True)
        y.backward(grad.transpose(1, 2))
        return y.detach().transpose(1, 2)

    def in_parts() -> Tensor:
        found = []
        for rank in range(cp):
            part = SequencePart(Axis(cp, rank, None))
            own = part.take(q, 1)
            how = {"causal": True, "window": None, "attend_block": None}
            y = attend_chunks(own, k, v, part, None, **how)  # type: ignore[arg-type]
            y.backward(part.take(grad, 1))
            found.append(y.detach())
        return part.joined(found, 1)

    last = 64  # queries, which see nearly all keys
    visible = torch.ones(last, tokens, device=GPU, dtype=torch.bool).tril(tokens - last)
    rows = (x.detach().transpose(1, 2).double() for x in (q[:, -last:], k, v))
    exact = F.scaled_dot_product_attention(*rows, visible, enable_gqa=True).transpose(1, 2)
    errors = [error(each()[:, -last:], exact) for each in (in_parts, whole)]
    assert measured("error / whole's", errors[0] / errors[1]) <= 1.2
    times_s = [CLOCK.seconds(each, 3) for each in (in_parts, whole)]
    assert measured("time / whole's", times_s[0] / times_s[1]) <= 1.15
    assert measured("peak GiB", peak_gib(in_parts)) <= 4.0
    assert not [kernel.name for kernel in kernels_of(in_parts) if "softmax" in kernel.name.lower()]


@pytest.mark.parametrize("size", GPU_SIZES, ids=lambda size: size.name)
def test_a_block_is_as_fast_as_compiled_plain_torch(size: StepSize, measured: Measure) -> None:
    arguments = (size, ParallelConfig(), 3, size.steps)
    rounds = run_ranks(measure, *arguments, world_size=1, device="cuda")
    _, wall = rows_against_peer(size.name, rounds, None)
    measured("ms", wall.ours * 1e3)
    assert size.wall_bar is not None
    assert measured("ratio", wall.ratio) <= size.wall_bar


def test_the_chunked_loss_is_exact_small_and_fast(measured: Measure) -> None:
    head = VocabParallelHead(HIDDEN, VOCAB, tp=ParallelContext(device=GPU, dtype=torch.bfloat16))
    set_fused_gradients(head, True)
    weight = head.weight
    weight.main_grad = torch.zeros(weight.shape, device=GPU)  # type: ignore[attr-defined]
    x = hidden_states(torch.bfloat16)
    labels = torch.randint(VOCAB, (1, SEQ), device=GPU)

    def loss() -> Tensor:
        x.grad = None
        mean = head_cross_entropy(x, labels, head, chunk_tokens=SEQ // 4).mean()
        mean.backward()
        return mean.detach()

    rows = weight.detach()
    total = torch.zeros((), device=GPU, dtype=torch.float64)
    for part, wanted in zip(x.detach()[0].chunk(8), labels[0].chunk(8), strict=True):
        total += F.cross_entropy(F.linear(part, rows).float(), wanted, reduction="sum")
    assert measured("loss / torch's", float(loss() / (total / SEQ))) == pytest.approx(1, rel=1e-4)
    assert measured("peak GiB", peak_gib(loss)) <= 3.0

    def matmuls() -> None:
        """Computes the logits of each chunk twice, and the gradients of input and weight."""
        for part in x.detach()[0].chunk(4):
            logits = F.linear(part, rows)
            F.linear(part, rows)
            logits @ rows
            logits.t() @ part

    matmuls()
    taken_s = CLOCK.seconds(loss, 3)
    matmuls_s = CLOCK.seconds(matmuls, 3)
    assert measured("time / its matmuls", taken_s / matmuls_s) <= 1.3


def error(found: Tensor, exact: Tensor) -> float:
    """Returns the largest error, relative to the largest exact number."""
    return float((found.double() - exact).abs().max() / exact.abs().max())


def test_gradients_are_summed_in_float32(measured: Measure) -> None:
    torch.manual_seed(0)
    side = 512
    total = torch.zeros(side, side, device=GPU)
    exact = torch.zeros(side, side, device=GPU, dtype=torch.float64)
    for grad, x in torch.randn(64, 2, 256, side, device=GPU, dtype=torch.bfloat16):
        add_product(total, grad, x)
        exact += grad.double().t() @ x.double()
    assert measured("weight", error(total, exact)) <= 1e-5
    embedding = VocabParallelEmbedding(16, 64, tp=ParallelContext(device=GPU, dtype=torch.bfloat16))
    set_fused_gradients(embedding, True)
    gradient = torch.rand(1, 4000, 64, device=GPU, dtype=torch.bfloat16)
    embedding(torch.full((1, 4000), 3, device=GPU)).backward(gradient)
    assert embedding.weight.grad is not None
    row = embedding.weight.grad[3]
    assert measured("embedding", error(row, gradient[0].double().sum(0))) <= 2.0**-8


def test_grouped_matmuls_are_exact_and_fast(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of Qwen3-30B-A3B, against a loop over its experts and a dense matmul. The last expert
    has no tokens."""
    tokens = 2 * SEQ
    hidden, ffn_hidden, count, per_token = 2048, 768, 128, 8
    tp = ParallelContext(device=GPU, dtype=torch.bfloat16)
    layer = ParallelExperts(hidden, ffn_hidden, count, per_token, tp=tp)
    layer.router.bias = torch.zeros(count)
    layer.router.bias[-1] = -9.0
    set_fused_gradients(layer, True)
    x, grad = torch.randn(2, 1, tokens, hidden, device=GPU, dtype=torch.bfloat16)
    x.requires_grad_()

    def step() -> list[Tensor]:
        for tensor in (x, *layer.parameters()):
            tensor.grad = None
        y = layer(x)
        y.backward(grad)
        gradients = [tensor.grad for tensor in (x, *layer.parameters())]
        return [y.detach(), *(each for each in gradients if each is not None)]

    found = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with monkeypatch.context() as patch:
        patch.setattr("parallel3d.layers.experts.uses_grouped", lambda x: False)
        looped = step()
    assert len(found) == len(looped) == 6
    errors = [error(each, exact.double()) for each, exact in zip(found, looped, strict=True)]
    assert measured("error / loop's", max(errors)) <= 2.0**-6

    counts = layer.router(x.detach()[0])[0].flatten().bincount(minlength=count)
    ends = counts.cumsum(0).int()
    gate = layer.experts.gate.detach().unflatten(0, (count, -1))
    rows = tokens * per_token
    wide = torch.randn(rows, hidden, device=GPU, dtype=torch.bfloat16)
    narrow = torch.randn(rows, ffn_hidden, device=GPU, dtype=torch.bfloat16)

    def by_group() -> None:
        """Computes an output, the gradient of its input, and that of the weights."""
        grouped(wide, gate.mT, ends)
        grouped(narrow, gate, ends)
        F.grouped_mm(narrow.mT, wide, offs=ends)

    def dense() -> None:
        wide @ gate[0].mT
        narrow @ gate[0]
        narrow.mT @ wide

    times_s = []
    for work in (dense, by_group):
        work()
        times_s.append(CLOCK.seconds(work, 3))
    assert measured("rate / dense's", times_s[0] / times_s[1]) >= 0.6
