"""The pipeline by NCCL's rules (`tests/nccl_rules.py`): no schedule hangs, and faults that would
hang are found."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.csv_file import from_csv
from parallel3d.schedules.registry import SCHEDULES, ScheduleName
from parallel3d.schedules.schedule import Schedule
from tests.nccl_rules import Fault, assert_never_hangs, programs, stuck


def cases_of(name: ScheduleName) -> Iterator[Schedule]:
    """Yields schedules for 2 to 8 ranks, each with few and with more microbatches than ranks."""
    drawn = random.Random(name)
    for pp in range(2, 9):
        for microbatches in (drawn.randint(1, pp), pp + drawn.randint(0, pp)):
            virtual_stages = drawn.choice([v for v in (1, 2, 3) if SCHEDULES[name].stages.allow(v)])
            yield build_schedule(
                name, pp=pp, microbatches=microbatches, virtual_stages=virtual_stages
            )


def usual(name: ScheduleName) -> Schedule:
    return build_schedule(
        name,
        pp=4,
        microbatches=8,
        virtual_stages=SCHEDULES[name].stages.usual,
    )


def hanging(*faults: Fault, warms_up: bool = True, device_waits: bool = False) -> set[ScheduleName]:
    """Returns the schedules that hang with these faults in the code."""
    recorded = {
        name: programs(usual(name), warms_up=warms_up, faults=frozenset(faults))
        for name in SCHEDULES
    }
    return {name for name, steps in recorded.items() if stuck(steps, device_waits=device_waits)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_hangs(name: ScheduleName) -> None:
    for schedule in cases_of(name):
        assert_never_hangs(schedule)


def test_a_schedule_of_ones_own_is_put_through_it_by_one_call() -> None:
    assert_never_hangs(from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", name="mine"))


def test_one_group_for_both_ways_hangs_where_a_rank_sends_both_ways_in_turn() -> None:
    # all forwards come before all backwards, or one message at a time
    fine_by_luck = {"gpipe", "looped_bfs", "naive"}
    assert hanging("one group for both ways") == set(SCHEDULES) - fine_by_luck


def test_receives_posted_before_their_cause_hang_once_anything_waits_for_the_device() -> None:
    assert hanging("posted at once", warms_up=False) == set()
    assert hanging("posted at once", warms_up=False, device_waits=True) == set(SCHEDULES)


def test_without_the_warm_up_kernels_that_are_loaded_late_hang_the_v_schedules() -> None:
    assert hanging(warms_up=False, device_waits=True) == {"zb_v", "dualpipe_v"}
