"""The simulator against the papers' formulas, and against what must hold of any schedule at any
cost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import built

from parallel3d.schedules.build import build_schedule, forward_only, placement
from parallel3d.schedules.registry import ScheduleName
from parallel3d.schedules.schedule import Action, Kind, Schedule
from parallel3d.timeline.simulate import EQUAL, ActionTimes, StageTimes, simulate
from parallel3d.timeline.spans import Span, Timeline

SIZES = [(2, 7), (4, 8), (8, 23)]  # pp, microbatches
LOOPED: tuple[ScheduleName, ...] = ("interleaved_1f1b", "looped_bfs")
TIMES = [
    StageTimes(),
    StageTimes(forward=1.2, weight=0.8),
    StageTimes(weight=0.5),
    StageTimes(forward=2),
]


def timeline(
    name: ScheduleName,
    pp: int,
    microbatches: int,
    virtual_stages: int = 1,
    times: StageTimes = EQUAL,
) -> Timeline:
    schedule = build_schedule(
        name,
        pp=pp,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
    )
    return simulate(schedule, ActionTimes.uniform(schedule.stages, times))


def idle(simulated: Timeline) -> float:
    """Returns how long rank 0 is idle; all ranks are idle for equally long where they have the same
    work."""
    return simulated.makespan_s - simulated.busy_s[0]


@pytest.mark.parametrize(
    "name, v",
    [
        ("gpipe", 1),
        ("1f1b", 1),
        *((n, v) for n in LOOPED for v in (2, 3, 4)),
    ],
)
@pytest.mark.parametrize("p, m", SIZES)
def test_virtual_stages_divide_the_bubble(name: ScheduleName, v: int, p: int, m: int) -> None:
    """Idle over busy time is (p - 1) / (v m) (arXiv 2104.04473, section 2.2), also where p does not
    divide m."""
    simulated = timeline(name, p, m, v)
    assert idle(simulated) / simulated.busy_s[0] == pytest.approx((p - 1) / (v * m))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("p, m", SIZES)
def test_split_backwards_leave_ranks_idle_as_the_papers_say(
    p: int, m: int, times: StageTimes
) -> None:
    """A rank is idle for (p - 1) (F + I - W), in 1F1B for (p - 1) (F + I + W) (arXiv 2401.10241,
    table 2). In DualPipe-V it is (p - 1) (F&B + B - 3 W) where pairs overlap."""
    F = times.forward
    I = times.input  # noqa: E741
    W = times.weight
    assert idle(timeline("zb_h1", p, m, times=times)) == pytest.approx((p - 1) * (F + I - W))
    assert idle(timeline("1f1b", p, m, times=times)) == pytest.approx((p - 1) * (F + I + W))
    if m >= 2 * p:
        simulated = timeline("dualpipe_v", p, m, 2, times)
        assert idle(simulated) == pytest.approx((p - 1) * (F + I - W))


@pytest.mark.parametrize("p, m", [(1, 1), (2, 3), (4, 7), (4, 20), (8, 15), (8, 64)])
def test_zb_v_leaves_no_bubble_between_a_ranks_first_and_last_action(p: int, m: int) -> None:
    simulated = timeline("zb_v", p, m, 2)
    for spans, busy in zip(simulated.by_rank, simulated.busy_s, strict=True):
        assert spans[-1].end_s - spans[0].start_s == busy
    # a rank starts a step after the last
    assert simulated.bubble_fraction == pytest.approx((p - 1) / (6 * m + p - 1))


@pytest.mark.parametrize("p, m, v", [(1, 1, 1), (2, 4, 1), (4, 8, 2), (4, 9, 2), (4, 7, 3)])
def test_forwards_alone_take_as_few_steps_as_there_can_be(p: int, m: int, v: int) -> None:
    schedule = forward_only(tuple(range(p)) * v, m)
    assert simulate(schedule, ActionTimes.uniform(schedule.stages)).makespan_s == v * m + p - 1
    v_shaped = forward_only(placement("zb_v", pp=p, virtual_stages=2), m)
    assert simulate(v_shaped, ActionTimes.uniform(v_shaped.stages)).makespan_s == 2 * (m + p - 1)


def test_each_stage_has_its_own_times_and_each_way_its_own_cost() -> None:
    schedule = build_schedule("gpipe", pp=2, microbatches=1)
    costs = ActionTimes(
        stages=(StageTimes(forward=1, full_backward=2), StageTimes(forward=3, input=4, weight=5)),
        transfers=(0.5,),
    )
    assert simulate(schedule, costs).spans == (
        Span(0, Action(0, Kind.FORWARD, 0), 0, 1),
        Span(1, Action(1, Kind.FORWARD, 0), 1.5, 4.5),
        Span(1, Action(1, Kind.BACKWARD, 0), 4.5, 13.5),
        Span(0, Action(0, Kind.BACKWARD, 0), 14, 16),
    )


@given(schedule=built(), data=st.data())
def test_no_action_begins_before_what_it_needs_or_while_its_rank_works(
    schedule: Schedule, data: st.DataObject
) -> None:
    times = st.builds(
        StageTimes,
        forward=st.floats(0, 9),
        input=st.floats(0, 9),
        weight=st.floats(0, 9),
        full_backward=st.none(),
    )
    count = schedule.stages
    costs = ActionTimes(
        stages=tuple(data.draw(st.lists(times, min_size=count, max_size=count))),
        transfers=tuple(
            data.draw(st.lists(st.floats(0, 5), min_size=count - 1, max_size=count - 1))
        ),
    )
    simulated = simulate(schedule, costs)
    made_by = {schedule.slots(span.action)[1]: span for span in simulated.spans}
    for rank, spans in enumerate(simulated.by_rank):
        assert tuple(span.action for span in spans) == schedule.ranks[rank]
        for before, span in pairwise(spans):
            assert span.start_s >= before.end_s
        for span in spans:
            need = made_by.get(schedule.slots(span.action)[0])
            if need is not None:
                way = costs.transfers[min(need.action.stage, span.action.stage)]
                assert span.start_s >= need.end_s + (way if need.rank != rank else 0.0)
    assert 0 <= simulated.bubble_fraction <= 1
