"""The order of samples: a shuffle of each epoch that is arithmetic, not state."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.data.order import window_order

seeds = st.integers(-(2**70), 2**70)
sizes = st.one_of(st.integers(1, 40), st.integers(1, 5_000))


@given(sizes, seeds, st.integers(0, 10**6))
def test_each_epoch_holds_every_window_once(windows: int, seed: int, epoch: int) -> None:
    samples = np.arange(epoch * windows, (epoch + 1) * windows)
    order = window_order(samples, windows=windows, seed=seed)
    assert np.array_equal(np.sort(order), np.arange(windows))


@given(sizes, seeds, st.lists(st.integers(0, 10**9), min_size=1, max_size=50))
def test_a_sample_has_the_same_window_whoever_asks_and_beside_whatever(
    windows: int, seed: int, samples: list[int]
) -> None:
    together = window_order(np.array(samples), windows=windows, seed=seed)
    for sample, window in zip(samples, together, strict=True):
        alone = window_order(np.array([sample]), windows=windows, seed=seed)
        assert alone == window


@given(st.integers(1, 10**13), seeds)
def test_a_corpus_of_any_size_costs_the_same(windows: int, seed: int) -> None:
    order = window_order(np.arange(min(windows, 100)), windows=windows, seed=seed)
    assert order.dtype == np.int64
    assert ((order >= 0) & (order < windows)).all()
    assert len(np.unique(order)) == len(order)


def test_seeds_and_epochs_differ() -> None:
    samples = np.arange(200)
    orders = [window_order(samples, windows=100, seed=seed) for seed in range(20)]
    epochs = {tuple(epoch) for order in orders for epoch in order.reshape(2, 100)}
    assert len(epochs) == 40


def test_the_order_is_pinned_because_a_resumed_run_depends_on_it() -> None:
    first, second = window_order(np.arange(20), windows=10, seed=0).reshape(2, 10)
    assert "".join(map(str, first)) == "9745130268"
    assert "".join(map(str, second)) == "0451289736"
