"""A6 to A9 and A15: layers by themselves, their kernels, memory, speed and sums, and the calibration."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from parallel3d.config.recipe import ParallelConfig
from parallel3d.layers.attention import AttentionOptions, ParallelAttention
from parallel3d.layers.gradients import add_product
from parallel3d.layers.parameter import Placement, set_fused_gradients
from parallel3d.layers.vocabulary import VocabParallelEmbedding, VocabParallelHead, head_cross_entropy
from parallel3d.tools.bench.layers import GPU_SIZES, SIZES, measure
from parallel3d.tools.bench.report import rows_against_peer
from parallel3d.tools.clock import DeviceClock
from parallel3d.tools.gpu_check.findings import Findings
from parallel3d.tools.gpu_check.jobs import on_ranks
from parallel3d.tools.gpu_check.traces import kernels_of

_GIB = 2**30


def attention(findings: Findings) -> None:
    """A6: runs an attention layer of Llama 8B's shape forward and backward. No kernel may write the scores out: their
    softmax would be a kernel of its own, and they would take gigabytes."""
    seq, hidden = (8192, 4096) if findings.on_gpu else (256, 128)
    device, clock = torch.device(findings.device), DeviceClock(torch.device(findings.device))
    cases = {
        "causal, bf16": (torch.bfloat16, None),
        "causal, fp32": (torch.float32, None),
        "window, bf16": (torch.bfloat16, seq // 4),
    }
    for name, (dtype, window) in cases.items():
        layer = _attention_layer(hidden, dtype, device, window)
        step = partial(_step, layer, torch.randn(1, seq, hidden, device=device, dtype=dtype, requires_grad=True))
        step()
        peak = _peak_bytes(step, device)
        kernels = [kernel.name for kernel in kernels_of(step, findings.device)]
        scores = sorted({kernel for kernel in kernels if "softmax" in kernel.lower()})
        findings.note(f"{name}: kernels", ", ".join(sorted({k[:60] for k in kernels if _is_attention(k)})))
        findings.at_most(f"{name}: kernels that write scores", len(scores), 0, gpu_only=True)
        # Queries, keys, values, outputs, their gradients, and those of the weights: far less than the scores.
        findings.at_most(f"{name}: peak, GiB", peak / _GIB, 0.6 * dtype.itemsize, gpu_only=True)
        findings.note(f"{name}: ms", clock.seconds(step, 3) * 1e3)
    layer, draw = _attention_layer(hidden, torch.bfloat16, device, None), random.Random(0)
    x = torch.randn(1, seq, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    seen: list[float] = []
    unseen: list[float] = []
    for number in range(20):
        cuts = sorted({0, seq, *(draw.randrange(1, seq) for _ in range(15))})
        step = partial(_step, layer, x, [b - a for a, b in pairwise(cuts)])
        if number == 0:
            step()  # the layer's other kernels are loaded
        for times in (unseen, seen):
            start = time.perf_counter()
            step()
            _wait(device)
            times.append(time.perf_counter() - start)
    findings.note("packed documents: ms", median(seen) * 1e3)
    more = (median(unseen) - median(seen)) * 1e3
    findings.at_most("packed documents of new lengths: more ms", more, 25.0, gpu_only=True)


def _attention_layer(hidden: int, dtype: torch.dtype, device: torch.device, window: int | None) -> ParallelAttention:
    heads, placement = 32 if hidden > 1024 else 4, Placement(device=device, dtype=dtype)
    return ParallelAttention(hidden, heads, heads // 4, tp=placement, options=AttentionOptions(window=window))


def _step(layer: ParallelAttention, x: Tensor, lengths: list[int] | None = None) -> None:
    layer(x, lengths=lengths).sum().backward()
    for tensor in (x, *layer.parameters()):
        tensor.grad = None


def _is_attention(name: str) -> bool:
    return any(part in name.lower() for part in ("flash", "fmha", "cudnn", "attention", "sdpa", "flex", "softmax"))


def _peak_bytes(work: Callable[[], object], device: torch.device) -> float:
    """Returns the most that the allocator held during `work`, beyond what it held before; 0 on a CPU."""
    if device.type != "cuda":
        work()
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def block(findings: Findings) -> None:
    """A7: measures a block of Llama 8B, eager and compiled, beside compiled plain torch (`bench layers`)."""
    for size in GPU_SIZES if findings.on_gpu else SIZES[:1]:
        rounds = on_ranks(findings, measure, size, ParallelConfig(), 3, size.steps)
        _, wall = rows_against_peer(size.name, rounds, None)
        findings.note(f"{size.name}: ms", wall.ours * 1e3)
        findings.note(f"{size.name}: peer, ms", wall.peer * 1e3)
        tokens, weights = size.seq_len, size.model.block_weights
        scores = size.seq_len / 2 * size.model.query_hidden * 2
        findings.note(f"{size.name}: TFLOP/s", 6 * tokens * (weights + scores) / wall.ours / 1e12)
        findings.at_most(f"{size.name}: ratio", wall.ratio, size.wall_bar or 2.0, gpu_only=True)


def head_and_loss(findings: Findings) -> None:
    """A8: computes head and loss of Llama 3's vocabulary in chunks, beside torch's own in float32, and its products."""
    device, clock = torch.device(findings.device), DeviceClock(torch.device(findings.device))
    tokens, hidden, vocab = (8192, 4096, 128_256) if findings.on_gpu else (64, 32, 1001)
    head = VocabParallelHead(hidden, vocab, tp=Placement(device=device, dtype=torch.bfloat16))
    set_fused_gradients(head, True)
    head.weight.main_grad = torch.zeros(head.weight.shape, device=device)  # type: ignore[attr-defined]  # as in training
    x = torch.randn(1, tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocab, (1, tokens), device=device)

    def step() -> Tensor:
        x.grad = None
        loss = head_cross_entropy(x, labels, head, chunk_tokens=tokens // 4).mean()
        loss.backward()
        return loss.detach()

    ours, parts = step(), 8
    with torch.no_grad():  # torch's own, a part of the tokens after the other: the logits are large
        pairs = zip(x[0].chunk(parts), labels[0].chunk(parts), strict=True)
        peer = sum(F.cross_entropy(F.linear(a, head.weight).float(), b, reduction="sum").double() for a, b in pairs)
    findings.at_most("loss beside torch's", abs(float(ours) / float(peer / tokens) - 1), 1e-4)
    findings.at_most("peak, GiB", _peak_bytes(step, device) / _GIB, 3.0)
    rows = head.weight.detach()

    def products() -> None:
        """Computes each chunk's products: forward, once more in the backward, the input's gradient and the weight's."""
        part = x.detach()[0, : tokens // 4]
        for _ in range(4):
            logits = F.linear(part, rows)
            F.linear(part, rows)
            logits @ rows
            logits.t() @ part

    products()
    taken, bare = clock.seconds(step, 3), clock.seconds(products, 3)
    findings.note("ms", taken * 1e3)
    findings.at_most("time over its products", taken / bare, 1.3, gpu_only=True)
    gpt = 50_257 if findings.on_gpu else 1001
    times = []
    for multiple in (1, 64):
        padded = VocabParallelHead(hidden, gpt, pad_to_multiple_of=multiple, tp=head.placement)
        few = labels % gpt
        work = partial(head_cross_entropy, x.detach(), few, padded, chunk_tokens=tokens)
        work()
        times.append(clock.seconds(work, 3))
    findings.note("vocabulary of 50,257 over one padded", times[0] / times[1])


def sums(findings: Findings) -> None:
    """A9: compares gradients that add up over microbatches and tokens with the same sums in float64."""
    device, generator = torch.device(findings.device), torch.Generator().manual_seed(0)
    side = 512 if findings.on_gpu else 64
    pairs = [torch.randn(2, 256, side, generator=generator).to(device, torch.bfloat16) for _ in range(64)]
    exact = sum(grad.double().t() @ x.double() for grad, x in pairs)
    total, rounded = (torch.zeros(side, side, device=device) for _ in range(2))
    for grad, x in pairs:
        add_product(total, grad, x)
        rounded.add_(grad.t() @ x)  # each product rounded to bf16
    findings.note("weight: error, products rounded to bf16", _error(rounded, exact))
    findings.at_most("weight: error", _error(total, exact), 1e-5 if findings.on_gpu else 2e-3)
    embedding = VocabParallelEmbedding(16, 64, tp=Placement(device=device, dtype=torch.bfloat16))
    set_fused_gradients(embedding, True)
    gradient = torch.rand(1, 4000, 64, generator=generator).to(device, torch.bfloat16)
    embedding(torch.full((1, 4000), 3, device=device)).backward(gradient)
    assert embedding.weight.grad is not None
    found = embedding.weight.grad[3]
    findings.at_most("embedding: error", _error(found, gradient[0].double().sum(0)), 2.0**-8)


def _error(found: Tensor, exact: Tensor | int) -> float:
    """Returns the largest error, relative to the largest exact number."""
    assert isinstance(exact, Tensor)
    return float((found.double() - exact).abs().max() / exact.abs().max())


def calibration(findings: Findings) -> None:
    """A15: runs `parallel3d-plan calibrate --quick`, and compares its rates of attention with a plain measurement."""
    with tempfile.TemporaryDirectory(prefix="parallel3d-gpu-check-") as folder:
        path = Path(folder) / "measured.yaml"
        options = ["--quick", "--ranks", "1", "--device", findings.device, "-o", str(path)]
        subprocess.run([sys.executable, "-m", "parallel3d.tools.plan", "calibrate", *options], check=True)
        process = yaml.safe_load(path.read_text())["measured"]["processes"][1]
    device = torch.device(findings.device)
    for length in (2048, 8192) if findings.on_gpu else (256,):
        depth = 128 if findings.on_gpu else 64
        q, k, v = (torch.randn(1, 32, length, depth, device=device, dtype=torch.bfloat16) for _ in range(3))
        work = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        work()
        rate = 0.5 * 4 * 32 * length**2 * depth / DeviceClock(device).seconds(work, 10)
        rows = process["attention"]["bf16"]["forward"]
        found = next(rate for keys, size, rate in rows if (keys, size) == (length, depth))
        findings.note(f"{length} keys: TFLOP/s", rate / 1e12)
        findings.at_least(f"{length} keys: calibrated share", found / rate, 0.6, gpu_only=True)
