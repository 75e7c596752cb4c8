"""The strategies of the data dimension."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parallel3d.config import ParallelConfig
from tests.distributed.layouts import GROUPED, TIED
from tests.distributed.test_parity import assert_same, label, referee_curve, run_layout

LAYOUTS = {
    2: [
        (TIED, {"dp_shard": 2, "sharding": "NO_SHARD"}),
        (GROUPED, {"dp_replicate": 2, "sharding": "NO_SHARD", "microbatch_size": 4, "bucket_mib": 1}),
        (TIED, {"dp_shard": 2, "sharding": "SHARD_OPTIMIZER", "recompute": "full"}),
        (GROUPED, {"dp_shard": 2, "sharding": "SHARD_GRAD_OP", "microbatch_size": 4}),
        (
            GROUPED,
            {"dp_shard": 2, "sharding": "FULL_SHARD", "gather": "microbatch", "reduce": "microbatch", "prefetch": 2},
        ),
    ],
    4: [
        (GROUPED, {"dp_shard": 2, "tp": 2, "sharding": "SHARD_OPTIMIZER", "sequence_parallel": True}),
        (TIED, {"dp_shard": 2, "pp": 2, "sharding": "SHARD_OPTIMIZER", "schedule": "zb_h1"}),
        (TIED, {"dp_shard": 2, "dp_replicate": 2, "sharding": "SHARD_OPTIMIZER"}),
        (TIED, {"dp_shard": 2, "dp_replicate": 2, "sharding": "NO_SHARD"}),
        (
            TIED,
            {
                "dp_shard": 2,
                "dp_replicate": 2,
                "sharding": "_HYBRID_SHARD_ZERO2",
                "reduce": "microbatch",
                "gather": "microbatch",
            },
        ),
        (TIED, {"dp_shard": 2, "pp": 2, "sharding": "NO_SHARD", "schedule": "interleaved_1f1b", "virtual_stages": 2}),
    ],
}
CASES = [(size, model, ParallelConfig(**settings)) for size, cases in LAYOUTS.items() for model, settings in cases]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{label(case)}-{case[2].strategy}")
def test_strategy(world: Callable, case) -> None:
    size, model, parallel = case
    curves = world(size).run(run_layout, model, parallel)
    assert all(curve == curves[0] for curve in curves)
    assert_same(curves[0], referee_curve(model))
