"""When fragments are synchronised, what the encodings lose, and which recipes of replicas that
train apart are refused.

What the replicas then train is in tests/distributed/test_local_sgd.py.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from parallel3d.config.recipe import (
    LocalSgdConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError
from parallel3d.training.local_sgd.replicas import SyncSchedule
from parallel3d.training.local_sgd.transport import BLOCK, CODECS, blocks_of

RECIPE = Recipe(
    model=ModelConfig(
        layers=4,
        hidden=32,
        heads=4,
        ffn_hidden=48,
        vocab=264,
    ),
    parallel=ParallelConfig(dp_replicate=2),
    train=TrainConfig(
        steps=100,
        global_batch_size=8,
        seq_len=16,
    ),
    local_sgd=LocalSgdConfig(sync_every=20),
)


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (4, 0), (3, 5), (4, 19)])
def test_each_fragment_is_sent_once_a_period_and_arrives_once(fragments: int, overlap: int) -> None:
    schedule = SyncSchedule(sync_every=20, fragments=fragments, overlap_steps=overlap)
    for when in (schedule.sent, schedule.halfway, schedule.due):
        steps = [(fragment, step) for step in range(41, 61) for fragment in when(step)]
        assert sorted(fragment for fragment, _ in steps) == list(range(fragments))
        assert len({step for _, step in steps}) == fragments, (
            "two at one step would double the peak"
        )
    for step in range(1, 100):
        for fragment in schedule.sent(step):
            assert fragment in schedule.halfway(step + -(-overlap // 2))
            assert fragment in schedule.due(step + overlap)


def test_int8_is_off_by_half_a_step_of_each_blocks_own_scale() -> None:
    x = torch.randn(50, BLOCK) * torch.logspace(-30, 30, 50)[:, None]
    x[7] = 0.0
    back = CODECS["int8"].decode(CODECS["int8"].encode(x))
    steps = x.abs().amax(dim=1, keepdim=True) / 127
    assert ((back - x).abs() <= 0.5001 * steps).all()
    assert (back[7] == 0).all()
    assert ((back - x).abs() > 0.4 * steps).any(), "or the bound would say too much"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("transport", list(CODECS))
def test_what_is_not_finite_arrives_as_not_finite(transport: str, value: float) -> None:
    x = torch.randn(3, BLOCK)
    x[1, 5] = value
    codec = CODECS[transport]  # type: ignore[index]
    finite = codec.decode(codec.encode(x)).isfinite().all(dim=1)
    assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("transport", "block_bytes"), [("fp32", 1024), ("fp16", 512), ("int8", 260)]
)
def test_encoded_bytes_are_those_of_the_docs(transport: str, block_bytes: int) -> None:
    encoded = CODECS[transport].encode(torch.randn(5, BLOCK))  # type: ignore[index]
    assert encoded.nbytes == 5 * block_bytes
    assert blocks_of(1) == blocks_of(256) == 1 and blocks_of(257) == 2


@pytest.mark.parametrize(
    ("changes", "parallel", "message"),
    [
        ({}, {"dp_replicate": 1}, "local_sgd.sync_every = 20: needs replicas"),
        ({}, {"sharding": "HYBRID_SHARD"}, "try FULL_SHARD"),
        ({}, {"sharding": "_HYBRID_SHARD_ZERO2"}, "try SHARD_GRAD_OP"),
        ({"sync_every": 101}, {}, "local_sgd.sync_every = 101: must be at most train.steps = 100"),
        ({"fragments": 5}, {}, "local_sgd.fragments = 5: must be at most model.layers = 4"),
        ({"fragments": 4, "sync_every": 3}, {}, "must be at most local_sgd.sync_every = 3"),
        (
            {"overlap_steps": 20},
            {},
            "local_sgd.overlap_steps = 20: must be below local_sgd.sync_every = 20",
        ),
        ({"outer_momentum": 0.0}, {}, "local_sgd.nesterov = true: needs momentum"),
        (
            {"outer_momentum": 1.0},
            {},
            "local_sgd.outer_momentum = 1.0: must be below 1",
        ),
        ({"outer_lr": 0.0}, {}, "local_sgd.outer_lr = 0.0: must be above 0"),
        ({"mixing": 1.0}, {}, "local_sgd.mixing = 1.0: must be below 1"),
        (
            {"sync_every": None, "transport": "int8"},
            {},
            "local_sgd.transport = int8: needs local_sgd.sync_every, and that is null",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(
    changes: dict[str, object], parallel: dict[str, object], message: str
) -> None:
    recipe = replace(
        RECIPE,
        local_sgd=replace(RECIPE.local_sgd, **changes),  # type: ignore[arg-type]
        parallel=replace(RECIPE.parallel, **parallel),  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError) as refusal:
        validate(recipe)
    assert message in str(refusal.value)
    assert str(refusal.value).count("\n") == 0, "one fault, one line"


def test_a_replica_is_a_run_of_its_own_on_its_share_of_the_batch() -> None:
    alone = replace(RECIPE, parallel=ParallelConfig(dp_replicate=2, tp=2)).of_one_replica
    assert alone.parallel == ParallelConfig(tp=2)
    assert alone.train.global_batch_size == 4 and alone.microbatches == RECIPE.microbatches
    synchronous = replace(RECIPE, local_sgd=LocalSgdConfig())
    assert synchronous.of_one_replica is synchronous


def test_the_rules_do_not_import_torch() -> None:
    program = "import sys, parallel3d.config.rules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
