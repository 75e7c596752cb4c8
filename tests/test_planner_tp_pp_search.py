"""The order of a search: nothing that fits is passed over, and the bounds that spare work are
bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.planner.memory.estimate import RankEstimate
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.search.request import PlanRequest
from parallel3d.planner.search.space import (
    data_axis_splits,
    families,
    per_microbatch_variant,
    recompute_choices,
)
from parallel3d.planner.search.tp_pp_search import TpPpSearch
from parallel3d.planner.time.step import CostCache, least_step_s, step_cost
from parallel3d.schedules.registry import ScheduleName
from tests.distributed.training_cases import long
from tests.planned_runs import plan_request

MODEL = ModelConfig(
    layers=8,
    hidden=2048,
    heads=16,
    kv_heads=4,
    ffn_hidden=5632,
    vocab=32000,
)


MIXTURE = replace(
    MODEL,
    experts=ExpertsConfig(
        count=4,
        per_token=2,
        hidden=2816,
        dense_layers=1,
    ),
)


def request(
    memory_fraction: float,
    *schedules: ScheduleName,
    seq_len: int = 2048,
    model: ModelConfig = MODEL,
) -> PlanRequest:
    return plan_request(
        model,
        "a100-40gb",
        gpus=8,
        seq_len=seq_len,
        global_batch_size=16,
        memory_fraction=memory_fraction,
        schedules=schedules or ("1f1b", "interleaved_1f1b"),
    )


def every(asked: PlanRequest, family: ParallelConfig) -> Iterator[ParallelConfig]:
    for way in data_axis_splits(asked, family):
        for each in (way, per_microbatch_variant(asked, way)):
            if each is not None:
                yield from (kind.of(each) for kind in recompute_choices(asked, family.pp))


@pytest.mark.parametrize(
    "schedules, seq_len, model",
    [
        ((), 8192, MODEL),
        (("zb_h1", "zb_v", "looped_bfs"), 2048, MIXTURE),
        long((), 2048, MIXTURE),
        long(("zb_h1", "zb_v", "looped_bfs"), 8192, MODEL),
    ],
)
def test_the_bounds_are_below_what_they_bound(
    schedules: tuple[ScheduleName, ...], seq_len: int, model: ModelConfig
) -> None:
    asked = request(0.95, *schedules, seq_len=seq_len, model=model)
    seen = 0
    for family in (family for own in families(asked) for family in own):
        for parallel in every(asked, family):
            run = asked.planned_run(parallel)
            estimate = RankEstimate(run, 0)
            least = estimate.least_states + estimate.least_activations
            assert least <= worst_rank(run).total, parallel
            assert (
                least_step_s(run, known=CostCache()) <= step_cost(run, exact=False).step_time_s
            ), parallel
            seen += 1
    assert seen > 100


@pytest.mark.parametrize(
    "memory_fraction, seq_len, model",
    [
        (0.2, 2048, MODEL),
        (0.25, 2048, MIXTURE),
        long(0.9, 2048, MODEL),
        long(0.4, 8192, MODEL),
    ],
)
def test_a_tp_pp_search_tells_what_fits_from_the_fastest_on(
    memory_fraction: float, seq_len: int, model: ModelConfig
) -> None:
    """The fastest and the lowest are compared with those among all layouts, each priced and
    weighed."""
    asked = request(memory_fraction, seq_len=seq_len, model=model)
    for own in families(asked):
        jobs = {
            parallel: asked.planned_run(parallel)
            for family in own
            for parallel in every(asked, family)
        }
        held = {parallel: worst_rank(run).total for parallel, run in jobs.items()}
        times = [
            step_cost(jobs[p], exact=False).step_time_s
            for p, bytes_ in held.items()
            if bytes_ <= asked.usable_bytes
        ]
        cut = TpPpSearch(asked, own, {})
        told = [priced.step_time_s for priced in cut.fastest()]
        assert told == sorted(told)
        assert told[:1] == sorted(times)[:1]
        lowest = cut.lowest_memory()
        assert lowest is not None
        assert lowest.bytes == pytest.approx(min(held.values()))
