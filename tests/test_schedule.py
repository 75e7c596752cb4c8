"""Schedules as data: the builders' orders, what the checker refuses, and what it proves of any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.errors import ScheduleError
from parallel3d.pipeline.schedule import Action, Kind, Schedule, check_schedule
from parallel3d.pipeline.schedules import build_schedule, forward_only

F, B = Kind.FORWARD, Kind.BACKWARD
sizes = st.integers(1, 8)


def test_gpipe_does_all_forwards_first() -> None:
    schedule = build_schedule("gpipe", pp=2, microbatches=3)
    assert str(schedule).splitlines() == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    assert schedule.peak_live_microbatches == (3, 3)


def test_1f1b_keeps_no_more_than_pp_microbatches_alive() -> None:
    schedule = build_schedule("1f1b", pp=3, microbatches=5)
    assert str(schedule).splitlines() == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0B3 0B4",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ]
    assert schedule.peak_live_microbatches == (3, 2, 1)


def test_1f1b_on_one_rank_is_gradient_accumulation() -> None:
    assert str(build_schedule("1f1b", pp=1, microbatches=3)) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_interleaved_goes_round_the_ranks() -> None:
    """The order of Megatron's schedule for two ranks, two stages each, four microbatches."""
    schedule = build_schedule("interleaved_1f1b", pp=2, microbatches=4, virtual_stages=2)
    assert schedule.placement == (0, 1, 0, 1)
    assert str(schedule).splitlines() == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_transfers_are_named_by_their_takers_in_the_senders_order() -> None:
    schedule = build_schedule("1f1b", pp=2, microbatches=2)
    assert schedule.transfers == {
        (0, 1): (Action(1, F, 0), Action(1, F, 1)),
        (1, 0): (Action(0, B, 0), Action(0, B, 1)),
    }


def test_each_stage_has_one_last_backward() -> None:
    schedule = build_schedule("interleaved_1f1b", pp=2, microbatches=4, virtual_stages=2)
    assert schedule.last_backwards == {Action(stage, B, 3) for stage in range(4)}


@given(name=st.sampled_from(["gpipe", "1f1b"]), pp=sizes, microbatches=sizes)
def test_plain_schedules_take_any_number_of_microbatches(name: str, pp: int, microbatches: int) -> None:
    schedule = build_schedule(name, pp=pp, microbatches=microbatches)  # type: ignore[arg-type]
    assert sum(len(actions) for actions in schedule.ranks) == 2 * pp * microbatches
    if name == "1f1b":
        assert schedule.peak_live_microbatches == tuple(min(pp - rank, microbatches) for rank in range(pp))


@given(pp=st.integers(2, 6), groups=st.integers(1, 4), virtual_stages=st.integers(2, 4))
def test_interleaved_is_proved_for_any_size(pp: int, groups: int, virtual_stages: int) -> None:
    schedule = build_schedule("interleaved_1f1b", pp=pp, microbatches=groups * pp, virtual_stages=virtual_stages)
    assert schedule.stages == pp * virtual_stages
    assert all(stage % pp == rank for rank in range(pp) for stage in schedule.stages_of(rank))


@given(pp=sizes, microbatches=sizes, virtual_stages=st.integers(1, 3))
def test_forward_only_has_no_backward(pp: int, microbatches: int, virtual_stages: int) -> None:
    schedule = forward_only(pp=pp, microbatches=microbatches, virtual_stages=virtual_stages)
    assert all(action.kind is F for actions in schedule.ranks for action in actions)


def test_refuses_microbatches_that_do_not_go_round() -> None:
    with pytest.raises(ScheduleError, match="5 microbatches are no multiple of pp = 2"):
        build_schedule("interleaved_1f1b", pp=2, microbatches=5, virtual_stages=2)


def changed(schedule: Schedule, rank: int, *actions: Action) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = actions
    return replace(schedule, ranks=tuple(ranks))


@pytest.mark.parametrize(
    ("second_rank", "message"),
    [
        ("1F0 1F1 1B0", "1B1 is never done"),
        ("1F0 1F0 1F1 1B0 1B1", "1F0 on rank 1 is done twice"),
        ("1F0 1B0 1F1 0B1", "0B1 stands on rank 1, which has no such stage"),
        ("1B0 1F0 1F1 1B1", r"rank 1 at 1B0 waits for 1F0"),
        ("1F1 1B1 1F0 1B0", r"rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1"),
    ],
)
def test_checker_names_what_is_wrong(second_rank: str, message: str) -> None:
    schedule = changed(build_schedule("1f1b", pp=2, microbatches=2), 0, *parse("0F0 0B0 0F1 0B1"))
    with pytest.raises(ScheduleError, match=message):
        check_schedule(changed(schedule, 1, *parse(second_rank)))


def parse(text: str) -> list[Action]:
    return [Action(int(word[0]), Kind(word[1]), int(word[2])) for word in text.split()]
