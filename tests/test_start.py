"""`checkpoint.start_from` as a user types it: where the weights are found, what is refused, and
what a restart does."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from parallel3d import recipes
from parallel3d.checkpoint.store import check_start, find_start
from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.hugging_face import to_hugging_face
from parallel3d.config.recipe import (
    CheckpointConfig,
    OptimizerConfig,
    Recipe,
)
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.recipes.pretrain import main
from tests.one_rank import SMALL, one_rank, read_metrics

RECIPE = replace(
    SMALL,
    model=replace(SMALL.model, layers=2),
    optimizer=OptimizerConfig(lr=0.02),
    checkpoint=CheckpointConfig(every=2),
)
Said = pytest.CaptureFixture[str]


def run(recipe: Recipe, folder: Path) -> list[dict[str, float]]:
    """Runs a recipe in this process, into `folder`, and returns its metrics."""
    folder.mkdir(exist_ok=True)
    recipes.work(replace(recipe, run_dir=str(folder)), one_rank(folder.parent))
    return read_metrics(folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints of steps 2 and 4."""
    folder: Path = tmp_path_factory.mktemp("start") / "source"
    run(RECIPE, folder)
    return folder


def test_a_new_run_begins_with_the_weights_and_nothing_else(
    source: Path, tmp_path: Path, capsys: Said
) -> None:
    first = json.loads((source / "metrics.jsonl").read_text().splitlines()[0])
    train = replace(RECIPE.train, steps=2, global_batch_size=4, seq_len=8, seed=7)
    other = replace(
        RECIPE,
        train=train,
        optimizer=OptimizerConfig(name="muon"),
        checkpoint=CheckpointConfig(
            every=1,
            resume="auto",
            start_from=str(source),
        ),
    )
    capsys.readouterr()
    with mock.patch(
        "parallel3d.build_engine.initial_part", side_effect=AssertionError("weights were drawn")
    ):
        lines = run(other, tmp_path / "new")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["tokens"] == 4 * 8
    assert lines[0]["loss"] < 5.4 < 5.5 < first["loss"]  # log 264 is 5.58
    assert (
        f"initial weights loaded from {source}/checkpoints/step_00000004" in capsys.readouterr().err
    )
    # The same command again goes on, and needs the source no more.
    gone = replace(
        other,
        checkpoint=replace(other.checkpoint, start_from="runs/gone"),
        train=replace(train, steps=3),
    )
    lines = run(gone, tmp_path / "new")
    assert [line["step"] for line in lines] == [1, 2, 3]
    said = capsys.readouterr().err
    assert "resumed at step 2 from" in said
    assert "checkpoint.start_from = runs/gone is ignored" in said


def test_a_damaged_newest_checkpoint_is_passed_over(
    source: Path, tmp_path: Path, capsys: Said
) -> None:
    shutil.copytree(source, tmp_path / "copy")
    damaged = tmp_path / "copy/checkpoints/step_00000004"
    next(damaged.glob("*.distcp")).write_bytes(b"")
    start = replace(RECIPE, checkpoint=CheckpointConfig(start_from=str(tmp_path / "copy")))
    run(start, tmp_path / "new")
    said = capsys.readouterr().err
    assert f"skipped: {damaged}" in said
    assert "initial weights loaded from" in said
    assert "step_00000002" in said


def test_another_model_is_refused_with_all_that_differs(source: Path, tmp_path: Path) -> None:
    wider = replace(RECIPE.model, layers=1, hidden=24, tied_embeddings=True)
    start = replace(RECIPE, model=wider, checkpoint=CheckpointConfig(start_from=str(source)))
    with pytest.raises(CheckpointError) as refusal:
        run(start, tmp_path / "new")
    dist.destroy_process_group()  # after an error a worker leaves it open, and ends
    lines = str(refusal.value).splitlines()
    assert len(lines) == 1 + 3 + 9 + 9
    for line in (
        "  model.head.weight is [264, 16] there and missing here",
        "  model.layers.0.mlp.up.weight is [32, 16] there and [32, 24] here",
        "  model.layers.1.attention_norm.weight is [16] there and missing here",
    ):
        assert line in lines


@pytest.mark.parametrize(
    "settings, refusal",
    [
        (
            "checkpoint.start_from=runs/none",
            "checkpoint.start_from = runs/none: has no complete checkpoint",
        ),
        (
            "checkpoint.start_from=empty",
            "checkpoint.start_from = empty: has no complete checkpoint",
        ),
        (
            "checkpoint.start_from=runs/mine run_dir=runs/mine",
            "must not be inside run_dir = runs/mine, the folder of the new run",
        ),
        (
            "checkpoint.start_from=runs/a checkpoint.resume=runs/b",
            "checkpoint.resume = runs/b: resumes a run, but checkpoint.start_from = runs/a "
            "starts a new one; try",
        ),
    ],
)
def test_what_cannot_be_started_from_is_refused_before_a_worker_starts(
    settings: str, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    with mock.patch(
        "parallel3d.recipes.pretrain.launch_local",
        side_effect=AssertionError("workers were started"),
    ):
        assert main(["quickstart", *settings.split()]) == 2
    assert refusal in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["empty"], "nothing was made or moved"


def test_a_folder_of_transformers_is_compared_with_the_recipe_before_a_worker_starts(
    tmp_path: Path,
) -> None:
    model = replace(RECIPE.model, rope_theta=500_000.0, norm_eps=1e-6)
    config = to_hugging_face(model, seq_len=16, dtype="float32", end_of_text=None)
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        find_start(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="no weights as safetensors"):
        find_start(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert find_start(str(tmp_path)) == [tmp_path]
    assert check_start(tmp_path, model) == []
    assert check_start(tmp_path, RECIPE.model) == [
        f"model.rope_theta = 10000.0: the weights in {tmp_path} have 500000.0",
        f"model.norm_eps = 1e-05: the weights in {tmp_path} have 1e-06",
    ]
    with pytest.raises(ConfigError) as refusal:
        check_start(tmp_path, replace(model, heads=4, tied_embeddings=True))
    assert str(refusal.value).splitlines() == [
        f"model.heads = 4: the weights in {tmp_path} have 2; try model.heads=2",
        f"model.kv_heads = 4: the weights in {tmp_path} have 2; try model.kv_heads=2",
        f"model.head_dim = 4: the weights in {tmp_path} have 8; try model.head_dim=8",
        f"model.tied_embeddings = true: the weights in {tmp_path} have false; try "
        "model.tied_embeddings=false",
    ]
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "attention_bias": True, "hidden_act": "gelu"})
    )
    with pytest.raises(
        ConfigError,
        match="(?s)attention_bias = true of config.json is ignored.*hidden_act = gelu",
    ):
        check_start(tmp_path, model)
    experts = ExpertsConfig(count=8, per_token=2, hidden=16)
    model = replace(model, ffn_hidden=16, experts=experts)
    config = to_hugging_face(model, seq_len=16, dtype="float32", end_of_text=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check_start(tmp_path, replace(model, experts=replace(experts, bias_rate=0.1))) == []
    for other in (replace(model, experts=None), replace(model, experts=replace(experts, count=4))):
        with pytest.raises(ConfigError, match=r"count = .*have 8; try model.experts.count=8"):
            check_start(tmp_path, other)
    (tmp_path / "config.json").unlink()
    assert "only names and shapes of the weights are compared" in check_start(tmp_path, model)[0]
