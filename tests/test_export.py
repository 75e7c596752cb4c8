"""`parallel3d-checkpoint export` and `checkpoint.export`: what is written of a checkpoint, and what
is refused."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from parallel3d import recipes
from parallel3d.checkpoint.manifest import read_manifest
from parallel3d.checkpoint.pieces import read_own_part
from parallel3d.config.recipe import (
    CheckpointConfig,
    OptimizerConfig,
)
from parallel3d.config.rules import validate
from parallel3d.errors import ConfigError
from parallel3d.export import ExportForm, export
from parallel3d.tools.checkpoint.command import main
from parallel3d.tools.data.encode import train_bpe
from tests.one_rank import SMALL, one_rank

RECIPE = replace(
    SMALL,
    model=replace(SMALL.model, layers=2),
    train=replace(SMALL.train, steps=3),
    optimizer=OptimizerConfig(warmup_steps=2),
    checkpoint=CheckpointConfig(every=2, export="last"),
)
Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps, saved after step 2 and after the last one."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    recipe = replace(RECIPE, run_dir=str(folder))
    recipes.work(recipe, one_rank(folder.parent))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def saved(checkpoint: Path, name: str) -> torch.Tensor:
    saved = read_manifest(checkpoint).tensors[name]
    tensor = torch.empty(saved.shape)
    read_own_part(checkpoint, saved, tensor)
    return tensor


def test_a_run_exports_its_last_checkpoint_and_the_command_writes_the_same(
    run_dir: Path, tmp_path: Path, capsys: Said
) -> None:
    assert os.listdir(run_dir / "export") == ["step_00000003"]
    assert main(["export", str(run_dir), str(tmp_path / "a/model"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["checkpoint"] == str(run_dir / "checkpoints/step_00000003")
    assert said["notes"] == []
    there = {path.name: path.read_bytes() for path in (tmp_path / "a/model").iterdir()}
    assert {name: len(content) for name, content in there.items()} == said["files"]
    assert there == {
        path.name: path.read_bytes() for path in (run_dir / "export/step_00000003").iterdir()
    }
    assert "model.safetensors" in there
    assert os.listdir(tmp_path / "a") == ["model"]


def test_weights_are_those_of_the_checkpoint_in_the_dtype_that_is_asked_for(
    run_dir: Path, tmp_path: Path
) -> None:
    checkpoint = run_dir / "checkpoints/step_00000002"
    expected = saved(checkpoint, "model.layers.1.mlp.down.weight")
    for option, dtype in {
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }.items():
        assert main(["export", str(checkpoint), str(tmp_path / option), "--dtype", option]) == 0
        found = weights(tmp_path / option)
        assert {tensor.dtype for tensor in found.values()} == {dtype}
        assert torch.equal(found["model.layers.1.mlp.down_proj.weight"], expected.to(dtype))
        config = transformers.AutoConfig.from_pretrained(tmp_path / option)
        assert config.dtype == dtype
        assert config.eos_token_id == 256


def test_the_tokenizer_of_a_file_is_copied_with_what_lies_beside_it(
    run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bpe(["some text"], 260))
    special = '{"eos_token": "<|endoftext|>"}'
    (tmp_path / "special_tokens_map.json").write_text(special)
    data = replace(RECIPE.data, tokenizer=str(tmp_path / "tokenizer.json"))
    form = ExportForm.from_recipe(replace(RECIPE, data=data))
    checkpoint = run_dir / "checkpoints/step_00000002"
    assert [*export(checkpoint, tmp_path / "full", form)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "full")
    ids = tokenizer("some text")["input_ids"]
    assert tokenizer.decode(ids) == "some text"
    assert tokenizer.eos_token == "<|endoftext|>"
    assert (tmp_path / "full/special_tokens_map.json").read_text() == special
    (tmp_path / "tokenizer.json").unlink()
    without = ExportForm.from_recipe(replace(RECIPE, data=data))
    (note,) = without.notes
    assert note.startswith("exported without a tokenizer: data.tokenizer = ")
    assert not without.tokenizer_files
    assert [*export(checkpoint, tmp_path / "bare", without)]


def test_a_damaged_checkpoint_is_refused_before_anything_is_written(
    run_dir: Path, tmp_path: Path, capsys: Said
) -> None:
    damaged = tmp_path / "step_00000002"
    shutil.copytree(run_dir / "checkpoints/step_00000002", damaged)
    shard = next(damaged.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    assert main(["export", str(damaged), str(tmp_path / "out")]) == 65
    assert f"{shard}: is corrupt" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["step_00000002"]


def test_what_is_at_dir_is_not_lost(run_dir: Path, tmp_path: Path, capsys: Said) -> None:
    checkpoint = run_dir / "checkpoints/step_00000002"
    there = tmp_path / "there"
    there.mkdir()
    (there / "results.csv").write_text("dear")
    (tmp_path / "file").touch()
    for to, status, words in (
        (there, 2, "exists or is inside"),
        (tmp_path / "file", 2, "exists or is inside"),
        (checkpoint / "out", 2, "is inside the checkpoint"),
        (tmp_path / "file/out", 73, "cannot be written: "),
    ):
        assert main(["export", str(checkpoint), str(to)]) == status
        assert words in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["file", "there"]
    assert (there / "results.csv").read_text() == "dear"


def test_an_interrupted_export_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    form = ExportForm.from_recipe(RECIPE)
    written = export(run_dir / "checkpoints/step_00000002", tmp_path / "out", form)
    assert next(written) == "model.embed_tokens.weight"
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
    written.close()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "change, refusal",
    [
        ({"layers": 3}, "missing tensor model.layers.2.attention.k.weight"),
        (
            {"layers": 1},
            "unexpected tensor model.layers.1.attention.k.weight; the checkpoint does not match",
        ),
        ({"qk_norm": True, "qkv_bias": True}, "model.qk_norm = true"),
    ],
)
def test_another_model_is_refused(
    run_dir: Path, tmp_path: Path, change: dict[str, object], refusal: str
) -> None:
    form = ExportForm(model=replace(RECIPE.model, **change), seq_len=16)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=refusal):
        next(export(run_dir / "checkpoints/step_00000002", tmp_path / "out", form))
    assert not os.listdir(tmp_path)


def test_a_run_that_could_not_export_is_refused_before_it_starts() -> None:
    checkpoint = replace(RECIPE.checkpoint, every=None)
    with pytest.raises(
        ConfigError,
        match="checkpoint.export = last: only used with checkpoint.every.*try checkpoint.every=100",
    ):
        validate(replace(RECIPE, checkpoint=checkpoint))
    model = replace(RECIPE.model, qk_norm=True, qkv_bias=True)
    with pytest.raises(ConfigError, match="model.qk_norm = true: .*or checkpoint.export=none"):
        validate(replace(RECIPE, model=model))
