"""Schedules in time, against what is known of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.planner.time.pipeline import closed_form_s, pipeline_s
from parallel3d.schedules.build import (
    build_schedule,
    live_microbatches,
)
from parallel3d.schedules.registry import ScheduleName
from parallel3d.timeline.simulate import ActionTimes, StageTimes, simulate

EVEN = StageTimes(forward=1.0, input=1.0, weight=1.0)


@given(pp=st.integers(2, 4), times=st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_a_long_step_is_extrapolated_well(pp: int, times: list[float]) -> None:
    stages = [StageTimes(forward=t, input=t, weight=t) for t in times[:pp]]
    microbatches = 100
    times = ActionTimes(stages=tuple(stages), transfers=(0.1,) * (pp - 1))
    exact = simulate(build_schedule("1f1b", pp=pp, microbatches=microbatches), times).makespan_s
    assert pipeline_s("1f1b", pp, microbatches, stages, 0.1) == pytest.approx(exact, rel=3e-2)


@given(pp=st.integers(1, 6), rounds=st.integers(1, 6))
def test_the_closed_form_is_near_the_simulation(pp: int, rounds: int) -> None:
    stages = [EVEN] * pp
    microbatches = pp * rounds
    assert closed_form_s("1f1b", pp, microbatches, stages, 0.0) == pytest.approx(
        pipeline_s("1f1b", pp, microbatches, stages, 0.0)
    )


@pytest.mark.parametrize(
    "name, virtual",
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("zb_h1", 1),
        ("zb_v", 2),
    ],
)
@given(pp=st.integers(2, 6), rounds=st.integers(1, 5))
def test_live_microbatches_are_those_of_the_schedule(
    name: ScheduleName, virtual: int, pp: int, rounds: int
) -> None:
    schedule = build_schedule(
        name,
        pp=pp,
        microbatches=pp * rounds,
        virtual_stages=virtual,
    )
    told = [
        live_microbatches(name, pp=pp, rank=rank, microbatches=pp * rounds, virtual_stages=virtual)
        for rank in range(pp)
    ]
    assert told == list(schedule.peak_live_microbatches)
