"""The clock of training steps: each second belongs to the innermost cause."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parallel3d.layers.recompute import recomputed
from parallel3d.watch import step_clock
from parallel3d.watch.step_clock import CAUSES, StepClock, timed, timed_as

Work = Callable[[float], None]


class Time:
    """Time that passes only in `work`, with the events of a GPU that has reached `passed`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.passed = float("inf")

    def work(self, seconds: float) -> None:
        self.now += seconds

    def record(self) -> float:
        return self.now

    perf_counter = record

    def has_passed(self, event: float) -> bool:
        return event <= self.passed

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


@pytest.fixture(params=["cpu", "gpu"])
def time(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Time:
    time = Time()
    clock = StepClock()
    monkeypatch.setattr(step_clock, "time", time)
    monkeypatch.setattr(step_clock, "CLOCK", clock)
    if request.param == "gpu":
        clock.use(time)
    return time


def taken() -> dict[str, float]:
    """Returns the causes that have taken time."""
    seconds = step_clock.CLOCK.take()
    assert tuple(seconds) == CAUSES
    return {cause: spent for cause, spent in seconds.items() if spent}


def test_nested_causes_add_up_to_the_step(time: Time) -> None:
    clock = step_clock.CLOCK
    reduce = timed_as("dp")(time.work)
    for _ in range(2):
        time.work(100.0)  # Between two steps.
        with clock.running():
            time.work(1.0)
            with timed("compute"):
                time.work(2.0)
                with timed("tp"):
                    time.work(4.0)
                time.work(8.0)
                reduce(16.0)
            time.work(32.0)
    assert taken() == {"other": 66.0, "compute": 20.0, "tp": 8.0, "dp": 32.0}
    assert taken() == {}


def test_an_error_ends_its_cause(time: Time) -> None:
    with step_clock.CLOCK.running():
        with pytest.raises(ZeroDivisionError), timed("optimizer"):
            time.work(1.0)
            raise ZeroDivisionError
        time.work(2.0)
    assert taken() == {"optimizer": 1.0, "other": 2.0}


def test_nothing_is_counted_outside_of_steps(time: Time) -> None:
    with timed("compute"):
        time.work(1.0)
    assert taken() == {}


@pytest.mark.parametrize("time", ["gpu"], indirect=True)
def test_events_that_a_gpu_has_not_reached_are_counted_later(time: Time) -> None:
    with step_clock.CLOCK.running():
        with timed("compute"):
            time.work(1.0)
        time.passed = time.now
        with timed("optimizer"):
            time.work(2.0)
        time.work(4.0)
    assert taken() == {"compute": 1.0}
    time.work(8.0)
    with step_clock.CLOCK.running("checkpoint"):
        time.work(16.0)
    time.passed = time.now
    assert taken() == {"optimizer": 2.0, "other": 4.0, "checkpoint": 16.0}


def test_only_the_second_forward_pass_of_a_region_is_recompute(time: Time) -> None:
    x = torch.ones(2, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        time.work(1.0)
        with timed("tp"):
            time.work(2.0)
        return (x * x).exp()

    with step_clock.CLOCK.running("compute"):
        y = recomputed(region, x)
        time.work(4.0)
        y.sum().backward()
    assert taken() == {"compute": 5.0, "recompute": 1.0, "tp": 4.0}
