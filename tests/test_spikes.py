"""Spikes: what stands out of the steps before, whatever the window holds already."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parallel3d.checkpoint.manifest import SpikeHistory
from parallel3d.config.recipe import TrainConfig
from parallel3d.training.guard import find_spike

RULE = TrainConfig(steps=1000, global_batch_size=8, seq_len=8)


def history_of(losses: list[float], norms: list[float]) -> SpikeHistory:
    history = SpikeHistory()
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        _, history = find_spike(history, step, loss, norm, RULE)
    return history


def why(history: SpikeHistory, loss: float, norm: float) -> str | None:
    return find_spike(history, 1000, loss, norm, RULE)[0]


def noise(middle: float, share: float, count: int) -> list[float]:
    draw = random.Random(0)
    return [draw.gauss(middle, share * middle) for _ in range(count)]


QUIET = history_of(noise(2.5, 0.01, 200), noise(0.4, 0.1, 200))


def test_a_loss_or_a_norm_that_stands_out_is_a_spike_and_is_told_with_the_median() -> None:
    assert QUIET.spikes == 0
    assert len(QUIET.losses) == len(QUIET.grad_norms) == RULE.spike_window
    assert why(QUIET, 2.7, 0.9) is None
    assert why(QUIET, 3.0, 0.4) == "loss 3.0000 against a median of 2.4986 over the last 128 steps"
    both = why(QUIET, 3.0, 2.0)
    assert both is not None
    assert "loss 3.0000" in both
    assert "and gradient norm 2.0000 against a median of 0.3" in both


def test_nothing_is_judged_before_half_of_the_window_and_spikes_in_it_do_not_move_it() -> None:
    assert why(history_of([2.5] * 63, [0.4] * 63), 9.0, 9.0) is None
    assert why(history_of([2.5] * 64, [0.4] * 64), 9.0, 9.0) is not None
    spiked = history_of([*noise(2.5, 0.01, 100), *[9.0] * 28], [0.4] * 128)
    assert spiked.spikes == 28
    assert why(spiked, 3.0, 0.4) is not None
    risen = history_of([*[2.5] * 128, *[9.0] * 128], [0.4] * 256)
    assert 60 < risen.spikes < 70  # the level is the new one when it fills half of the window


@pytest.mark.parametrize("on_spike, expected", [("skip", [1, 2, 1, 2]), ("rollback", [1, 2, 3, 4])])
def test_spikes_are_in_a_row_where_nothing_or_for_a_rollback_less_than_a_window_lies_between(
    on_spike: str, expected: list[int]
) -> None:
    rule = replace(RULE, on_spike=on_spike)
    counts = []
    history = QUIET
    for step, loss in enumerate([9.0, 9.0, 2.5, 9.0, 9.0], 201):
        found, history = find_spike(history, step, loss, 0.4, rule)
        if found:
            counts.append(history.in_a_row)
    assert counts == expected
    assert find_spike(history, 205 + 129, 9.0, 0.4, rule)[1].in_a_row == 1
