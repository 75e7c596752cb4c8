"""Schedules as data: the builders' orders, and what is proved of all of them at any size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parallel3d.errors import ScheduleError
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.check import check_schedule
from parallel3d.schedules.classic import groups
from parallel3d.schedules.registry import SCHEDULES, ScheduleName
from parallel3d.schedules.schedule import Action, Kind, Schedule

F = Kind.FORWARD
B = Kind.BACKWARD
I = Kind.INPUT  # noqa: E741
W = Kind.WEIGHT
sizes = st.integers(1, 8)


@st.composite
def built(draw: st.DrawFn) -> Schedule:
    """Draws any builder's schedule, for any numbers that it takes."""
    name: ScheduleName = draw(st.sampled_from(sorted(SCHEDULES)))
    traits = SCHEDULES[name]
    virtual_stages = draw(st.integers(traits.stages.least, traits.stages.most or 4))
    return build_schedule(
        name,
        pp=draw(sizes),
        microbatches=draw(st.integers(1, 25)),
        virtual_stages=virtual_stages,
    )


def test_zb_h1_puts_weights_off_by_as_many_microbatches_as_the_rank() -> None:
    """The order is that of figure 2 of arXiv 2401.10241; others are torch's
    (test_schedule_torch)."""
    assert str(build_schedule("zb_h1", pp=2, microbatches=3)).splitlines() == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_the_gradient_of_a_split_backward_goes_to_the_half_that_takes_it() -> None:
    schedule = build_schedule("zb_h1", pp=2, microbatches=2)
    assert schedule.transfers[1, 0] == [Action(0, I, 0), Action(0, I, 1)]
    assert schedule.feeds(Action(1, W, 0)) is None
    mixed = build_schedule("dualpipe_v", pp=2, microbatches=4, virtual_stages=2)
    assert mixed.feeds(Action(1, B, 0)) == Action(0, B, 0)
    assert mixed.feeds(Action(1, B, 3)) == Action(0, I, 3)
    assert (1, 1) not in mixed.transfers


@given(schedule=built())
def test_every_builder_is_proved_for_any_size(schedule: Schedule) -> None:
    """Proves the order, and checks what is derived from it."""
    check_schedule(schedule)
    stages = schedule.stages
    microbatches = schedule.microbatches
    actions = {action for rank in schedule.ranks for action in rank}
    assert len(schedule.last_backwards) == stages
    fed = [schedule.feeds(action) for action in actions]
    takers = [taker for taker in fed if taker is not None]
    assert len(takers) == len(set(takers)) == 2 * (stages - 1) * microbatches
    assert set(takers) <= actions
    between = sum(one != other for one, other in pairwise(schedule.placement))
    assert sum(map(len, schedule.transfers.values())) == 2 * between * microbatches


@given(schedule=built())
@example(build_schedule("interleaved_1f1b", pp=4, microbatches=8, virtual_stages=2))
def test_memory_is_as_the_papers_tables_say(schedule: Schedule) -> None:
    """The most forwards alive are as many as the formula says; with few microbatches the formula is
    a bound."""
    p = len(schedule.ranks)
    m = schedule.microbatches
    v = schedule.stages // p
    g = len(groups(p, m)[0])
    for rank, alive in enumerate(schedule.peak_live_microbatches):
        most = {
            "naive": v,
            "gpipe": m,
            "1f1b": p - rank,
            "interleaved_1f1b": 2 * (p - rank - 1) + (v - 1) * g + 1,
            "looped_bfs": v * m,
            "zb_h1": p,
            "interleaved_zb": (v - 1) * g + p,
            "zb_v": 2 * p,
            "dualpipe_v": 2 * p + 1,
        }[schedule.name]
        if m >= 2 * p or schedule.name in ("1f1b", "gpipe"):
            assert alive == min(most, v * m)
        else:
            assert alive <= most


def test_refuses_numbers_that_make_no_schedule() -> None:
    with pytest.raises(ScheduleError, match="1f1b: pp = 2, 2 microbatches, 2 stages per rank"):
        build_schedule("1f1b", pp=2, microbatches=2, virtual_stages=2)
    with pytest.raises(ScheduleError, match="schedule zb: unknown; known are gpipe, 1f1b"):
        build_schedule("zb", pp=2, microbatches=1)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(schedule=built(), data=st.data())
def test_a_receive_may_be_posted_after_exactly_what_comes_before_its_sender(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    # the places of this rank's actions that come before a result
    before: dict[int, set[int]] = {}
    done_by: list[set[int]] = [set() for _ in schedule.ranks]
    for holder, action, takes, makes in schedule.in_order():
        own = {schedule.ranks[rank].index(action)} if holder == rank else set()
        before[makes] = done_by[holder] = done_by[holder] | before.get(takes, set()) | own
    after = schedule.postable_after(rank)
    assert tuple(after) == schedule.ranks[rank]
    for place, taker in enumerate(after):
        causes = before.get(schedule.slots(taker)[0], set())
        assert after[taker] == max(causes, default=-1) + 1 <= place


@given(schedule=built(), data=st.data())
def test_few_microbatches_have_each_kind_of_action_of_each_stage(
    schedule: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    few = schedule.first_of_each_kind(rank)
    assert {a[:2] for a in few.ranks[rank]} == {a[:2] for a in schedule.ranks[rank]}
    assert {a.microbatch for actions in few.ranks for a in actions} == {
        a.microbatch for a in few.ranks[rank]
    }
    assert len({a.microbatch for a in few.ranks[rank]}) <= 3
