"""`parallel3d-plan memory`, `hardware`, `models` and `score`: what they print; and the accuracy
that plans quote."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.models import shape_cards
from parallel3d.planner.memory.ranks import memory_by_rank, worst_rank
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.plan import command as plan
from parallel3d.tools.plan.hardware import find_cluster
from parallel3d.tools.verify.command import run_of_recipe
from tests.plan_json import Said, plan_json

CASES = HARDWARE.parent / "cases" / "published.json"
RUN = "train: {steps: 1, global_batch_size: 8, seq_len: 1024}\nparallel: {dp_shard: 8}\n"
LAYOUT = (
    "memory --model llama3-8b --gpu h100 --layout tp=4,pp=4,dp_shard=2 --seq-len 8192 "
    "--global-batch 64"
)


def said(arguments: str, capsys: Said, *, status: int = 0) -> str:
    assert plan.main(shlex.split(arguments)) == status
    return capsys.readouterr().out


def test_memory_has_every_rank_and_the_worst_is_named(capsys: Said) -> None:
    found = plan_json(LAYOUT, capsys)
    totals = [rank["memory_gib"]["total"] for rank in found["ranks"]]
    assert len(totals) == 4
    assert sum(rank["layers"] for rank in found["ranks"]) == 32
    assert found["memory_gib"]["total"] == max(totals) == totals[found["worst_rank"]]
    assert found["fits"] is True


def test_a_layout_that_does_not_fit_ends_with_3(capsys: Said) -> None:
    arguments = "memory --model llama3-70b --gpu h100 --layout tp=8 --seq-len 8192 --global-batch 8"
    assert "does not fit: " in said(arguments, capsys, status=3)
    assert plan_json(arguments, capsys, status=3)["fits"] is False


def test_a_recipe_is_its_own_layout(capsys: Said) -> None:
    assert plan_json("memory --model quickstart --gpu cpu", capsys)["parallel"]["tp"] == 2


def test_the_optimizer_dropout_and_cut_of_a_recipe_are_counted(
    tmp_path: Path, capsys: Said
) -> None:
    plain = Recipe(
        model=ModelConfig(
            layers=6,
            hidden=1024,
            heads=16,
            ffn_hidden=2816,
            vocab=32000,
        ),
        parallel=ParallelConfig(pp=2, dp_shard=2, stage_boundaries=(2,)),
        train=TrainConfig(
            steps=1,
            global_batch_size=8,
            seq_len=1024,
            precision="bf16_pure",
        ),
    )
    changes = {
        "bf16_pure": plain,
        "muon": replace(plain, optimizer=OptimizerConfig(name="muon")),
        "dropout": replace(plain, model=replace(plain.model, dropout=0.1)),
        "even": replace(plain, parallel=replace(plain.parallel, stage_boundaries=(3,))),
    }
    totals = set()
    for name, recipe in changes.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(to_yaml(recipe))
        found = plan_json(f"memory --model {path} --gpu h100", capsys)
        worst = worst_rank(run_of_recipe(recipe))  # which `verify` compares with the dry run
        assert found["memory_gib"]["total"] == pytest.approx(worst.total / 2**30, rel=1e-4), name
        assert found["notes"] == []
        totals.add(found["memory_gib"]["total"])
    assert len(totals) == len(changes)


def test_any_rank_of_stages_cut_by_hand_can_be_the_fullest() -> None:
    model = ModelConfig(
        layers=18,
        hidden=512,
        heads=8,
        ffn_hidden=1408,
        vocab=32_000,
    )
    layout = ParallelConfig(
        pp=4,
        stage_boundaries=(1, 2, 9),
        microbatch_size=1,
    )
    train = TrainConfig(steps=1, global_batch_size=8, seq_len=1024)
    run = run_of_recipe(Recipe(model=model, parallel=layout, train=train))
    assert worst_rank(run).total == max(memory.total for memory in memory_by_rank(run))


def test_what_is_not_counted_of_a_recipe_is_said(tmp_path: Path, capsys: Said) -> None:
    path = tmp_path / "dropout.yaml"
    path.write_text(f"model: {{name: llama3.2-1b, attention_dropout: 0.1}}\n{RUN}")
    note = (
        "model.attention_dropout = 0.1 is counted in memory only, with the time of a fused kernel"
    )
    for command in ("memory", "recommend --gpus 8", "limits batch --gpus 8", "sweep --gpus 8"):
        assert plan_json(f"{command} --model {path} --gpu h100", capsys)["notes"] == [note]


def test_a_clusters_file_is_its_devices_but_for_its_links(tmp_path: Path, capsys: Said) -> None:
    cluster = find_cluster("jean-zay-a100")
    device = find_cluster("a100-80gb")
    assert cluster.device == replace(device.device, price_per_hour=None, price_from=None)
    assert cluster.gpus_per_node == device.gpus_per_node
    assert cluster.network.bandwidth == 6.25e9
    assert cluster.network.latency_s == device.network.latency_s
    mine = tmp_path / "mine.yaml"
    mine.write_text("device: h200\nprice_per_hour: 3\nnode: {gpus: 4}\nnetwork: {gb_per_s: 12.5}\n")
    asked = f"--model llama3-8b --cluster {mine} --gpus 8 --seq-len 4096 --global-batch 64"
    hardware = plan_json(asked, capsys)["input"]["hardware"]
    assert hardware["device_file"] == "h200"
    assert hardware["gpus_per_node"] == 4
    assert hardware["price_per_hour"] == 3
    mine.write_text("device: mine.yaml\n")
    assert plan.main(shlex.split(asked)) == 2
    assert "must be a device file, not a cluster's" in capsys.readouterr().err


def test_models_are_counted(capsys: Said) -> None:
    listed = said("models", capsys)
    assert "124,439,808" in listed
    for name in shape_cards():
        assert f"\n{name} " in listed
    assert "8,030,261,248 parameters" in said("models llama3-8b", capsys)
    assert plan_json("models gpt3-175b", capsys)["parameters"] == 174_604_259_328
    assert len(plan_json("models", capsys)["models"]) > 40


def test_score_has_the_keys_of_its_contract(tmp_path: Path, capsys: Said) -> None:
    some = tmp_path / "some.json"
    some.write_text(json.dumps(json.loads(CASES.read_text())[:20]))
    found = plan_json(f"score {some}", capsys)
    assert {"cases", "median_abs_error_pct", "worst_abs_error_pct"} <= set(found)
    wanted = {
        "parameters",
        "fits",
        "memory_gib",
        "step_time_s",
        "tokens_per_s_per_gpu",
        "tflops_per_gpu",
        "mfu",
    }
    for case in found["cases"]:
        assert {"id", "predicted", "measured", "error_pct"} <= set(case)
        assert wanted <= set(case["predicted"])
