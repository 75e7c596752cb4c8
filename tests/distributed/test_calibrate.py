"""What `parallel3d-plan calibrate` measures between ranks, on two of them, and the trainer that it
times."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from parallel3d.config.recipe import ParallelConfig
from parallel3d.tools.calibrate.links import (
    measure_collectives,
    measure_contention,
    measure_transfers,
)
from parallel3d.tools.calibrate.probes import TINY, Probe, time_probes

CPU = torch.device("cpu")


def _measure() -> dict[str, Any]:
    small, large = (
        Probe("tp", TINY, layers, m).recipe(ParallelConfig(tp=2)) for layers, m in ((2, 2), (6, 10))
    )
    return {
        "collectives": measure_collectives(2, CPU, [2**12, 2**22]),
        "transfers": measure_transfers(2, CPU, [2**12, 2**20]),
        "contention": measure_contention(CPU),
        "probes": time_probes([small, large], CPU, rounds=2),
    }


def test_two_ranks_measure_every_kind_of_message_at_the_sizes_asked_for(
    world: Callable[[int], Any],
) -> None:
    found = world(2).run(_measure)[0]
    assert set(found["collectives"]) == {"all_reduce", "all_gather", "reduce_scatter"}
    for rows in found["collectives"].values():
        assert [size for size, _ in rows] == [2**12, 2**22] and all(
            0 < seconds < 60 for _, seconds in rows
        )
    assert [size for size, _ in found["transfers"]] == [2**12, 2**20]
    assert all(0 < seconds < 60 for seconds in found["contention"])
    small, large = found["probes"]
    assert 0 < small < large < 60


def _threads_of_more_probes() -> tuple[int, int]:
    few, many = (
        [Probe("tp", TINY, layers, 2).recipe(ParallelConfig(tp=2)) for layers in range(1, depth)]
        for depth in (2, 8)
    )
    before = _threads()
    time_probes(few, CPU, rounds=1)
    between = _threads()
    time_probes(many, CPU, rounds=1)
    return between - before, _threads() - between


def _threads() -> int:
    gc.collect()
    return len(list(Path("/proc/self/task").iterdir()))


def test_probes_of_one_layout_share_their_process_groups(world: Callable[[int], Any]) -> None:
    """Each group's thread wakes 100 times a second: those of many made a probe with four ranks take
    40% longer than the training that it stands for."""
    of_one, of_seven = world(2).run(_threads_of_more_probes)[0]
    assert of_seven <= of_one + 2
