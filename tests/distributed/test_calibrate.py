"""What `parallel3d-plan calibrate` measures between ranks, and the trainer that it times, on two
ranks."""

from __future__ import annotations

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


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _measure() -> dict[str, Any]:
    small, large = (
        Probe("tp", TINY, layers, m).recipe(ParallelConfig(tp=2)) for layers, m in ((2, 2), (6, 10))
    )
    found: dict[str, Any] = {
        "collectives": measure_collectives(2, CPU, [2**12, 2**22]),
        "transfers": measure_transfers(2, CPU, [2**12, 2**20]),
        "contention": measure_contention(CPU),
    }
    threads = _threads()
    found["probes"] = time_probes([small, *5 * [large]], CPU, rounds=2)
    found["threads"] = _threads() - threads
    return found


def test_two_ranks_measure_every_kind_of_message_at_the_sizes_asked_for(
    world: Callable[[int], Any],
) -> None:
    found = world(2).run(_measure)[0]
    assert set(found["collectives"]) == {"all_reduce", "all_gather", "reduce_scatter"}
    for rows in found["collectives"].values():
        assert [size for size, _ in rows] == [2**12, 2**22]
        assert min(seconds for _, seconds in rows) > 0
    assert [size for size, _ in found["transfers"]] == [2**12, 2**20]
    assert min(found["contention"]) > 0
    small, *large = found["probes"]
    assert 0 < small < min(large)
    # Probes of one layout share process groups: each has a thread that wakes 100 times a second.
    assert found["threads"] <= 10
