"""What the checker refuses, and what it says: rank, action, reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.errors import ScheduleError
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.check import check_schedule
from parallel3d.schedules.schedule import Action, Kind, Schedule


def parse(text: str) -> tuple[Action, ...]:
    return tuple(Action(int(word[0]), Kind(word[1]), int(word[2])) for word in text.split())


def two_ranks(first: str, second: str, *, trains: bool = True) -> Schedule:
    return Schedule(
        name="mine",
        placement=(0, 1),
        microbatches=2,
        ranks=(parse(first), parse(second)),
        trains=trains,
    )


@pytest.mark.parametrize(
    "second_rank, message",
    [
        ("1F0 1F1 1B0", "schedule mine: rank 1, 1B1 is missing"),
        ("1F0 1B0", "rank 1, 1F1 is missing"),
        ("1F0 1F0 1F1 1B0 1B1", "rank 1, 1F0: occurs twice, or before"),
        ("1F0 1B0 1F1 1B1 1F2", "rank 1, 1F2: the microbatch does not exist"),
        ("1F0 1B0 1F1 1B1 2F0", "rank 1, 2F0: the stage is not on this rank"),
        ("1F0 1B0 1F1 1I1", "rank 1, 1W1 is missing"),
        ("1F0 1B0 1F1 1B1 1W1", "rank 1, 1W1: occurs twice, or before"),
        ("1B0 1F0 1F1 1B1", "rank 1, 1B0: occurs twice, or before"),
        (
            "1F1 1B1 1F0 1B0",
            "deadlocks: rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1",
        ),
    ],
)
def test_checker_names_what_is_wrong(second_rank: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_schedule(two_ranks("0F0 0B0 0F1 0B1", second_rank))


def test_checker_refuses_backwards_where_none_are_asked_for() -> None:
    check_schedule(two_ranks("0F0 0F1", "1F0 1F1", trains=False))
    with pytest.raises(ScheduleError, match="rank 0, 0B0: is not part of a forward-only"):
        check_schedule(two_ranks("0F0 0F1 0B0", "1F0 1F1", trains=False))


@given(data=st.data())
def test_a_shuffled_schedule_is_refused_or_has_an_order_that_keeps_every_need(
    data: st.DataObject,
) -> None:
    schedule = build_schedule("zb_v", pp=2, microbatches=3, virtual_stages=2)
    actions = list(schedule.ranks[0])
    one, other = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
    actions[one], actions[other] = actions[other], actions[one]
    shuffled = replace(schedule, ranks=(tuple(actions), schedule.ranks[1]))
    try:
        check_schedule(shuffled)
    except ScheduleError as error:
        assert re.search("waits for|occurs twice, or before", str(error))
        return
    made = {*range(3), *range(27, 30)}  # the model's input and the gradient of its output
    for _, _, takes, makes in shuffled.in_order():
        assert takes in made
        made.add(makes)
