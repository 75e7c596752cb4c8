"""Ranges of predictions widen where less is known, hold what they promise, and decide what fits and
what is a tie."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

from parallel3d.models import shape_cards
from parallel3d.planner.hardware.cluster import load_cluster
from parallel3d.planner.hardware.framework import PARALLEL3D
from parallel3d.planner.model.named import named_shape
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.uncertainty import ErrorModel, error_model_of, safe_share
from parallel3d.planner.published.cases import read_cases
from parallel3d.planner.published.frameworks import frameworks
from parallel3d.planner.published.score import Score
from parallel3d.planner.search.fastest import search
from parallel3d.planner.search.request import PlanRequest
from parallel3d.planner.search.ties import TIE, settle_ties, tied
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.plan import command as plan
from parallel3d.tools.plan import score as plan_score
from tests.planned_runs import planned_run

CASES = HARDWARE.parent / "cases" / "published.json"
Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def blind() -> Score:
    return plan_score.with_ranges(read_cases(CASES, [HARDWARE], leave_out_source=True))


def test_sources_left_out_are_predicted_within_the_bars(blind: Score) -> None:
    assert not blind.skipped
    assert blind.throughput.cases > 400
    assert blind.memory.cases > 100
    assert (blind.throughput.median or 99) <= 12
    assert (blind.throughput.p90 or 99) <= 40
    assert abs(blind.throughput.bias or 99) <= 5
    assert (blind.memory.median or 99) <= 12
    assert (blind.fit.accuracy or 0) >= 92


def test_ranges_hold_the_truth_in_eight_cases_of_ten(blind: Score) -> None:
    for errors in (blind.throughput, blind.memory):
        assert errors.covered is not None
        assert 75 <= errors.covered <= 87


def test_each_case_of_the_score_has_its_ranges(tmp_path: Path, capsys: Said) -> None:
    some = tmp_path / "some.json"
    some.write_text(json.dumps(json.loads(CASES.read_text())[:3]))
    assert plan.main(["score", str(some), "--leave-out", "source", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    for known, case in zip(tree["cases"], tree["source_left_out"]["cases"], strict=True):
        said = case["predicted"]
        around = case["ranges"]
        assert known["framework"] == "megatron-2021"
        assert case["framework"] == "unknown-2022"
        assert around["step_time_s"]["low"] < said["step_time_s"] < around["step_time_s"]["high"]
        wide, narrow = (each["ranges"]["memory_gib"] for each in (case, known))
        assert wide["high"] / wide["low"] > narrow["high"] / narrow["low"]
        assert wide["level"] == 0.8


def run(framework: str, hardware: str = "h100-80gb", **layout: Any) -> PlannedRun:
    framework = PARALLEL3D if framework == "parallel3d" else frameworks()[framework]
    return planned_run(framework, hardware, **layout)


def test_a_range_is_wider_where_less_is_known() -> None:
    recorded = plan_score.recorded_accuracy()

    def speed(framework: str, hardware: str = "h100-80gb", **layout: Any) -> float:
        return error_model_of(run(framework, hardware, **layout), recorded).throughput

    # which was never measured on a GPU
    assert speed("nemo") < speed("unknown") == speed("parallel3d")
    assert speed("nemo") < speed("nemo", "mi300x") < speed("nemo", "cpu") == pytest.approx(log(10))
    assert (
        speed("nemo", dp_shard=64)
        == speed("nemo", dp_shard=256)
        < speed("nemo", dp_shard=256, parameter_shards=256)
    )
    memory = {
        name: error_model_of(run(name), recorded).memory
        for name in ("parallel3d", "nemo", "unknown")
    }
    assert memory["parallel3d"] < memory["nemo"] < memory["unknown"]


def test_a_layout_that_fills_the_safe_share_fits_with_the_chance_that_was_asked_for() -> None:
    spread = ErrorModel(throughput=0.1, memory=0.1)
    for risk in (0.01, 0.05, 0.5, 0.9):
        assert spread.chance_to_fit(safe_share(0.1, risk) * 80e9, 80e9) == pytest.approx(1 - risk)
    around = spread.around("memory", 60.0)
    assert around.low < 60 < around.high
    assert around.low * around.high == pytest.approx(3600)


def test_equal_layouts_come_with_less_memory_first() -> None:
    shape = named_shape("llama3-8b", shape_cards())
    cluster = load_cluster("h100-80gb", [HARDWARE])
    asked = PlanRequest(
        shape=shape,
        cluster=cluster,
        gpus=64,
        seq_len=8192,
        global_batch_size=512,
    )
    found = search(asked, top=10)
    settled = settle_ties(found)
    speeds = [each.cost.tokens_per_s_per_gpu for each in settled.strategies]
    equal = tied(settled.strategies)
    assert equal == tied(found.strategies) > 1
    assert sorted(speeds) == sorted(each.cost.tokens_per_s_per_gpu for each in found.strategies)
    assert min(speeds[:equal]) >= (1 - TIE) * max(speeds) > max(speeds[equal:])
    held = [
        round(10 * each.memory.total / asked.usable_bytes) for each in settled.strategies[:equal]
    ]
    assert held == sorted(held)
    assert settle_ties(replace(found, strategies=())).strategies == ()


def test_risk_and_mem_fraction_say_the_same_and_not_both(capsys: Said) -> None:
    asked = "--model llama3-8b --gpu h100 --gpus 8 --seq-len 4096 --global-batch 64 --json"

    def fraction(*options: str) -> float:
        assert plan.main([*asked.split(), *options]) == 0
        found: float = json.loads(capsys.readouterr().out)["input"]["memory_fraction"]
        return found

    assert fraction("--risk", "0.01") < fraction() < fraction("--risk", "0.3")
    assert fraction("--mem-fraction", "0.8") == 0.8
    for wrong in (("--risk", "0.1", "--mem-fraction", "0.9"), ("--risk", "0")):
        assert plan.main([*asked.split(), *wrong]) == 2
        assert "--risk" in capsys.readouterr().err
