"""The planner against published runs: the file reads, and its accuracy stays
within the bars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel3d.planner.published.cases import read_cases
from parallel3d.planner.published.score import Score
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.plan import command as plan
from parallel3d.tools.plan import score as plan_score

CASES = HARDWARE.parent / "cases" / "published.json"


def scored_file(path: Path) -> Score:
    return plan_score.with_ranges(read_cases(path, [HARDWARE]))


def test_runs_that_no_constant_was_set_on_are_within_the_bars_too() -> None:
    elsewhere = scored_file(CASES.with_name("elsewhere.json"))
    assert not elsewhere.skipped
    assert elsewhere.throughput.cases == 18
    assert elsewhere.memory.cases == 16
    assert (elsewhere.throughput.median or 99) <= 10
    assert (elsewhere.throughput.p90 or 99) <= 25
    assert (elsewhere.memory.median or 99) <= 30  # InternEvo keeps temporaries that no other does


Row = dict[str, Any]


@pytest.fixture
def row() -> Row:
    """The first of the published runs: 1.7 B parameters on 32 GPUs, timed."""
    first: Row = json.loads(CASES.read_text())[0]
    return first


def scored(tmp_path: Path, *rows: object) -> Score:
    (tmp_path / "cases.json").write_text(json.dumps(rows))
    return scored_file(tmp_path / "cases.json")


@pytest.mark.parametrize(
    "section, key, value, why",
    [
        ("model", "hidden", None, "model.hidden: is missing"),
        ("model", "layers", -1, "model.layers = -1: must be greater than or equal to 1"),
        ("model", "shape", "abacus", "model abacus: unknown"),
        ("model", "vocab", "n/a", "model.vocab = n/a: must be a valid integer"),
        ("parallel", "pp", 32, "parallel.pp = 32: must not exceed model.layers = 24"),
        ("parallel", "tp", 3, "hardware.gpus = 32: must be a multiple of tp x pp x cp = 3"),
        ("hardware", "gpus", 0, "hardware.gpus = 0"),
        ("hardware", "gpu", "Abacus", "hardware abacus: unknown"),
        ("train", "precision", "int4", "train.precision = int4: must be 'fp8', 'bf16'"),
        ("measured", "tflops_per_gpu", "n/a", "measured.tflops_per_gpu = n/a: must be a valid"),
        ("train", "micro_batch", 1.5, "train.micro_batch = 1.5"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why_and_the_others_are_scored(
    tmp_path: Path, row: Row, section: str, key: str, value: object, why: str
) -> None:
    broken = {**row, "id": "broken", section: {**row[section], key: value}}
    result = scored(tmp_path, broken, row, "no object")
    assert [case.id for case in result.cases] == [row["id"]]
    assert [name for name, _ in result.skipped] == ["broken", "row 3"]
    assert why in result.skipped[0][1]


def test_the_barest_row_is_priced_by_defaults_and_says_which(tmp_path: Path) -> None:
    bare = {
        "model": {"layers": 24, "hidden": 2048},
        "hardware": {"gpus": 8},
        "measured": None,
        "tags": None,
    }
    [case] = scored(tmp_path, bare).cases
    assert case.id == "row 1"
    assert case.source == "unknown"
    assert case.error_pct is None
    assert case.predicted.parameters == pytest.approx(1.3e9, rel=0.05)
    assert 0.2 < case.predicted.mfu < 0.7
    assert {
        "hardware.gpu (default)",
        "parallel.tp (default)",
        "train.micro_batch (default)",
    } <= set(case.filled)


def test_a_file_of_which_no_case_can_be_predicted_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = tmp_path / "cases.json"
    cases.write_text('[{"id": "mine"}]')
    assert plan.main(["score", str(cases)]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "no case can be predicted; the first is mine: hardware.gpus: is missing" in said.err
