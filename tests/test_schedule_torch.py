"""The builders against torch.distributed.pipelining's own generators: the same order on every
rank."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.csv_file import from_csv

LOOPED = {
    "looped_bfs": theirs.ScheduleLoopedBFS,
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "interleaved_zb": theirs.ScheduleInterleavedZeroBubble,
}
V_SHAPED = {"zb_v": theirs.ScheduleZBVZeroBubble, "dualpipe_v": theirs.ScheduleDualPipeV}
LOOPED_SIZES = [(2, 2, 2), (2, 4, 3), (4, 8, 2), (4, 10, 2), (4, 3, 2), (8, 16, 4)]
V_SIZES = [(1, 2, 2), (2, 4, 2), (2, 7, 2), (4, 8, 2), (4, 13, 2), (8, 16, 2)]


def generator(kind: Any, pp: int, microbatches: int, virtual_stages: int) -> Any:
    """Their schedule with what its generator reads and nothing else: the whole would need modules
    and processes."""
    schedule = kind.__new__(kind)
    schedule.pp_group_size = pp
    schedule._n_microbatches = microbatches
    schedule._num_stages = schedule.num_stages = pp * virtual_stages
    schedule._stages = [None] * virtual_stages
    schedule.n_local_stages = virtual_stages
    schedule.number_of_rounds = max(1, microbatches // pp)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    return schedule


def as_csv(ranks: list[list[Any]]) -> str:
    return "\n".join(
        ",".join("" if action is None else str(action) for action in rank) for rank in ranks
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pp, microbatches", [(1, 3), (2, 2), (4, 4), (4, 11), (8, 16)])
def test_one_stage_on_each_rank(name: str, pp: int, microbatches: int) -> None:
    kind = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}[name]
    order = generator(kind, pp, microbatches, 1)._get_pipeline_order()
    ours = build_schedule(name, pp=pp, microbatches=microbatches)  # type: ignore[arg-type]
    # Their 1F1B counts the last rank's forwards from 1 (they draw it so; what they execute starts
    # at 0).
    compared = pp if name == "gpipe" else pp - 1
    for rank in range(compared):
        theirs_of_rank = [
            str(action)
            for action in order[rank]
            if action is not None and action.microbatch_index is not None
        ]
        assert theirs_of_rank == [str(action) for action in ours.ranks[rank]]


@pytest.mark.parametrize(
    "name, sizes",
    [*product(LOOPED, LOOPED_SIZES), *product(V_SHAPED, V_SIZES)],
)
def test_several_stages_on_each_rank(name: Any, sizes: tuple[int, int, int]) -> None:
    pp, microbatches, virtual_stages = sizes
    schedule = generator((LOOPED | V_SHAPED)[name], *sizes)
    orders = []
    for rank in range(pp):
        schedule.rank = rank
        orders.append(schedule._calculate_single_rank_operations(rank))
    ours = build_schedule(
        name,
        pp=pp,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
    )
    assert from_csv(as_csv(orders), name=name) == ours
