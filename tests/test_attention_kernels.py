"""Attention that never falls to a kernel of quadratic memory unasked: the table of kernels, its use
by the layers, the planner and the rules of a recipe, and the calls that only a GPU computes, with a
stand-in for its kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen

from parallel3d.config.attention_kernels import (
    AttentionCall,
    AttentionDevice,
    attention_errors,
    attention_kernel,
    kernel_of_recipe,
)
from parallel3d.config.recipe import ParallelConfig, Precision, Recipe, TrainConfig
from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError
from parallel3d.layers import context_parallel, fused_attention
from parallel3d.layers.attention import AttentionOptions, ParallelAttention
from parallel3d.layers.parameter import initial_weights
from parallel3d.layers.positions import PackedDocuments
from parallel3d.layers.sequence import SequencePart
from parallel3d.mesh import Axis
from parallel3d.models import shape_cards
from parallel3d.planner.model.named import card_config

CPU = AttentionDevice("cpu")
V100, A100, L4, H100 = (
    AttentionDevice("cuda", capability) for capability in ((7, 0), (8, 0), (8, 9), (9, 0))
)
H100_CUDNN = replace(H100, cudnn=91501)
OLD_TORCH = replace(A100, torch=(2, 11))
MI300X = AttentionDevice("cuda", (9, 4), is_rocm=True, cudnn=91501)
BF16 = AttentionCall(item_bytes=2, is_bf16=True, head_dim=128)
FP16, FP32, FP64 = (replace(BF16, is_bf16=False, item_bytes=item) for item in (2, 4, 8))
GROUPED = replace(BF16, is_grouped=True)
REPEATED = "repeated"
PIECES = "pieces"
MASKED = "masked"
WRITTEN = "written out"

# What a call takes on a device: the kernel, and what must be done for it.
TABLE: list[tuple[AttentionCall, AttentionDevice, str, set[str]]] = [
    (BF16, CPU, "cpu", set()),
    (replace(FP32, is_grouped=True, has_window=True), CPU, "cpu", set()),
    (GROUPED, A100, "flash", set()),
    (GROUPED, H100_CUDNN, "cudnn", set()),
    (GROUPED, replace(H100_CUDNN, cudnn=91500), "flash", set()),
    (GROUPED, MI300X, "flash", set()),
    (replace(BF16, head_dim=100), H100_CUDNN, "flash", set()),
    (replace(BF16, head_dim=288), A100, "efficient", set()),
    (replace(BF16, head_dim=300), A100, "math", {WRITTEN}),
    (replace(BF16, head_dim=208), L4, "efficient", set()),
    (replace(BF16, head_dim=208, trains=False), L4, "flash", set()),
    (BF16, V100, "math", {WRITTEN}),
    (replace(FP16, is_grouped=True), V100, "efficient", {REPEATED}),
    (replace(FP32, is_grouped=True), A100, "efficient", {REPEATED}),
    (replace(FP32, head_dim=50), A100, "math", {WRITTEN}),
    (FP64, H100, "math", {WRITTEN}),
    (replace(GROUPED, has_window=True), A100, "varlen", set()),
    (replace(BF16, has_documents=True), OLD_TORCH, "flash", {PIECES}),
    (replace(FP32, has_documents=True, is_grouped=True), CPU, "cpu", {PIECES}),
    (replace(GROUPED, has_window=True), OLD_TORCH, "efficient", {MASKED, REPEATED}),
    (replace(BF16, has_window=True, head_dim=100), A100, "math", {MASKED, WRITTEN}),
    (replace(FP32, has_window=True), H100_CUDNN, "efficient", {MASKED}),
    (replace(GROUPED, has_chunks=True), A100, "varlen", set()),
    (replace(GROUPED, has_chunks=True), OLD_TORCH, "efficient", {REPEATED}),
    (replace(FP32, has_chunks=True, has_window=True), H100, "efficient", set()),
    (replace(GROUPED, has_dropout=True), H100_CUDNN, "scores", {REPEATED, WRITTEN}),
    (replace(FP32, has_dropout=True), CPU, "scores", {WRITTEN}),
]


@pytest.mark.parametrize("call, device, name, ways", TABLE)
def test_each_call_has_its_kernel(
    call: AttentionCall, device: AttentionDevice, name: str, ways: set[str]
) -> None:
    kernel = attention_kernel(call, device)
    is_so = {
        REPEATED: kernel.repeats_heads,
        PIECES: kernel.in_pieces,
        MASKED: kernel.mask_bytes > 0,
        WRITTEN: kernel.score_bytes > 0,
    }
    found = {way for way, holds in is_so.items() if holds}
    assert kernel.name == name
    assert found == ways


def recipe_of(card: str = "llama3-8b", *, precision: Precision = "bf16", **model: object) -> Recipe:
    config = replace(card_config(card, shape_cards()[card]), **model)  # type: ignore[arg-type]
    seq_len = config.max_positions or 8192
    train = TrainConfig(
        steps=1,
        global_batch_size=2,
        seq_len=seq_len,
        precision=precision,
        device="cuda",
    )
    parallel = ParallelConfig(microbatch_size=2)
    return Recipe(
        model=config,
        train=train,
        parallel=parallel,
        run_dir="runs/x",
    )


def test_no_card_writes_out_its_scores() -> None:
    devices = (A100, H100_CUDNN, MI300X)
    for card, precision, device in product(shape_cards(), get_args(Precision), devices):
        recipe = recipe_of(card, precision=precision)
        assert kernel_of_recipe(recipe, device).score_bytes == 0, (card, precision, device)
        assert not attention_errors(recipe, device)


def test_what_a_gpu_would_write_out_is_refused_before_anything_starts() -> None:
    dropped = recipe_of(attention_dropout=0.1)
    # 2 sequences of 32 heads of 8,192^2 scores: 32 bytes each.
    assert attention_errors(dropped, H100) == [
        "model.attention_dropout = 0.1: attention dropout materializes seq_len^2 probabilities per "
        "head, 128.0 GiB per block and microbatch, but at most 8 GiB are allowed on a GPU; try "
        "model.attention_dropout=0, or a smaller parallel.microbatch_size"
    ]
    with pytest.raises(ConfigError, match=r"model.attention_dropout = 0.1: .* 128.0 GiB"):
        validate(dropped)
    validate(replace(dropped, train=replace(dropped.train, device="cpu")))
    longer = replace(dropped, train=replace(dropped.train, seq_len=2080))
    (line,) = attention_errors(longer, H100)
    assert "8.3 GiB per block" in line
    assert "a smaller parallel.microbatch_size" in line
    # 2 heads, 1 sequence
    assert attention_errors(replace(dropped, parallel=ParallelConfig(tp=16)), H100) == []


def test_a_precision_without_a_fused_kernel_is_refused_with_one_that_has_it() -> None:
    (line,) = attention_errors(recipe_of(precision="bf16"), V100)
    assert line.startswith("train.precision = bf16: no fused kernel")
    assert "try train.precision=fp16" in line
    assert attention_errors(recipe_of(precision="fp16"), V100) == []


B, S, D, H, K = 2, 37, 24, 6, 8


def layer_of(kv_heads: int, dtype: torch.dtype, **options: object) -> ParallelAttention:
    layer = ParallelAttention(D, H, kv_heads, options=AttentionOptions(head_dim=K, **options))  # type: ignore[arg-type]
    initial_weights(layer, seed=1)
    return layer.to(dtype)


def packed(*lengths: int) -> PackedDocuments:
    ids = torch.zeros(B * S)
    ids[torch.tensor(lengths).cumsum(0) - 1] = 1
    return PackedDocuments.ended_by(1, ids.view(B, S))


PACKED = packed(30, 7, 1, 36)


def results(layer: ParallelAttention, **arguments: object) -> list[Tensor]:
    """Returns the output of a layer and the gradients of its input and weights."""
    dtype = layer.q.weight.dtype
    generator = torch.Generator().manual_seed(2)
    x, gradient = torch.randn(2, B, S, D, generator=generator).to(dtype)
    x.requires_grad_()
    y = layer(x, **arguments)
    return [y, *torch.autograd.grad(y, [x, *layer.parameters()], gradient)]


def as_on(device: AttentionDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "device_of", lambda _: device)


@pytest.mark.parametrize("device", [V100, H100_CUDNN], ids=["V100", "H100 and cuDNN"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 5}],
    ids=["causal", "window"],
)
def test_a_layer_computes_the_same_as_on_every_gpu(
    device: AttentionDevice,
    options: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kv_heads, documents in product((6, 2), (None, PACKED)):
        layer = layer_of(kv_heads, torch.float32, **options)
        expected = results(layer, documents=documents)
        with monkeypatch.context() as patch:
            as_on(device, patch)
            torch.testing.assert_close(
                results(layer, documents=documents),
                expected,
                rtol=1e-4,
                atol=1e-5,
            )


def flash_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    **how: object,
) -> Tensor:
    """What CUDA's kernel computes: the queries of a sequence are the last of its keys. The query at
    i sees keys i - left to i + right, all on a side that is -1."""
    assert query.dtype == torch.bfloat16
    assert query.shape[-1] % 8 == 0
    assert query.is_contiguous()
    assert starts.dtype == key_starts.dtype == torch.int32
    assert starts[-1] == len(query)
    assert key_starts[-1] == len(key) == len(value)
    assert longest == starts.diff().max()
    assert longest_key == key_starts.diff().max()
    assert how["enable_gqa"] == (query.shape[1] != key.shape[1])
    (left, right), parts = how["window_size"], []  # type: ignore[misc]
    for (begin, end), (first, last) in zip(
        pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True
    ):
        places = torch.arange(last - first)
        distance = places[last - first - (end - begin) :].unsqueeze(1) - places
        most_left, most_right = (len(key) if side < 0 else side for side in (left, right))
        mask = (distance <= most_left) & (-distance <= most_right)
        q = query[begin:end].transpose(0, 1).float()
        k, v = (part[first:last].transpose(0, 1).float() for part in (key, value))
        y = F.scaled_dot_product_attention(
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            mask,
            enable_gqa=True,
        )
        parts.append(y.squeeze(0).transpose(0, 1).to(query.dtype))
    return torch.cat(parts)


def test_varlen_is_asked_for_the_documents_and_the_window_that_a_cpu_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Callable] = []
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda *a, **b: calls.append(flash_varlen) or flash_varlen(*a, **b)
    )
    for kv_heads, window, documents in product((6, 2), (None, 1, 5), (None, PACKED)):
        if window is None and documents is None:
            continue
        layer = layer_of(kv_heads, torch.bfloat16, window=window)
        expected = results(layer, documents=documents)
        with monkeypatch.context() as patch:
            as_on(H100_CUDNN, patch)
            found = results(layer, documents=documents)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert len(calls) == 10


@pytest.mark.parametrize(
    "device, dtype",
    [(CPU, torch.float32), (V100, torch.float32), (H100_CUDNN, torch.bfloat16)],
    ids=["CPU", "V100", "H100"],
)
@pytest.mark.parametrize("window", [None, 5])
def test_the_parts_of_a_sequence_are_the_whole_on_every_device(
    device: AttentionDevice,
    dtype: torch.dtype,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", flash_varlen)
    lengths = [30, 10, 1, 39]
    ends = torch.zeros(B * 40)
    ends[torch.tensor(lengths).cumsum(0) - 1] = 1
    packed = PackedDocuments.ended_by(1, ends.view(B, 40))
    for documents in (None, packed):
        q, k, v = (torch.randn(B, 40, heads, K).to(dtype) for heads in (H, 2, 2))
        layer = layer_of(2, dtype, window=window)
        whole = layer._attend(q, k, v, None, documents, None)
        kv = torch.stack((k, v), 2)
        monkeypatch.setattr(context_parallel, "gather_sequence", lambda *_, kv=kv, **__: kv)
        found = []
        for rank in range(2):
            layer.sequence_part = part = SequencePart(Axis(2, rank, None))
            own = (part.take(x, 1) for x in (q, k, v))
            with monkeypatch.context() as patch:
                as_on(device, patch)
                found.append(layer._attend(*own, None, documents, None))
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(part.joined(found, 1), whole, rtol=tolerance, atol=tolerance)


def test_a_deterministic_run_takes_no_kernel_of_cudnn() -> None:
    recipe = recipe_of()
    assert kernel_of_recipe(recipe, H100_CUDNN).name == "cudnn"
    exact = replace(recipe, train=replace(recipe.train, deterministic=True))
    assert kernel_of_recipe(exact, H100_CUDNN).name == "flash"
