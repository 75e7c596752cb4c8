"""`--measured`: one run of a cluster corrects what is predicted of every other, and narrows its
range."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
from test_plan_compare import LINE, RECIPE, run_of

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.hardware.cluster import Scales, with_scales
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.parameters import model_flops_per_token
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.published.anchor import MeasuredRun, scales_of
from parallel3d.planner.search.question import Question
from parallel3d.planner.time.step import step_cost
from parallel3d.reporting.metrics import MetricsFile
from parallel3d.tools.plan import command as plan
from parallel3d.tools.plan.compare import compare
from parallel3d.tools.plan.hardware import find_cluster
from parallel3d.tools.plan.models import read_model

Said = pytest.CaptureFixture[str]
ON = "--model llama3-8b --gpu h100 --gpus 16 --seq-len 8192 --global-batch 128 --fix tp=4 pp=1"
ASKED = Question(
    shape=read_model("llama3-8b").shape,
    cluster=find_cluster("h100"),
    gpus=16,
    seq_len=8192,
    global_batch_size=128,
)
ALONE = ParallelConfig(dp_shard=16, recompute="full")  # little of its traffic shows
TALKING = ParallelConfig(tp=16, sequence_parallel=True)  # over two nodes


def in_truth(parallel: ParallelConfig, scales: Scales) -> MeasuredRun:
    """A run of a cluster that is as much slower, and fuller, as the scales say."""
    run = ASKED.planned_run(parallel)
    there: PlannedRun = replace(run, cluster=with_scales(run.cluster, scales))
    return MeasuredRun(
        run=run, step_time_s=step_cost(there).step_time_s, memory_bytes=worst_rank(there).total
    )


def tree(arguments: str, capsys: Said) -> Any:
    assert plan.main([*shlex.split(arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_that_sends_little_tells_of_arithmetic_alone() -> None:
    found = scales_of([in_truth(ALONE, Scales(arithmetic=1.3))])
    assert 1.15 < found.arithmetic < 1.3 and found.network == pytest.approx(1.0, abs=0.02)
    assert (found.timed, found.weighed) == (("parallel3d",), ("parallel3d",))
    talking = scales_of([in_truth(TALKING, Scales(network=1.5))])
    assert log(talking.network) > 4 * log(talking.arithmetic) > 0


def test_runs_that_send_more_and_less_tell_the_two_apart() -> None:
    truth = Scales(arithmetic=1.2, network=1.6, memory=1.3)
    found = scales_of([in_truth(layout, truth) for layout in (ALONE, TALKING)] * 12)
    assert found.arithmetic == pytest.approx(truth.arithmetic, rel=0.03)
    assert found.network == pytest.approx(truth.network, rel=0.06)
    assert found.memory == pytest.approx(truth.memory, rel=0.05)


def test_what_is_counted_exactly_is_not_scaled() -> None:
    run = ASKED.planned_run(ALONE)
    plain = worst_rank(run)
    fuller = worst_rank(replace(run, cluster=with_scales(run.cluster, Scales(memory=1.5))))
    assert fuller.total - plain.total == pytest.approx(0.5 * plain.beside_states)
    for kind in ("parameters", "gradients", "optimizer"):
        assert getattr(fuller, kind) == getattr(plain, kind)


def test_the_same_speed_in_every_unit(capsys: Said) -> None:
    predicted = tree(ON, capsys)["strategies"][0]
    said = {
        "step_s": predicted["step_time_s"] * 1.2,
        "tokens_per_s": predicted["tokens_per_s_per_gpu"] * 16 / 1.2,
        "tokens_per_s_per_device": predicted["tokens_per_s_per_gpu"] / 1.2,
        "mfu": predicted["mfu"] / 1.2,
    }
    at = predicted["parallel"]
    layout = f"tp=4 microbatch_size={at['microbatch_size']} sharding={at['sharding']}"
    found = [
        tree(f"{ON} --measured {key}={value} at {layout}", capsys) for key, value in said.items()
    ]
    steps = [each["strategies"][0]["step_time_s"] for each in found]
    assert steps == pytest.approx([steps[0]] * 4, rel=1e-3)
    assert predicted["step_time_s"] * 1.1 < steps[0] < predicted["step_time_s"] * 1.2
    widths = [each["ranges"]["step_time_s"] for each in (predicted, found[0]["strategies"][0])]
    before, after = (each["high"] / each["low"] for each in widths)
    assert after < before
    assert found[0]["input"]["anchored"]["timed"] == ["parallel3d"]


def test_the_folder_of_a_run_is_a_measurement(tmp_path: Path, capsys: Said) -> None:
    """The run was on A100s, half as slow again as predicted, which `compare` lays to its cause."""
    run = run_of(tmp_path, [])
    cluster = find_cluster("a100")
    predicted = compare(run_of(tmp_path, [9.0, 1.0]), cluster)
    predicted_s, bytes_ = predicted.cost.step_time_s, round(1.1 * predicted.memory.allocated)
    (run / "metrics.jsonl").unlink()
    metrics, tokens = (
        MetricsFile(run / "metrics.jsonl", resumed_step=0),
        16 * 1024 / 8 / (1.5 * predicted_s),
    )
    mfu = (
        tokens
        * model_flops_per_token(from_config(RECIPE.model), 1024)
        / cluster.device.peak("bf16")
    )
    line = replace(LINE, step_time_s=1.5 * predicted_s, tokens_per_s_per_device=tokens, mfu=mfu)
    line = replace(line, peak_memory_bytes=bytes_)
    for step in (1, 11, 21, 31):
        metrics.write(replace(line, step=step))
    assert plan.main(["compare", str(run), "--gpu", "a100"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "scales arithmetic takes 1." in page
    layout = "--fix tp=2 pp=2 dp_shard=2 microbatch_size=1"
    asked = f"--model {run}/config.yaml {layout}"
    before, after = (
        tree(f"{asked} --gpu a100{more}", capsys)["strategies"][0]["step_time_s"]
        for more in ("", f" --measured {run}")
    )
    assert 1.1 < after / before < 1.5
    assert (
        "measured: parallel3d on 8 devices"
        in tree(f"{asked} --gpu a100 --measured {run}", capsys)["notes"][0]
    )
    assert plan.main([*shlex.split(f"{asked} --gpu h100 --measured {run}")]) == 2
    assert "the run was not on H100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (
            "tokens_per_s=6000",
            "times as long as predicted, which is not believed; tokens_per_s is of all 16",
        ),
        ("tokens_per_s=10M at tp=4", "which is not believed"),
        ("memory_gib=95 at tp=4", "and the 79.1 of H100"),
        ("memory_gib=3", "the layout's states"),
        ("step_s=12 at tp=3", "a layout of 3 devices, and 16 are asked about"),
        ("step_s=12 at tp=64 gpus=64", "a layout that does not run: parallel.tp = 64"),
        ("step_s=12 at gpus=none", "gpus=none: must be a whole number"),
        ("step_s=12 at engine=nobody", "nobody"),
        ("step_s=fast", "step_s=fast: must be a number above 0"),
        ("speed=3", "figures are tokens_per_s"),
        ("mfu=45% step_s=3", "keep one of speed and one of memory"),
        ("/nowhere", "no run's folder"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words: str, rule: str, capsys: Said) -> None:
    assert plan.main([*shlex.split(ON), "--measured", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and rule in line
