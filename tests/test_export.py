"""`parallel3d-checkpoint export` and `checkpoint.export`: what is written of a checkpoint, and what
is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from parallel3d import recipes
from parallel3d.checkpoint.manifest import read_manifest
from parallel3d.checkpoint.reader import read_tensor
from parallel3d.config.recipe import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.config.rules import validate
from parallel3d.data.tokenizers import ByteTokenizer
from parallel3d.errors import ConfigError
from parallel3d.export import ExportForm, export
from parallel3d.tools.checkpoint.command import main
from tests.one_rank import one_rank

RECIPE = Recipe(
    model=ModelConfig(layers=2, hidden=16, heads=2, ffn_hidden=32, vocab=257),
    train=TrainConfig(steps=3, global_batch_size=2, seq_len=16, device="cpu"),
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
    return read_tensor(checkpoint, read_manifest(checkpoint).tensors[name])


def test_a_run_exports_its_last_checkpoint_and_the_command_writes_the_same(
    run_dir: Path, tmp_path: Path, capsys: Said
) -> None:
    assert [path.name for path in (run_dir / "export").iterdir()] == ["step_00000003"]
    assert main(["export", str(run_dir), str(tmp_path / "a/model"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["checkpoint"] == str(run_dir / "checkpoints/step_00000003") and said["notes"] == []
    there = {path.name: path.read_bytes() for path in (tmp_path / "a/model").iterdir()}
    assert {name: len(content) for name, content in there.items()} == said["files"]
    assert there == {
        path.name: path.read_bytes() for path in (run_dir / "export/step_00000003").iterdir()
    }
    assert "model.safetensors" in there and [path.name for path in (tmp_path / "a").iterdir()] == [
        "model"
    ]


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
        assert config.dtype == dtype and config.eos_token_id == 256


def test_the_tokenizer_of_a_run_on_bytes_is_one_of_transformers(run_dir: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(run_dir / "export/step_00000003")
    text = "def f(x):\n\treturn 'ä€😀' + \x00\x7f\xad"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == ByteTokenizer().end_of_text
    assert len(tokenizer) == ByteTokenizer().vocab_size


def test_the_tokenizer_of_a_file_is_copied_with_what_lies_beside_it(
    run_dir: Path, tmp_path: Path
) -> None:
    files = ByteTokenizer().files_for_transformers()
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"])
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end_of_text|>"}')
    data = replace(RECIPE.data, tokenizer=str(tmp_path / "tokenizer.json"))
    form = ExportForm.from_recipe(replace(RECIPE, data=data))
    assert dict(form.tokenizer_files) == {
        **files,
        "special_tokens_map.json": b'{"eos_token": "<|end_of_text|>"}',
    }
    (tmp_path / "tokenizer.json").unlink()
    without = ExportForm.from_recipe(replace(RECIPE, data=data))
    (note,) = without.notes
    assert (
        note.startswith("exported without a tokenizer: data.tokenizer = ")
        and not without.tokenizer_files
    )
    assert [
        *export(run_dir / "checkpoints/step_00000002", tmp_path / "bare", without, overwrite=False)
    ]
    assert json.loads((tmp_path / "bare/generation_config.json").read_text()) == {}


def test_a_damaged_checkpoint_is_refused_before_anything_is_written(
    run_dir: Path, tmp_path: Path, capsys: Said
) -> None:
    damaged = tmp_path / "step_00000002"
    damaged.mkdir()
    for file in (run_dir / "checkpoints/step_00000002").iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    shard = next(damaged.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    assert main(["export", str(damaged), str(tmp_path / "out")]) == 65
    assert f"{shard}: is not what was saved" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_what_is_at_dir_is_not_lost(run_dir: Path, tmp_path: Path, capsys: Said) -> None:
    checkpoint, there = run_dir / "checkpoints/step_00000002", tmp_path / "there"

    def answer(*options: str) -> str:
        status = main(["export", str(checkpoint), *options])
        said = capsys.readouterr()
        assert len(said.err.splitlines()) == (status != 0)
        return said.err

    there.mkdir()
    assert answer(str(there)) == ""  # an empty folder is taken
    assert f"DIR = {there}: is there already; try another folder, or --overwrite" in answer(
        str(there)
    )
    assert answer(str(there), "--overwrite", "--dtype", "bf16") == ""
    assert weights(there)["model.norm.weight"].dtype == torch.bfloat16
    assert "lies in the checkpoint" in answer(str(checkpoint / "out"))
    (tmp_path / "file").touch()
    assert "cannot be written: " in answer(str(tmp_path / "file/out"))
    assert "file is not of an exported model" in answer(str(tmp_path / "file"), "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "there"]


def test_overwrite_replaces_an_earlier_export_and_no_folder_with_files_of_others(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    checkpoint, there = run_dir / "checkpoints/step_00000002", tmp_path / "there"
    assert main(["export", str(checkpoint), str(there)]) == 0
    (there / "results.csv").write_text("dear")  # what a user has put next to the model
    project = tmp_path / "project"
    shutil.copytree(checkpoint, project / "step_00000002")
    (project / "config.json").write_text("{}")
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    # with names of an export, and not written by one
    for name in ("config.json", "model.safetensors"):
        (downloaded / name).write_text('{"model_type": "llama", "dtype": "float32"}')
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "dear").touch()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    for source, to, named in (
        (checkpoint, there, there / "results.csv"),
        (project / "step_00000002", project, project / "step_00000002"),
        (checkpoint, downloaded, downloaded / "config.json"),
        (checkpoint, tmp_path / "out", tmp_path / "out.partial/dear"),
    ):
        assert main(["export", str(source), str(to), "--overwrite"]) == 2
        said = capsys.readouterr().err
        assert str(named) in said or f"{project}/config.json" in said
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    for to in (".", "..", "/"):
        assert main(["export", str(checkpoint), to, "--overwrite"]) == 2
        assert capsys.readouterr().err.startswith(f"error: DIR = {to}: the current folder is in it")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    (there / "results.csv").unlink()
    (tmp_path / "link").symlink_to(there)
    assert (
        main(["export", str(checkpoint), str(tmp_path / "link"), "--overwrite", "--dtype", "bf16"])
        == 0
    )
    assert (tmp_path / "link").is_symlink() and weights(there)[
        "model.norm.weight"
    ].dtype == torch.bfloat16


def test_an_interrupted_export_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    written = export(
        run_dir / "checkpoints/step_00000002",
        tmp_path / "out",
        ExportForm.from_recipe(RECIPE),
        overwrite=False,
    )
    assert next(written) == "model.embed_tokens.weight"
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    written.close()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"layers": 3}, "has no model.layers.2.attention_norm.weight"),
        ({"layers": 1}, "has model.layers.1.attention.k.weight, which its config.yaml"),
        ({"vocab": 300}, "has an embedding of 257 ids, its config.yaml says 300"),
        ({"qk_norm": True, "qkv_bias": True}, "model.qk_norm = true"),
    ],
)
def test_another_model_is_refused(
    run_dir: Path, tmp_path: Path, change: dict[str, object], refusal: str
) -> None:
    form = ExportForm(model=replace(RECIPE.model, **change), seq_len=16)  # type: ignore[arg-type]
    with pytest.raises(Exception, match=refusal):
        next(export(run_dir / "checkpoints/step_00000002", tmp_path / "out", form, overwrite=False))
    assert not [*tmp_path.iterdir()]


def test_a_run_that_could_not_export_is_refused_before_it_starts() -> None:
    checkpoint = replace(RECIPE.checkpoint, every=None)
    with pytest.raises(
        ConfigError,
        match="checkpoint.export = last: needs checkpoint.every.*try checkpoint.every=100",
    ):
        validate(replace(RECIPE, checkpoint=checkpoint))
    model = replace(RECIPE.model, qk_norm=True, qkv_bias=True)
    with pytest.raises(ConfigError, match="model.qk_norm = true: .*or checkpoint.export=none"):
        validate(replace(RECIPE, model=model))
