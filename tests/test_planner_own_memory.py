"""The memory model of this project's own program, piece by piece; `test_plan_verify` holds it against dry runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.layers.activations import BlockActivations, BlockRecompute
from parallel3d.planner.own.moment import total
from parallel3d.planner.own.moments import Moments
from parallel3d.planner.own.rank import Rank
from parallel3d.planner.own.states import Walk, fullest_states, states
from parallel3d.planner.own.work import BlockSizes, backward_work, forward_work, put_off_bytes, weights_work
from parallel3d.tools.verify.command import run_of_recipe
from parallel3d.tools.verify.layouts import random_layouts

BLOCK = BlockActivations(
    batch=2, seq=512, hidden=1024, heads=16, kv_heads=4, ffn_hidden=4096, item_bytes=2, tp=2, dropout=True
)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "block", [BLOCK, replace(BLOCK, sequence_parallel=True), replace(BLOCK, gated=False, layer_norm=True, tp=1)]
)
def test_a_backward_frees_what_the_forward_has_kept(block: BlockActivations, recompute: BlockRecompute) -> None:
    sizes = BlockSizes.of(block, kv_weight=1024 * 256 // block.tp, biases=False)
    kept = block.bytes(recompute)
    own_input = sizes.b  # there before the forward; its output, as large, is there after it
    assert forward_work(sizes, recompute).left == kept - own_input + sizes.b if recompute != "full" else sizes.b
    for weights, made in (("dropped", 0), ("in place", 0), ("kept", sizes.products)):
        assert backward_work(sizes, recompute, weights).left == made - kept  # type: ignore[arg-type]


def test_the_first_half_of_a_backward_leaves_each_products_two_factors() -> None:
    """q, k, v: their input and three gradients; the output's: its input and gradient; likewise of the MLP."""
    block = replace(BLOCK, tp=1, dropout=False)
    sizes = BlockSizes.of(block, kv_weight=1024 * 256, biases=False)
    b, a, g, f = sizes.b, sizes.a, sizes.g, sizes.f
    assert put_off_bytes(sizes, "none") == (b + a + 2 * g) + (a + b) + (b + 2 * f) + (f + b)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("block", [replace(BLOCK, sequence_parallel=True), replace(BLOCK, gated=False, tp=1)])
def test_the_second_half_of_a_backward_uses_up_what_the_first_has_put_off(
    block: BlockActivations, recompute: BlockRecompute
) -> None:
    sizes = BlockSizes.of(block, kv_weight=1024 * 256 // block.tp, biases=False)
    for weights, made in (("dropped", 0), ("in place", 0), ("kept", sizes.products)):
        assert weights_work(sizes, weights).left == made - put_off_bytes(sizes, recompute)  # type: ignore[arg-type]


def test_one_forward_one_backward_fills_up_to_its_place() -> None:
    walk = Walk(schedule="1f1b", pp=4, rank=1, microbatches=8, virtual_stages=1, alike=(0,))
    alive = [state.of("alive")[0] for state in states(walk)]
    assert max(alive) == 3 and alive[:4] == [0, 1, 2, 3]
    # Received: three posted from before and three from behind; of them up to three are inputs of what is alive.
    assert max(state.waiting for some in fullest_states(walk) for state in some) <= 6 + 3 + 2 * 4


def test_no_state_that_is_left_out_holds_more() -> None:
    """Against every action of the schedule, in layouts of every kind."""
    for recipe, rank in random_layouts(24, seed=10):
        moments = Moments(Rank(run_of_recipe(recipe), rank))
        of_each = (moment for state in states(moments.rank.walk) for moment in moments.of(state))
        of_all = max(map(total, (*of_each, *moments.at_the_end())))
        assert total(moments.fullest()) == pytest.approx(of_all, rel=1e-9), recipe.parallel
