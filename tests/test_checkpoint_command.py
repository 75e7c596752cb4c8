"""`parallel3d-checkpoint` on the folder of a run and on a folder of transformers: what it prints,
and how it ends."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallel3d.checkpoint.hugging_face_names import hf_tensors
from parallel3d.config.hugging_face import to_hugging_face
from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import ModelConfig, RopeScaling
from parallel3d.layers.parameter import named_specs
from parallel3d.models.llama import Llama
from parallel3d.tools.checkpoint.command import main
from tests.one_rank import read_metrics
from tests.test_manifest import forged
from tests.test_start import RECIPE, run

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints of steps 2 and 4, each evaluated."""
    folder: Path = tmp_path_factory.mktemp("command") / "run"
    run(replace(RECIPE, train=replace(RECIPE.train, eval_every=2, eval_sequences=2)), folder)
    return folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def answer(capsys: Said, *words: object, status: int = 0) -> pytest.CaptureResult[str]:
    """Runs a command, and returns what it prints."""
    assert main([*map(str, words)]) == status
    return capsys.readouterr()


def tree(capsys: Said, *words: object, status: int = 0) -> dict[str, Any]:
    """Runs a command, and returns the JSON that it prints."""
    found: dict[str, Any] = json.loads(answer(capsys, *words, "--json", status=status).out)
    return found


def flip_last_byte(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def test_ls_says_what_is_whole_what_is_best_and_what_is_left_over(
    run_dir: Path, capsys: Said
) -> None:
    folder = run_dir / "checkpoints"
    (folder / "step_00000006.partial").mkdir()
    cut = shutil.copytree(folder / "step_00000004", folder / "step_00000005") / "__0_0.distcp"
    cut.write_bytes(cut.read_bytes()[:-3])
    rows = tree(capsys, "ls", run_dir)["checkpoints"]
    assert [(row["step"], row["state"], row["best"]) for row in rows] == [
        (2, "whole", False),
        (4, "whole", True),
        (5, "damaged", False),
        (6, "partial", False),
    ]
    metrics = read_metrics(run_dir)
    assert [row["val_loss"] for row in rows[:2]] == [line["val_loss"] for line in metrics[1::2]]
    assert rows[1]["val_loss"] < rows[0]["val_loss"]
    files = [*(folder / "step_00000002").iterdir()]
    assert rows[0]["bytes"] == sum(file.stat().st_size for file in files)
    assert rows[0]["saved"][:4].isdigit()
    said = answer(capsys, "ls", folder).out
    assert said.startswith(f"{folder}: 2 of 4 complete")
    assert "whole, best\n" in said
    assert "damaged, __0_0.distcp: has" in said
    refusal = answer(capsys, "ls", run_dir / "nothing", status=2).err
    assert "no checkpoints found; try the folder of a run" in refusal


def test_inspect_says_what_a_checkpoint_holds(run_dir: Path, capsys: Said) -> None:
    found = tree(capsys, "inspect", run_dir)
    assert found["checkpoint"].endswith("step_00000004")
    assert found["torch"] == torch.__version__
    assert found["progress"]["step"] == 4
    assert found["progress"]["tokens"] == 4 * 2 * 16
    assert found["tensors"]["model.embed.weight"] == {"dtype": "float32", "shape": [264, 16]}
    numbers = [
        each["shape"] for name, each in found["tensors"].items() if name.startswith("model.")
    ]
    assert sum(torch.Size(shape).numel() for shape in numbers) == found["progress"]["parameters"]
    assert found["recipe"]["model.hidden"] == 16
    assert found["recipe"]["checkpoint.every"] == 2
    said = answer(capsys, "inspect", run_dir / "checkpoints/step_00000002").out
    assert "  step: 2\n  tokens: 64\n" in said
    assert "  model.layers.*.attention.q.weight (2 tensors) float32 [16, 16]\n" in said
    assert "  model.hidden: 16\n" in said


def test_verify_reads_every_byte_and_names_files_and_tensors(run_dir: Path, capsys: Said) -> None:
    assert answer(capsys, "verify", run_dir).out.count("every byte matches the checksums") == 2
    damaged = run_dir / "checkpoints/step_00000004"
    flip_last_byte(damaged / "config.yaml")
    manifest = json.loads((damaged / "manifest.json").read_text())
    piece = manifest["tensors"]["model.norm.weight"]["pieces"][0]
    shard = bytearray((damaged / piece["file"]).read_bytes())
    shard[piece["data"] + 1] ^= 64
    (damaged / piece["file"]).write_bytes(shard)
    first, second = tree(capsys, "verify", run_dir, status=65)["checkpoints"]
    assert first["whole"]
    assert not second["whole"]
    assert {(each["file"], *each["tensors"]) for each in second["damage"]} == {
        ("config.yaml",),
        (piece["file"], "model.norm.weight"),
    }
    said = answer(capsys, "verify", damaged, status=65).out
    assert f"{damaged}: 2 damaged" in said
    assert f"  {piece['file']}: is corrupt" in said
    assert "    model.norm.weight\n" in said
    (damaged / "manifest.json").unlink()
    assert "manifest.json: cannot be read" in answer(capsys, "verify", damaged, status=65).out
    assert (
        "no complete checkpoint found"
        in answer(capsys, "verify", run_dir / "nothing", status=2).err
    )


MODEL = ModelConfig(
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn_hidden=24,
    vocab=300,
    rope_theta=5e5,
    rope_scaling=RopeScaling(
        type="llama3",
        factor=8.0,
        original_max_positions=32,
    ),
    tied_embeddings=True,
)


def write_pretrained(model: ModelConfig, folder: Path, **others: object) -> dict[str, object]:
    """Writes a folder as transformers does, and returns its config.json."""
    shapes = {name: spec.shape for name, spec in named_specs(Llama(model, device="meta"))}
    tensors = {
        each.name: torch.ones(each.shape(shapes[each.parameters[0]]))
        for each in hf_tensors(model, ())
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {**to_hugging_face(model, seq_len=64, dtype="float32", end_of_text=None), **others}
    (folder / "config.json").write_text(json.dumps(config))
    return config


def test_import_writes_the_recipe_of_a_model(tmp_path: Path, capsys: Said) -> None:
    write_pretrained(MODEL, tmp_path / "hub")
    (tmp_path / "hub/tokenizer.json").write_text("{}")
    recipe = tmp_path / "recipe.yaml"
    said = answer(capsys, "import", tmp_path / "hub", "-o", recipe).out
    assert f"parallel3d-train {recipe} train.steps=1000" in said
    read = load_recipe(
        recipe,
        ["train.steps=3", "train.global_batch_size=2", "train.seq_len=8"],
        cards={},
    )
    assert read.model == MODEL
    assert read.checkpoint.start_from == str(tmp_path / "hub")
    assert read.data.tokenizer == str(tmp_path / "hub/tokenizer.json")
    assert answer(capsys, "import", tmp_path / "hub").out == recipe.read_text()
    found = tree(capsys, "import", tmp_path / "hub")
    assert found["model"]["rope_scaling"]["factor"] == 8.0


@pytest.mark.parametrize(
    "others, refusal",
    [
        ({"mlp_bias": True, "hidden_act": "relu"}, "mlp_bias = true of config.json is ignored"),
        ({"rope_parameters": [1] * 9999}, "must be an object with keys and values, or null"),
    ],
)
def test_import_names_what_a_recipe_cannot_say(
    tmp_path: Path, others: dict[str, object], refusal: str, capsys: Said
) -> None:
    write_pretrained(MODEL, tmp_path, **others)
    said = answer(capsys, "import", tmp_path, "-o", tmp_path / "recipe.yaml", status=2).err
    assert refusal in said
    assert len(said) < 2000
    assert not (tmp_path / "recipe.yaml").exists()


def test_import_compares_the_tensors_with_the_config(tmp_path: Path, capsys: Said) -> None:
    write_pretrained(MODEL, tmp_path, num_hidden_layers=3, vocab_size=301)
    said = answer(capsys, "import", tmp_path, status=65).err
    assert "model.embed_tokens.weight is [300, 16] there and [301, 16] here" in said
    assert "model.layers.2.self_attn.q_proj.weight is missing there and [24, 16] here" in said
    (tmp_path / "model.safetensors").unlink()
    refusal = answer(capsys, "import", tmp_path, status=2).err
    assert "contains no safetensors (pickle files are not supported)" in refusal


def test_an_incomplete_newest_checkpoint_fails_verify_and_is_named_where_an_older_one_is_taken(
    run_dir: Path, tmp_path: Path, capsys: Said
) -> None:
    newest = run_dir / "checkpoints/step_00000004"
    (newest / "manifest.json").unlink()
    assert main(["verify", str(run_dir)]) == 65
    assert (
        f"{newest}: 1 damaged\n  manifest.json: {newest}/manifest.json: cannot be read"
        in capsys.readouterr().out
    )
    note = f"step 2: {newest} is incomplete (no manifest.json)"
    assert answer(capsys, "inspect", run_dir).out.splitlines()[0] == note
    assert tree(capsys, "export", run_dir, tmp_path / "out")["notes"] == [note]
    shutil.rmtree(newest)
    newest.mkdir()
    assert main(["verify", str(run_dir)]) == 65


def test_ls_calls_a_checkpoint_of_another_version_unknown_and_not_damaged(
    run_dir: Path, capsys: Said
) -> None:
    forged(run_dir / "checkpoints/step_00000004", '"files"', '"folders"')
    older, newer = tree(capsys, "ls", run_dir)["checkpoints"]
    assert older["state"] == "whole"
    assert newer["state"] == "unknown"
