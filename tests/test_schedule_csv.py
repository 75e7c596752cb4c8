"""Schedules in files: what is written is read back, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from test_schedule import built

from parallel3d.errors import ScheduleError
from parallel3d.schedules.build import build_schedule, forward_only
from parallel3d.schedules.csv_file import from_csv, load_schedule, to_csv
from parallel3d.schedules.schedule import Schedule


@settings(deadline=None)
@given(schedule=built())
def test_a_schedule_survives_its_file(schedule: Schedule) -> None:
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


def test_a_file_of_forwards_is_for_evaluation() -> None:
    schedule = forward_only(pp=2, microbatches=3)
    assert from_csv(to_csv(schedule), name="forward_only") == schedule


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
    ("text", "message"),
    [
        ("", "has no action"),
        (
            "0F0,0X0,0B0",
            "rank 0, column 1, '0X0': is no action; write stage, one of F B I W, and microbatch",
        ),
        ("0F0,0B0\n1F0,1B0 1B1", "rank 1, column 1, '1B0 1B1': is no action"),
        ("0F0,0B0\n0F1,0B1", "rank 1, 0F1: its stage stands on rank 0 already"),
        ("0F0,0B0\n2F0,2B0", "stage 1 stands nowhere, and stage 2 does"),
        (
            "0F0,0B0,0F999999999,0B999999999",
            "microbatch 1 stands nowhere, and microbatch 999999999 does",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
            "rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1",
        ),
        ("0" * 200_000, "is no CSV|is no action"),
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
    with pytest.raises(ScheduleError, match="mine.csv: is not text"):
        load_schedule(path)
    path.write_text(to_csv(build_schedule("zb_h1", pp=2, microbatches=2)))
    assert load_schedule(path).splits
