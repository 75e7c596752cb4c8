"""The slowest rank among peers of equal work, and when it is warned of."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from parallel3d.config.recipe import ParallelConfig
from parallel3d.diagnosis.stragglers import Slowest, Stragglers, work_clock


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(box: list[str], src: int) -> None:
        box[0] = f"node{src}"

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)


def test_a_rank_is_compared_with_those_that_hold_its_stages(hosts: None) -> None:
    """The last stages of a pipeline may have more work, of which nobody is warned."""
    watch = Stragglers(ParallelConfig(pp=2, dp_shard=2))
    work_s = [1.0, 1.0, 2.5, 2.5]
    for _ in range(5):
        assert watch.see(work_s, work_s, 10) == (Slowest(0, 1.0), None)
    assert watch.see([1.0, 1.2, 2.5, 2.5], [1.0, 0.3, 2.5, 2.5], 10)[0] == Slowest(1, 1.2)


def test_it_is_warned_of_once_when_it_has_been_slow_twice_in_a_row(hosts: None) -> None:
    watch = Stragglers(ParallelConfig(tp=2, dp_shard=2))
    slow, usual = [1.0, 1.0, 2.5, 1.0], [1.0] * 4
    warnings = [watch.see(each, usual, 10)[1] for each in (slow, usual, slow, slow, slow)]
    assert [warning is not None for warning in warnings] == [False, False, False, True, False]
    assert warnings[3] == (
        "rank 2 (node2, pp 0, dp_replicate 0, dp_shard 1, tp 0) is slow: its work takes 2.5 times "
        "that of its peers' median, and all wait for it"
    )


def test_stages_on_one_rank_each_are_compared_by_the_processor_that_they_get(hosts: None) -> None:
    """A stage of much work is not slow; one whose thread runs for a third of its work is."""
    watch = Stragglers(ParallelConfig(pp=3))
    assert watch.see([1.0, 1.0, 5.0], [1.0, 1.0, 5.0], 10) == (Slowest(0, 1.0), None)
    told = [watch.see([1.0, 1.5, 4.0], [1.0, 0.5, 4.0], 10) for _ in range(3)]
    assert [slowest for slowest, _ in told] == [Slowest(1, 3.0)] * 3
    (warning,) = [warning for _, warning in told if warning]
    assert warning.startswith("rank 1 (") and "each per second of processor time" in warning


def test_one_rank_and_unknown_times_say_nothing() -> None:
    assert Stragglers(ParallelConfig()).see([1.0], [1.0], 10) == (Slowest(), None)
    watch = Stragglers(ParallelConfig(dp_shard=2))
    assert watch.see([1.0, math.nan], [1.0, 1.0], 10) == (Slowest(), None)
    assert math.isnan(work_clock(torch.device("cuda"))())
