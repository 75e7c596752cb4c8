"""The search: every answer is a layout that the trainer accepts, and none that is better was left
out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.recipe import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    Recompute,
    TrainConfig,
)
from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.planner.model.training import OptimizerMemory
from parallel3d.planner.search.best_layouts import search
from parallel3d.planner.search.neighbours import find_neighbours
from parallel3d.planner.search.request import Fixed, PlanRequest, Strategy
from parallel3d.planner.search.space import families
from parallel3d.tools.plan import score as plan_score
from tests.planned_runs import plan_request

CASES = Path(plan_score.__file__).parents[1] / "cases" / "published.json"
MODEL = ModelConfig(
    layers=6,
    hidden=1024,
    heads=16,
    kv_heads=4,
    ffn_hidden=2816,
    vocab=32000,
)
MIXTURE = replace(
    MODEL,
    experts=ExpertsConfig(
        count=8,
        per_token=2,
        hidden=1408,
        dense_layers=1,
    ),
)


def request(model: ModelConfig = MODEL, **changes: object) -> PlanRequest:
    usual = {"gpus": 16, "seq_len": 1024, "global_batch_size": 64}
    return plan_request(model, "a100-40gb", **{**usual, **changes})


@pytest.mark.parametrize("model", [MODEL, MIXTURE])
def test_every_strategy_is_a_valid_recipe(model: ModelConfig) -> None:
    asked = request(model)
    for found in search(asked, top=20).strategies:
        assert found.parallel.world_size == asked.gpus
        train = TrainConfig(
            steps=1,
            global_batch_size=asked.global_batch_size,
            seq_len=asked.seq_len,
        )
        validate(
            Recipe(
                model=model,
                train=train,
                parallel=found.parallel,
                data=DataConfig(),
                run_dir="runs/x",
            )
        )


@pytest.mark.parametrize(
    "training, memory_fraction, seq_len",
    [
        (OptimizerMemory(), 0.95, 1024),
        (OptimizerMemory(), 0.08, 1024),
        (OptimizerMemory(state_bytes=0.0), 0.06, 1024),
        (OptimizerMemory(), 0.95, 16384),
        (OptimizerMemory(), 0.13, 16384),
    ],
)
def test_no_layout_left_out_is_better_than_the_best(
    training: OptimizerMemory, memory_fraction: float, seq_len: int
) -> None:
    asked = request(
        gpus=8,
        seq_len=seq_len,
        global_batch_size=16,
        training=training,
        memory_fraction=memory_fraction,
    )
    best = search(asked, top=1).strategies[0]
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    cps = (1, 2, 4)[: seq_len // 4096 or 1]
    for pp, tp, cp, shard, microbatch, recompute in itertools.product(
        (1, 2, 4), (1, 2, 4), cps, (1, 2, 4, 8), (1, 2, 4), kinds
    ):
        if 8 % (pp * tp * cp * shard) or 16 % (8 // (pp * tp * cp) * microbatch):
            continue
        tried = ParallelConfig(
            pp=pp,
            tp=tp,
            cp=cp,
            dp_shard=shard,
            dp_replicate=8 // (pp * tp * cp * shard),
            microbatch_size=microbatch,
            recompute=recompute,
            sequence_parallel=tp > 1,
        )
        other = Strategy(asked, tried)
        if other.memory.total <= asked.usable_bytes:
            assert best.cost.step_time_s <= other.cost.step_time_s * 1.02, tried


def test_only_long_sequences_are_split() -> None:
    def sizes(seq_len: int) -> set[int]:
        found = families(request(seq_len=seq_len))
        return {family.cp for own in found for family in own}

    assert sizes(4096) == {1}
    assert sizes(16384) == {1, 2, 4}


def test_tp_may_be_a_multiple_of_the_key_value_heads() -> None:
    """Each rank has keys and values whole then, which its memory and its traffic count."""
    asked = request(fixed=Fixed(tp=8))  # the model has 4 key-value heads
    best = search(asked, top=1).strategies[0]
    kv = 2 * MODEL.hidden * MODEL.key_value_heads * MODEL.hidden // MODEL.heads
    rest = 2 * MODEL.hidden**2 + 3 * MODEL.hidden * MODEL.ffn_hidden
    assert best.run.stage_parameters(StageSlice(layers=1)) == kv + rest // 8 + 2 * MODEL.hidden


@pytest.mark.parametrize(
    "fixed",
    [
        Fixed(tp=2, pp=2, schedule="1f1b", recompute="full"),
        Fixed(pp=2, schedule="zb_h1"),
        Fixed(pp=2, schedule="zb_v", dp_replicate=2),
        Fixed(pp=2, schedule="interleaved_zb", virtual_stages=3),
        Fixed(pp=2, schedule="gpipe", sharding="FULL_SHARD", dp_replicate=1),
    ],
)
def test_what_is_fixed_stays_fixed(fixed: Fixed) -> None:
    found = search(request(fixed=fixed), top=3).strategies
    assert found
    wanted = {key: value for key, value in vars(fixed).items() if value is not None}
    for each in found:
        assert wanted.items() <= vars(each.parallel).items()


@pytest.mark.parametrize(
    "key, value, better",
    [("gpus", 124, 128), ("global_batch_size", 500, 512), ("gpus", 128, None)],
)
def test_the_nearest_better_number_is_found(key: str, value: int, better: int | None) -> None:
    """31 divides neither the layers nor the batch, and 500 sequences leave 4 of 128 devices to the
    data dimension."""
    sizes = {"gpus": 128, "global_batch_size": 512} | {key: value}
    asked = plan_request(seq_len=8192, **sizes)
    result = search(asked, top=1)
    found = find_neighbours(asked, result.least_s)[key]
    if better is None:
        assert found is None
        return
    assert found is not None
    assert getattr(found.strategy.request, key) == better
    own = result.strategies[0].cost.tokens_per_s_per_gpu
    faster = found.strategy.cost.tokens_per_s_per_gpu / own
    assert 1 + found.gain == pytest.approx(faster, rel=0.05)  # the fastest may be one of its ties


def test_an_impossible_question_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no layout"):
        search(request(gpus=7))
    with pytest.raises(ConfigError, match="a batch that is a multiple of 11"):
        search(request(gpus=11))
