"""Schedules in files: what is written is read back, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from test_schedule import built

from parallel3d.errors import ScheduleError
from parallel3d.schedules.csv_file import from_csv, load_schedule, to_csv
from parallel3d.schedules.schedule import Schedule


@given(schedule=built())
def test_a_schedule_survives_its_file(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


def test_holes_overlaps_and_communications_are_torchs() -> None:
    text = """\
0UNSHARD,0F0,,0SEND_F0,0F1,,,"(0F2;0B0)OVERLAP_F_B",0B1,0RECV_B2,0B2,0REDUCE_GRAD,0RESHARD
,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1F2, 1I2 ,1W2

"""
    assert str(from_csv(text, name="mine")).splitlines() == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1I2 1W2",
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "must have actions of every stage from stage 0 on"),
        (
            "0F0,0X0,0B0",
            "rank 0, '0X0': is not an action; write stage, kind",
        ),
        ("0F0,0B0\n0F1,0B1", "rank 1, 0F1: the stage is not on this rank"),
        (
            "0F0,0B0,0F999999999,0B999999999",
            "must have actions of every microbatch from microbatch",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
            "rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1",
        ),
        ("0" * 200_000, "is not an action"),
    ],
)
def test_a_wrong_file_is_told_by_rank_action_and_reason(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as error:
        from_csv(text, name="mine.csv")
    assert str(error.value).startswith("schedule mine.csv")
    assert len(str(error.value)) < 200


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    with pytest.raises(ScheduleError, match="mine.csv: cannot be read: No such file"):
        load_schedule(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="mine.csv: cannot be read: not text"):
        load_schedule(path)
