"""Checkpoints of every family, trained in tp 2 x pp 2 x dp_shard 2, opened by transformers: no key
is missing or left over, and the logits are the trainer's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from parallel3d.config.recipe import LocalSgdConfig, ModelConfig, ParallelConfig
from parallel3d.tools.checkpoint.command import main as parallel3d_checkpoint
from parallel3d.training.loop import export_saved
from tests.distributed.training_cases import make_recipe, make_trainer, save_trainer, train
from tests.test_hugging_face import FAMILIES, MIXTURES, SEQ_LEN

LAYOUT = ParallelConfig(
    tp=2,
    pp=2,
    dp_shard=2,
    sequence_parallel=True,
    microbatch_size=2,
)
MODELS = FAMILIES | MIXTURES
IDS = torch.arange(SEQ_LEN) * 7 % 251


def train_and_save(
    models: list[ModelConfig], folder: Path, parallel: ParallelConfig, local_sgd: LocalSgdConfig
) -> list[list[list[float]] | None]:
    """Trains each model for one step and saves it. Returns this tp rank's logits [seq, vocab / tp]
    of each model, or None if it is not on the last stage."""
    found: list[list[list[float]] | None] = []
    for number, model in enumerate(models):
        recipe = replace(make_recipe(model, parallel, seq_len=SEQ_LEN), local_sgd=local_sgd)
        trainer = make_trainer(recipe)
        train(trainer, 1)
        path = folder / f"{number}/step_00000001"
        path.parent.mkdir(exist_ok=True)
        save_trainer(trainer, path)
        if local_sgd.sync_every is not None:  # as a run does, all ranks at once
            line = export_saved(recipe, path, folder / "by-the-run", None)
            assert line == f"exported: {folder / 'by-the-run'}"
        logits = trainer.logits(IDS.view(1, 1, SEQ_LEN))
        found.append(logits[0][0].tolist() if logits else None)
    return found


def exported_logits(
    checkpoint: Path,
    to: Path,
    *options: str,
) -> torch.Tensor:
    """Exports a checkpoint in several files, and returns the logits of the model that transformers
    makes of it."""
    assert (
        parallel3d_checkpoint(
            ["export", str(checkpoint), str(to), "--max-shard-size", "0.05MB", *options]
        )
        == 0
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(to, output_loading_info=True)
    assert {name: list(keys) for name, keys in info.items()} == dict.fromkeys(info, [])
    return model(IDS.view(1, SEQ_LEN)).logits[0].detach()


def check_families(
    world: Callable,
    folder: Path,
    families: list[str],
) -> None:
    ranks = world(8).run(
        train_and_save,
        [MODELS[name] for name in families],
        folder,
        LAYOUT,
        LocalSgdConfig(),
    )
    for number, name in enumerate(families):
        parts = [torch.tensor(rank[number]) for rank in ranks if rank[number] is not None]
        vocab = MODELS[name].vocab
        # an odd vocabulary makes a last column that stands for no id
        trained = torch.cat(parts[:2], dim=-1)[:, :vocab]
        found = exported_logits(folder / str(number), folder / f"exported-{number}")
        assert (found - trained).abs().max() < 1e-5, name
        assert trained.std() > 0.01
        check_files(folder / f"exported-{number}", vocab)


def check_files(exported: Path, vocab: int) -> None:
    """Compares the index with the files, and the embedding with the vocabulary."""
    index = json.loads((exported / "model.safetensors.index.json").read_text())
    data_bytes = 0
    files = sorted(exported.glob("*.safetensors"))
    assert {file.name for file in files} == {*index["weight_map"].values()}
    assert len(files) > 1
    for file in files:
        for name, tensor in load_file(file).items():
            assert index["weight_map"][name] == file.name
            assert ("embed" not in name and "wte" not in name) or len(tensor) == vocab
            data_bytes += tensor.nbytes
    assert index["metadata"]["total_size"] == data_bytes


def test_transformers_opens_what_was_trained(world: Callable, tmp_path: Path) -> None:
    check_families(world, tmp_path, ["llama3.1", "gpt2", "qwen2_moe"])


@pytest.mark.long
def test_transformers_opens_every_family(world: Callable, tmp_path: Path) -> None:
    check_families(world, tmp_path, [*MODELS])
