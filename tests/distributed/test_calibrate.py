"""What `parallel3d-plan calibrate` measures between ranks, on two of them, and the trainer that it times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallel3d.tools.plan_calibrate_links import measure_collectives, measure_contention, measure_transfers
from parallel3d.tools.plan_calibrate_probes import probes, time_probe

CPU = torch.device("cpu")


def _measure() -> dict[str, Any]:
    sized = {probe.name: probe.recipe for probe in probes(2)}
    return {
        "collectives": measure_collectives(2, CPU, [2**12, 2**22]),
        "transfers": measure_transfers(2, CPU, [2**12, 2**20]),
        "contention": measure_contention(CPU),
        "probe": time_probe(sized["tp tiny 2 2"], CPU, steps=1, rounds=1),
    }


def test_two_ranks_measure_seconds_that_grow_with_bytes(world: Callable[[int], Any]) -> None:
    found = world(2).run(_measure)[0]
    for rows in (*found["collectives"].values(), found["transfers"]):
        (small, fast), (large, slow) = rows
        assert small < large and 0 < fast < slow
    alone, together = found["contention"]
    assert 0 < alone < 10 * together
    assert 0 < found["probe"] < 60
