"""`--measured`: one run of a cluster corrects what is predicted of every other, and narrows its
range."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan_compare import RECIPE, run_of

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.hardware.cluster import Scales, with_scales
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.parameters import model_flops_per_token
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.published.run_correction import MeasuredRun, scales_of
from parallel3d.planner.time.step import step_cost
from parallel3d.reporting.metrics import MetricsFile
from parallel3d.tools.plan import command as plan
from parallel3d.tools.plan.compare import compare
from parallel3d.tools.plan.hardware import find_cluster
from tests.plan_json import Said, plan_json
from tests.planned_runs import plan_request
from tests.report_runs import METRICS

ON = "--model llama3-8b --gpu h100 --gpus 16 --seq-len 8192 --global-batch 128 --fix tp=4 pp=1"
ASKED = plan_request(
    gpus=16,
    seq_len=8192,
    global_batch_size=128,
)
ALONE = ParallelConfig(dp_shard=16, gather="step", recompute="full")  # little of its traffic shows
TALKING = ParallelConfig(tp=16, sequence_parallel=True)  # over two nodes
IN_A_NODE = ParallelConfig(tp=8, dp_shard=2, sequence_parallel=True)


def in_truth(parallel: ParallelConfig, scales: Scales) -> MeasuredRun:
    """A run of a cluster that is as much slower, and fuller, as the scales say."""
    run = ASKED.planned_run(parallel)
    there: PlannedRun = replace(run, cluster=with_scales(run.cluster, scales))
    return MeasuredRun(
        run=run,
        step_time_s=step_cost(there).step_time_s,
        memory_bytes=worst_rank(there).allocated,
    )


def test_one_run_moves_every_prediction_alike() -> None:
    """Whatever made it slow, the order of layouts stays."""
    for truth in (Scales(arithmetic=1.3), Scales(network=2.0)):
        found = scales_of([in_truth(TALKING, truth)])
        assert found.arithmetic == found.node == found.network > 1.03
        assert (found.timed, found.weighed) == (("parallel3d",), ("parallel3d",))
        steps = []
        for scales in (Scales(), found):
            runs = [in_truth(layout, scales) for layout in (ALONE, TALKING, IN_A_NODE)]
            steps.append([each.step_time_s or 0 for each in runs])
        for plain_s, scaled_s in zip(*steps, strict=True):
            assert scaled_s / plain_s == pytest.approx(found.arithmetic, rel=0.01)


def test_more_runs_tell_devices_links_in_a_node_and_network_apart() -> None:
    truth = Scales(arithmetic=1.2, node=1.4, network=1.6, memory=1.3)
    found = scales_of([in_truth(layout, truth) for layout in (ALONE, TALKING, IN_A_NODE)] * 12)
    assert found.arithmetic == pytest.approx(truth.arithmetic, rel=0.03)
    assert found.node == pytest.approx(truth.node, rel=0.1)
    assert found.network == pytest.approx(truth.network, rel=0.06)
    assert found.memory == pytest.approx(truth.memory, rel=0.05)


def test_what_is_counted_exactly_is_not_scaled() -> None:
    run = ASKED.planned_run(ALONE)
    plain = worst_rank(run)
    fuller = worst_rank(replace(run, cluster=with_scales(run.cluster, Scales(memory=1.5))))
    states = plain.parameters + plain.gradients + plain.optimizer
    assert fuller.total - states == pytest.approx(1.5 * (plain.total - states))
    for kind in ("parameters", "gradients", "optimizer"):
        assert getattr(fuller, kind) == getattr(plain, kind)


def test_the_folder_of_a_run_is_a_measurement(tmp_path: Path, capsys: Said) -> None:
    """The run was on A100s, half as slow again as predicted, which `compare` lays to its cause."""
    run = run_of(tmp_path, [])
    cluster = find_cluster("a100")
    predicted = compare(run_of(tmp_path, [9.0, 1.0]), cluster)
    predicted_s = predicted.cost.step_time_s
    bytes_ = round(1.1 * predicted.memory.allocated)
    (run / "metrics.jsonl").unlink()
    metrics = MetricsFile(run / "metrics.jsonl", resumed_step=0)
    tokens = 16 * 1024 / 8 / (1.5 * predicted_s)
    mfu = (
        tokens
        * model_flops_per_token(from_config(RECIPE.model), 1024)
        / cluster.device.peak("bf16")
    )
    line = replace(
        METRICS,
        step_time_s=1.5 * predicted_s,
        tokens_per_s_per_device=tokens,
        mfu=mfu,
    )
    line = replace(line, peak_memory_bytes=bytes_)
    for step in (1, 11, 21, 31):
        metrics.write(replace(line, step=step))
    assert plan.main(["compare", str(run), "--gpu", "a100"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert "scales arithmetic takes 1." in page
    layout = "--fix tp=2 pp=2 dp_shard=2 microbatch_size=1"
    asked = f"--model {run}/config.yaml {layout}"
    before, after = (
        plan_json(f"{asked} --gpu a100{more}", capsys)["strategies"][0]["step_time_s"]
        for more in ("", f" --measured {run}")
    )
    assert 1.1 < after / before < 1.5
    assert (
        "measured: parallel3d on 8 devices"
        in plan_json(f"{asked} --gpu a100 --measured {run}", capsys)["notes"][0]
    )
    assert plan.main([*shlex.split(f"{asked} --gpu h100 --measured {run}")]) == 2
    assert "the run was not on H100" in capsys.readouterr().err
