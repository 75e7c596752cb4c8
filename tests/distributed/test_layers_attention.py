"""Attention over tp against plain torch with the scores written out: every option, dtype and
gradient mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from parallel3d.config.recipe import RopeScaling
from parallel3d.layers.attention import AttentionOptions, ParallelAttention
from parallel3d.layers.positions import PackedDocuments, RotaryEmbedding, stretched
from tests.distributed.layer_cases import BF16, F32, F64, Case, Weights, check, check_all, tp_mesh

B, S, D, H, K = 2, 8, 16, 8, 4
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [5, 5, 6, 6, 6, 6, 6, 6]])
ENDS = F.pad(DOCUMENTS[:, 1:] != DOCUMENTS[:, :-1], (0, 1))
NOT_THIRD = (torch.arange(S) != 2).expand(B, 1, S, S)  # nobody sees the third token
PACKED = PackedDocuments.ended_by(1, ENDS.int())


def rotate(
    x: Tensor,
    rotary: RotaryEmbedding,
    positions: Tensor,
) -> Tensor:
    """Turns x [B, S, H, K], each pair (i, i + K / 2) as a complex number."""
    frequencies = rotary.theta ** (-torch.arange(0, K, 2) / K)
    magnitude = 1.0
    if rotary.scaling is not None:
        frequencies, magnitude = stretched(frequencies, rotary.theta, rotary.scaling)
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
    cos, sin = ((f(angles) * magnitude).to(x.dtype) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(
    name: str, kv_heads: int, *, rotary: RotaryEmbedding | None = None, **options: Any
) -> Case:
    packed = options.pop("packed", False)
    mask = options.pop("mask", None)
    window = options.get("window")
    causal = options.get("causal", True)
    positions = PACKED.positions if packed else torch.arange(S).expand(B, S)

    def reference(w: Weights, x: Tensor) -> Tensor:
        def project(part: str) -> Tensor:
            y = F.linear(x, w[f"{part}.weight"], w.get(f"{part}.bias")).unflatten(-1, (-1, K))
            norm = w.get(f"{part}_norm.weight")
            if norm is None:
                return y
            return F.rms_norm(y, (K,), norm, 1e-5)

        q = project("q")
        k = project("k")
        v = project("v")
        if rotary is not None:
            q = rotate(q, rotary, positions)
            k = rotate(k, rotary, positions)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(H // kv_heads, dim=1) for part in (k, v))
        scores = (q @ k.transpose(-1, -2) * K**-0.5).to(torch.promote_types(x.dtype, F32))
        i = torch.arange(S).unsqueeze(1)
        j = torch.arange(scores.shape[-1])
        hidden = (j > i) & causal
        if window is not None:
            hidden = hidden | ((i - j).abs() >= window)
        if mask is not None:
            hidden = hidden | ~mask
        if packed:
            hidden = hidden | (DOCUMENTS.unsqueeze(2) != DOCUMENTS.unsqueeze(1)).unsqueeze(1)
        y = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).to(x.dtype) @ v
        return F.linear(y.transpose(1, 2).flatten(-2), w["o.weight"], w.get("o.bias"))

    arguments: dict[str, Any] = {"documents": PACKED} if packed else {}
    if mask is not None:
        arguments["mask"] = mask
    chosen = AttentionOptions(head_dim=K, **options)
    build = partial(ParallelAttention, D, H, kv_heads, rotary=rotary, options=chosen)
    return Case(
        name=name,
        build=build,
        reference=reference,
        shapes=((B, S, D),),
        arguments=arguments,
    )


PLAIN = RotaryEmbedding(K, theta=100.0)
LLAMA, YARN = (
    RotaryEmbedding(
        K, theta=100.0, scaling=RopeScaling(type=kind, factor=factor, original_max_positions=64)
    )
    for kind, factor in (("llama3", 8.0), ("yarn", 4.0))
)
CASES = {
    "heads": [
        attention("multi-head", 8, rotary=PLAIN),
        attention("grouped, recomputed, without positions", 4, recompute=True),
        attention(
            "two kv heads, q/k norm, biases",
            2,
            rotary=PLAIN,
            qk_norm=True,
            bias=True,
            output_bias=True,
        ),
        attention("multi-query, llama 3's rotary", 1, rotary=LLAMA, bias=True),
    ],
    "masks": [
        attention("sliding window, yarn", 4, rotary=YARN, window=3),
        attention("documents", 2, rotary=PLAIN, packed=True, recompute=True),
        attention("documents, window", 8, packed=True, window=3),
        attention(
            "bidirectional, window",
            2,
            rotary=PLAIN,
            causal=False,
            window=3,
            recompute=True,
        ),
        attention("a mask, bidirectional", 2, mask=NOT_THIRD, causal=False),
    ],
}


def check_cases(group: str) -> None:
    check_all(CASES[group], dtypes=(F64,))
    tp = tp_mesh()
    for case in CASES[group]:
        check(case, tp, F32, True, False)
        check(case, tp, BF16, False, True)


def refuse() -> None:
    tp = tp_mesh()
    layer = ParallelAttention(16, 8, 8, tp=tp)
    x = torch.zeros(2, 8, 16)
    with pytest.raises(ValueError, match=r"shape \[1, 8\]: must match x of shape \[2, 8\]"):
        layer(x, documents=PackedDocuments.ended_by(1, torch.zeros(1, 8)))
    with pytest.raises(ValueError, match="heads = 6, kv_heads = 6, tp = 4"):
        ParallelAttention(24, 6, 6, tp=tp)
    with pytest.raises(
        ValueError, match="heads = 12, kv_heads = 6, tp = 4.* must divide the other"
    ):
        ParallelAttention(24, 12, 6, tp=tp)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("group", CASES)
def test_attention_is_plain_torchs_whatever_tp(
    world: Callable,
    size: int,
    group: str,
) -> None:
    world(size).run(check_cases, group)


def test_heads_that_do_not_spread_are_refused(world: Callable) -> None:
    world(4).run(refuse)
