"""Attention over the parts of a sequence beside the same layer on one rank: outputs and gradients,
what is sent, what stays in memory, and who computes how much."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from parallel3d.config.recipe import ParallelConfig
from parallel3d.layers import attention, context_parallel
from parallel3d.layers.attention import AttentionOptions, ParallelAttention
from parallel3d.layers.collectives import all_reduce
from parallel3d.layers.parameter import ParallelContext, initialize
from parallel3d.layers.positions import PackedDocuments, RotaryEmbedding
from parallel3d.layers.sequence import SequencePart
from parallel3d.mesh import Axis
from tests.distributed.training_cases import GROUPED, make_recipe, make_trainer, own_batch

K = 4  # head dim
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    chunk: int  # tokens; a rank has two chunks
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    dtype: torch.dtype = torch.float32
    packed: bool = False
    options: dict[str, Any] = field(default_factory=dict)


CASES = st.builds(
    Case,
    chunk=st.integers(1, 70),
    batch=st.integers(1, 2),
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(list(TOLERANCE)),
    packed=st.booleans(),
    options=st.fixed_dictionaries(
        {},
        optional={
            "window": st.integers(1, 100),
            "causal": st.booleans(),
            "recompute": st.booleans(),
            "qk_norm": st.booleans(),
        },
    ),
)


def cp_axis() -> Axis:
    return Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def layer_of(case: Case, cp: Axis | None) -> ParallelAttention:
    layer = ParallelAttention(
        case.heads * K,
        case.heads,
        case.kv_heads,
        rotary=RotaryEmbedding(K, theta=100.0),
        tp=ParallelContext(cp=cp),
        options=AttentionOptions(**case.options),
    )
    initialize(layer, 0, "cpu")
    return layer.to(case.dtype)


def inputs_of(case: Case, cp: int) -> tuple[Tensor, Tensor, PackedDocuments | None]:
    """Returns x, the gradient of y, and the documents, whose borders are anywhere."""
    seq = 2 * cp * case.chunk
    generator = torch.Generator().manual_seed(case.chunk)
    shape = (case.batch, seq, case.heads * K)
    x, grad = torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(case.dtype)
    ends = torch.rand(case.batch, seq, generator=generator) < 0.05
    return x, grad, PackedDocuments.ended_by(1, ends.int()) if case.packed else None


def error(ours: Tensor, reference: Tensor) -> float:
    return ((ours - reference).abs().max() / reference.abs().max().clamp(min=1.0)).item()


def errors(case: Case) -> dict[str, float]:
    axis = cp_axis()
    part = SequencePart(axis)
    x, grad, documents = inputs_of(case, axis.size)
    alone, ours = layer_of(case, None), layer_of(case, axis)
    whole_x = x.clone().requires_grad_()
    whole_y = alone(whole_x, documents=documents)
    whole_y.backward(grad)
    own_x = part.take(x, 1).requires_grad_()
    y = ours(own_x, documents=documents)
    y.backward(part.take(grad, 1))
    assert whole_x.grad is not None
    assert own_x.grad is not None
    found = {
        "y": error(y, part.take(whole_y, 1)),
        "x": error(own_x.grad, part.take(whole_x.grad, 1)),
    }
    for (name, mine), reference in zip(ours.named_parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None
        assert reference.grad is not None
        found[name] = error(all_reduce(mine.grad, axis), reference.grad)
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_a_rank_has_its_part_of_the_whole_attention(world: Callable, cp: int) -> None:
    pool = world(cp)

    @settings(
        max_examples=25,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(CASES)
    def check(case: Case) -> None:
        for found in pool.run(errors, case):
            assert max(found.values()) < TOLERANCE[case.dtype], found

    check()
    for options in ({}, {"window": 300}):
        several_blocks = Case(chunk=300, options=options)
        for found in pool.run(errors, several_blocks):
            assert max(found.values()) < TOLERANCE[torch.float32], found


def leaks() -> list[float]:
    """Returns the largest gradient of each document's output by all other documents' tokens."""
    axis = cp_axis()
    part = SequencePart(axis)
    case = Case(chunk=16, packed=True)
    x, grad, documents = inputs_of(case, axis.size)
    assert documents is not None
    layer = layer_of(case, axis)
    owner = torch.arange(len(documents.lengths)).repeat_interleave(torch.tensor(documents.lengths))
    own = part.take(owner.view(1, -1), 1)
    found = []
    for document in range(len(documents.lengths)):
        own_x = part.take(x, 1).requires_grad_()
        y = layer(own_x, documents=documents)
        y.backward(part.take(grad, 1) * (own == document).unsqueeze(-1))
        assert own_x.grad is not None
        others = own_x.grad * (own != document).unsqueeze(-1)
        found.append(others.abs().max().item())
    return found


def test_no_document_sees_another(world: Callable) -> None:
    for found in world(2).run(leaks):
        assert len(found) > 2
        assert set(found) == {0.0}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the collectives of the attention, and the numbers that this rank sends in them."""
    counts: Counter[str] = Counter()

    def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
        counts.update(
            gathers=1,
            numbers=(axis.size - 1) * x.numel(),
        )
        return GATHER(x, axis, dim=dim)

    def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
        counts.update(
            scatters=1,
            numbers=(axis.size - 1) * x.numel() // axis.size,
        )
        return REDUCE_SCATTER(x, axis, dim=dim)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(context_parallel, "gather", gather))
        stack.enter_context(mock.patch.object(context_parallel, "reduce_scatter", reduce_scatter))
        yield counts


GATHER, REDUCE_SCATTER = context_parallel.gather, context_parallel.reduce_scatter


def sent(parallel: ParallelConfig) -> Counter[str]:
    recipe = make_recipe(GROUPED, parallel)
    trainer = make_trainer(recipe)
    with counting() as counts:
        trainer.train_step(own_batch(recipe, 0))
    return counts


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_keys_and_values_are_sent_three_times(world: Callable, recompute: Any) -> None:
    for tp in (1, 2):
        parallel = ParallelConfig(
            cp=2,
            tp=tp,
            recompute=recompute,
            microbatch_size=2,
        )
        recipe = make_recipe(GROUPED, parallel)
        times = GROUPED.layers * recipe.microbatches
        tokens = parallel.microbatch_size * recipe.train.seq_len // parallel.cp
        kv = 2 * max(GROUPED.key_value_heads // tp, 1) * GROUPED.head_size
        for counts in world(parallel.world_size).run(sent, parallel):
            assert counts["gathers"] == 2 * times
            assert counts["scatters"] == times
            assert counts["numbers"] == 3 * (parallel.cp - 1) * tokens * kv * times


def alive_between_passes(recompute: Any) -> list[int]:
    """Returns the bytes that each gathered tensor has between forward and backward."""
    recipe = make_recipe(GROUPED, ParallelConfig(cp=2, recompute=recompute))
    trainer = make_trainer(recipe)
    found: list[weakref.ref[Tensor]] = []

    def keep(*args: Any, **kwargs: Any) -> Tensor:
        whole = GATHER_WHOLE(*args, **kwargs)
        found.append(weakref.ref(whole))
        return whole

    (stage,) = trainer.stages
    with mock.patch.object(context_parallel, "gather_sequence", keep):
        output = stage.module(trainer.sequence_part.take(own_batch(recipe, 0).inputs[0], 1))
    gc.collect()
    tensors = [ref() for ref in found]
    assert output.requires_grad
    return [0 if each is None else each.untyped_storage().nbytes() for each in tensors]


GATHER_WHOLE = context_parallel.gather_sequence


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gathered_keys_do_not_stay_until_the_backward(world: Callable, recompute: str) -> None:
    for found in world(2).run(alive_between_passes, recompute):
        assert found == [0] * GROUPED.layers


def scores_computed() -> int:
    """Returns the number of scores of a rank, without those that a mask hides in a block."""
    axis = cp_axis()
    case = Case(chunk=512, heads=1)
    x, _, _ = inputs_of(case, axis.size)
    computed = 0

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal computed
        computed += q.shape[2] * k.shape[2]
        return F.scaled_dot_product_attention(q, k, v)

    with mock.patch.object(attention, "attend", attend), torch.no_grad():
        layer_of(case, axis)(SequencePart(axis).take(x, 1))
    return computed


def test_ranks_compute_the_same_number_of_scores(world: Callable) -> None:
    found = world(4).run(scores_computed)
    assert max(found) <= 1.01 * min(found)
    whole = (8 * 512) ** 2
    assert sum(found) == pytest.approx(whole / 2, rel=0.07)  # blocks of 256 on the diagonal


def refused() -> str:
    layer = layer_of(Case(chunk=4), cp_axis())
    with pytest.raises(ValueError, match="pass documents instead, or use cp = 1"):
        layer(torch.zeros(1, 8, 8), mask=torch.ones(1, 1, 16, 16, dtype=torch.bool))
    with pytest.raises(ValueError, match="2 cp = 4 chunks; use a multiple of 4"):
        layer(torch.zeros(1, 7, 8))
    return "refused"


def test_a_mask_and_an_uneven_sequence_are_refused(world: Callable) -> None:
    assert world(2).run(refused) == ["refused"] * 2
