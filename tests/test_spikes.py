"""Spikes: what stands out of the steps before, whatever the window holds already."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parallel3d.config.recipe import TrainConfig
from parallel3d.spikes import SpikeHistory

RULE = TrainConfig(steps=1000, global_batch_size=8, seq_len=8)


def history_of(losses: list[float], norms: list[float], rule: TrainConfig = RULE) -> SpikeHistory:
    history = SpikeHistory()
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        is_spike = history.judge(loss, norm, rule) is not None
        history = history.after(step, loss, norm, rule, is_spike=is_spike)
    return history


def noise(middle: float, share: float, count: int) -> list[float]:
    draw = random.Random(0)
    return [draw.gauss(middle, share * middle) for _ in range(count)]


QUIET = history_of(noise(2.5, 0.01, 200), noise(0.4, 0.1, 200))


def test_a_loss_or_a_norm_that_stands_out_is_a_spike_and_is_told_with_the_median() -> None:
    assert QUIET.spikes == 0 and len(QUIET.losses) == len(QUIET.grad_norms) == RULE.spike_window
    assert QUIET.judge(2.7, 0.9, RULE) is None
    assert QUIET.judge(3.0, 0.4, RULE) == "loss 3.0000 against a median of 2.4986 in the 128 steps before"
    both = QUIET.judge(3.0, 2.0, RULE)
    assert both is not None and "loss 3.0000" in both and "and gradient norm 2.0000 against a median of 0.3" in both


def test_many_deviations_that_are_little_are_no_spike_nor_is_much_among_wide_noise() -> None:
    flat = history_of([2.5 + 1e-4 * (step % 3) for step in range(128)], [0.4] * 128)
    assert flat.judge(2.7, 0.4, RULE) is None  # 1,000 deviations, and 8% above the median
    assert flat.judge(2.76, 0.4, RULE) is not None
    wide = history_of([2.5] * 128, noise(0.4, 0.5, 128))
    assert wide.judge(2.5, 1.3, RULE) is None  # more than three times the median, and 5 deviations above it
    assert wide.judge(2.5, 1.8, RULE) is not None


def test_nothing_is_judged_before_half_of_the_window_and_spikes_in_it_do_not_move_it() -> None:
    assert history_of([2.5] * 63, [0.4] * 63).judge(9.0, 9.0, RULE) is None
    assert history_of([2.5] * 64, [0.4] * 64).judge(9.0, 9.0, RULE) is not None
    spiked = history_of([*noise(2.5, 0.01, 100), *[9.0] * 28], [0.4] * 128)
    assert spiked.spikes == 28 and spiked.judge(3.0, 0.4, RULE) is not None
    risen = history_of([*[2.5] * 128, *[9.0] * 128], [0.4] * 256)
    assert 60 < risen.spikes < 70  # the level is the new one when it fills half of the window


@pytest.mark.parametrize(("on_spike", "expected"), [("skip", [1, 2, 1, 2]), ("rollback", [1, 2, 3, 4])])
def test_spikes_are_in_a_row_where_nothing_or_for_a_rollback_less_than_a_window_lies_between(
    on_spike: str, expected: list[int]
) -> None:
    rule, counts, history = replace(RULE, on_spike=on_spike), [], QUIET
    for step, loss in enumerate([9.0, 9.0, 2.5, 9.0, 9.0], 201):
        is_spike = history.judge(loss, 0.4, rule) is not None
        history = history.after(step, loss, 0.4, rule, is_spike=is_spike)
        counts += [history.in_a_row] * is_spike
    assert counts == expected
    assert history.after(205 + 129, 9.0, 0.4, rule, is_spike=True).in_a_row == 1


def test_a_run_that_went_back_has_the_steps_of_the_checkpoint_and_the_counts_of_the_run() -> None:
    spiked = QUIET.after(201, 9.0, 0.4, RULE, is_spike=True)
    back = spiked.back_at(QUIET)
    assert back == replace(QUIET, spikes=1, rollbacks=1, last_spike=201, in_a_row=1)
