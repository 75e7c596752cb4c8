"""The planner against published runs: the file reads, and the accuracy that docs/planner.md states holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parallel3d.errors import ConfigError
from parallel3d.planner.case_job import network_gb_per_s
from parallel3d.planner.cases import flops_definition, read_cases
from parallel3d.planner.score import Score
from parallel3d.tools import plan_score

CASES = plan_score.HARDWARE.parent / "cases" / "published.json"


@pytest.fixture(scope="module")
def published() -> Score:
    return plan_score.score_file(CASES)


def test_throughput_and_memory_are_within_the_bars(published: Score) -> None:
    assert published.throughput.cases > 400 and published.memory.cases > 100
    assert published.throughput.median is not None and published.throughput.median <= 8
    assert published.throughput.p90 is not None and published.throughput.p90 <= 25
    assert published.memory.median is not None and published.memory.median <= 8
    assert published.fit.accuracy is not None and published.fit.accuracy >= 95


def test_every_case_is_predicted(published: Score) -> None:
    assert not published.skipped
    assert all(case.predicted.step_time_s > 0 and case.predicted.memory_gib > 0 for case in published.cases)


def test_stated_parameter_counts_are_met(published: Score) -> None:
    stated = {case.id: case.stated_parameters_b for case in read_cases(CASES, [plan_score.HARDWARE]).cases}
    for case in published.cases:
        if case.source in ("llm_foundry", "megatron_sc21"):
            assert case.predicted.parameters / 1e9 == pytest.approx(stated[case.id], rel=0.035), case.id


def test_the_json_has_the_keys_of_the_contract(published: Score) -> None:
    tree = json.loads(json.dumps(published.to_json()))
    assert {"cases", "median_abs_error_pct", "worst_abs_error_pct"} <= tree.keys()
    assert {"id", "predicted", "measured", "error_pct"} <= tree["cases"][0].keys()
    assert {"parameters", "fits", "memory_gib", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"} <= (
        tree["cases"][0]["predicted"].keys()
    )


@pytest.mark.parametrize(
    ("text", "gb_per_s"),
    [
        ("8x 200 Gbps HDR InfiniBand per node", 25.0),
        ("eight Mellanox 200 Gbps HDR InfiniBand HCAs per node", 25.0),
        ("1600 Gbps node-node (RoCE)", 25.0),
        ("400 Gb/s RDMA (CX-7) per GPU", 50.0),
        ("Omni-Path, 4 OPA links per node (README)", 6.25),
        ("4 x 100 Gb RoCE per node", 6.25),
        ("RoCE RDMA", None),
    ],
)
def test_network_words_become_a_bandwidth(text: str, gb_per_s: float | None) -> None:
    assert network_gb_per_s(text, 8) == gb_per_s


def test_definitions_of_flops_are_told_apart() -> None:
    assert flops_definition("hardware FLOPs incl. full activation recompute: F = 96 B s l h^2 (...)") == (
        "megatron_recompute"
    )
    assert flops_definition("model FLOPs: (6 N s + 12 L h s^2) per sequence, no recompute") == "palm"
    assert flops_definition("") == "model"


def test_a_case_that_cannot_be_read_is_named_and_skipped(tmp_path: Path) -> None:
    broken = json.loads(CASES.read_text())[0]
    broken["model"]["hidden"] = None
    (tmp_path / "cases.json").write_text(json.dumps([broken]))
    file = read_cases(tmp_path / "cases.json", [plan_score.HARDWARE])
    assert not file.cases and file.skipped[0][0] == broken["id"]


def test_a_file_that_is_no_list_of_cases_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text("{}")
    with pytest.raises(ConfigError, match="must be a list"):
        read_cases(tmp_path / "cases.json", [plan_score.HARDWARE])


def test_the_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cases.json").write_text(json.dumps(json.loads(CASES.read_text())[:3]))
    assert plan_score.main([str(tmp_path / "cases.json"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cases"]) == 3
