"""`parallel3d-plan compare`: a run's own figures beside the plan of its recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.parameters import model_flops_per_token
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.search.request import Strategy
from parallel3d.reporting.metrics import MetricsFile
from parallel3d.tools.plan import command as plan
from parallel3d.tools.plan.compare import compare
from parallel3d.tools.plan.hardware import find_cluster
from parallel3d.watch.step_clock import CAUSES
from tests.plan_json import Said, error_line
from tests.planned_runs import plan_request
from tests.report_runs import METRICS

RECIPE = Recipe(
    model=ModelConfig(
        layers=4,
        hidden=512,
        heads=8,
        ffn_hidden=1536,
        vocab=4096,
    ),
    parallel=ParallelConfig(pp=2, dp_shard=2, tp=2),
    train=TrainConfig(
        steps=60,
        global_batch_size=16,
        seq_len=1024,
        precision="bf16",
    ),
)


def run_of(folder: Path, times: list[float]) -> Path:
    """A run that logged every ten steps."""
    (folder / "config.yaml").write_text(to_yaml(RECIPE))
    metrics = MetricsFile(folder / "metrics.jsonl", resumed_step=0)
    line = replace(METRICS, peak_memory_bytes=1 << 30)
    for at, seconds in enumerate(times):
        metrics.write(replace(line, step=10 * at + 1, step_time_s=seconds))
    return folder


def test_the_median_without_the_first_line_is_compared_with_the_plan(tmp_path: Path) -> None:
    found = compare(run_of(tmp_path, [9.0, 0.2, 0.1, 0.4, 0.3, 0.2]), find_cluster("a100"))
    assert found.measured.lines == 5
    assert found.measured.step_time_s == 0.2
    asked = plan_request(
        RECIPE.model,
        "a100-80gb",
        gpus=8,
        seq_len=1024,
        global_batch_size=16,
        precision="bf16",
    )
    planned = Strategy(asked, RECIPE.parallel)
    assert found.figures["step_time_s"] == (pytest.approx(planned.cost.step_time_s), 0.2)
    assert found.figures["tokens_per_s_per_device"][1] == pytest.approx(16 * 1024 / 8 / 0.2)
    predicted, measured = found.figures["peak_allocated_gib"]
    assert measured == 1.0
    # CUDA's context is not the allocator's
    assert predicted < worst_rank(found.run).total / 2**30 - 0.5


def test_each_cause_is_compared_and_saves_are_left_out(tmp_path: Path, capsys: Said) -> None:
    run = run_of(tmp_path, [])
    metrics = MetricsFile(run / "metrics.jsonl", resumed_step=0)
    for at, saved_s in enumerate((5.0, 0.3, 0.0, 0.0)):
        time_s = dict.fromkeys(CAUSES, 0.0) | {"compute": 0.1, "tp": 0.05, "data": 0.04}
        time_s |= {"checkpoint": saved_s, "other": 0.01}
        step_s = sum(time_s.values())
        metrics.write(replace(METRICS, step=10 * at + 1, step_time_s=step_s, time_s=time_s))
    found = compare(run, find_cluster("a100"))
    assert found.measured.step_time_s == pytest.approx(0.2)
    parts = found.cost.parts
    assert found.causes["tp"] == (parts.tp, 0.05)
    assert found.causes["overhead"] == (parts.overhead, 0.01)
    assert found.causes["data"] == (0.0, 0.04)
    assert "checkpoint" not in found.causes
    predicted, measured = (sum(each) for each in zip(*found.causes.values(), strict=True))
    assert predicted == pytest.approx(found.cost.step_time_s)
    assert measured == pytest.approx(0.2)
    assert plan.main(["compare", str(run), "--gpu", "a100"]) == 0
    assert "data, s 0 0.04" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_was_on_another_device_says_so(tmp_path: Path, capsys: Said) -> None:
    """The MFU of a run is the share of its own device's peak: here of an A100's 312 TFLOP/s, or of
    none known."""
    folders = [tmp_path / name for name in ("a100", "cpu")]
    for folder in folders:
        folder.mkdir()
        run_of(folder, [9.0, 0.5, 0.5])
    flops = model_flops_per_token(from_config(RECIPE.model), RECIPE.train.seq_len)
    metrics = MetricsFile(folders[0] / "metrics.jsonl", resumed_step=0)
    for step in (1, 11):
        line = replace(
            METRICS,
            step=step,
            step_time_s=0.5,
            tokens_per_s_per_device=4096.0,
        )
        metrics.write(replace(line, mfu=4096.0 * flops / 312e12))
    cautions = [
        compare(folder, find_cluster(name)).other_device
        for folder in folders
        for name in ("a100", "h100", "cpu")
    ]
    assert [caution is not None for caution in cautions] == [False, True, True, True, True, False]
    assert plan.main(["compare", str(folders[0]), "--gpu", "h100"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "its MFU refers to a peak of 312 TFLOP/s, but H100-80GB-SXM has 989.4" in page


@pytest.mark.parametrize(
    "times, arguments, status, rule",
    [
        ([9.0, 0.1], "--gpu h1000", 2, "h1000"),
        ([9.0, 0.1], "", 2, "give exactly one of them, for example --gpu h100"),
        ([9.0, 0.1], "--gpu h100 --hardware mine.yaml", 2, "give exactly one of them"),
        ([9.0], "--gpu h100", 65, "too few lines, because the first one includes start-up"),
    ],
)
def test_a_bad_input_is_one_line(
    times: list[float], arguments: str, status: int, rule: str, tmp_path: Path, capsys: Said
) -> None:
    assert plan.main(["compare", str(run_of(tmp_path, times)), *arguments.split()]) == status
    assert rule in error_line(capsys)


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: Said) -> None:
    assert plan.main(["compare", str(tmp_path), "--gpu", "h100"]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
    run = run_of(tmp_path, [])
    for lines in ("[]", '{"step": 1}'):
        (run / "metrics.jsonl").write_text(f"{lines}\n")
        assert plan.main(["compare", str(run), "--gpu", "h100"]) == 65
        assert "not the metrics of a run (a line is damaged)" in error_line(capsys)
