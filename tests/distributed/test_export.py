"""Checkpoints of every family, trained in tp 2 x pp 2 x dp_shard 2, opened by transformers: no key
is missing or left over, and the logits are the trainer's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from parallel3d.checkpoint.files import save_tensors
from parallel3d.checkpoint.manifest import Progress
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import LocalSgdConfig, ModelConfig, ParallelConfig
from parallel3d.layers.parameter import named_specs
from parallel3d.models import model_class
from parallel3d.tools.checkpoint.command import main as parallel3d_checkpoint
from parallel3d.training.loop import export_saved
from parallel3d.training.state import save_trainer
from tests.distributed.training_cases import make_recipe, make_trainer, train
from tests.test_hugging_face import FAMILIES, SEQ_LEN

LAYOUT = ParallelConfig(tp=2, pp=2, dp_shard=2, sequence_parallel=True)
IDS = torch.arange(SEQ_LEN) * 7 % 251


def train_and_save(
    models: list[ModelConfig], folder: Path, parallel: ParallelConfig, local_sgd: LocalSgdConfig
) -> list[list[list[float]] | None]:
    """Trains each model for three steps, saves it, and returns this tp rank's logits [seq, vocab /
    tp] of each on the last stage."""
    found: list[list[list[float]] | None] = []
    for number, model in enumerate(models):
        recipe = replace(make_recipe(model, parallel, seq_len=SEQ_LEN), local_sgd=local_sgd)
        trainer = make_trainer(recipe)
        train(trainer, 3)
        path = folder / f"{number}/step_00000003"
        path.parent.mkdir(exist_ok=True)
        save_trainer(trainer, path)
        if local_sgd.sync_every is not None:  # as a run does, all ranks at once
            line = export_saved(recipe, path, folder / "by-the-run", None)
            assert line == f"exported: {folder / 'by-the-run'}"
        logits = trainer.logits(IDS.view(1, 1, SEQ_LEN))
        found.append(logits[0][0].tolist() if logits else None)
    return found


def exported_logits(checkpoint: Path, to: Path, *options: str) -> torch.Tensor:
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


def check_families(world: Callable, folder: Path, families: list[str]) -> None:
    ranks = world(8).run(
        train_and_save, [FAMILIES[name] for name in families], folder, LAYOUT, LocalSgdConfig()
    )
    for number, name in enumerate(families):
        parts = [torch.tensor(rank[number]) for rank in ranks if rank[number] is not None]
        vocab = FAMILIES[name].vocab
        # an odd vocabulary makes a last column that stands for no id
        trained = torch.cat(parts[:2], dim=-1)[:, :vocab]
        found = exported_logits(folder / str(number), folder / f"exported-{number}")
        assert (found - trained).abs().max() < 1e-5, name
        assert trained.std() > 0.01
        check_files(folder / f"exported-{number}", vocab)


def check_files(exported: Path, vocab: int) -> None:
    """Compares the index with the files, and the embedding with the vocabulary."""
    index, data_bytes = json.loads((exported / "model.safetensors.index.json").read_text()), 0
    files = sorted(exported.glob("*.safetensors"))
    assert {file.name for file in files} == {*index["weight_map"].values()} and len(files) > 1
    for file in files:
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        assert {*header} == {
            name for name, place in index["weight_map"].items() if place == file.name
        }
        assert len(content) - 8 - length == max(
            tensor["data_offsets"][1] for tensor in header.values()
        )
        assert {
            tensor["shape"][0]
            for name, tensor in header.items()
            if "embed" in name or "wte" in name
        } <= {vocab}
        data_bytes += len(content) - 8 - length
    assert index["metadata"]["total_size"] == data_bytes


def test_transformers_opens_what_was_trained(world: Callable, tmp_path: Path) -> None:
    check_families(world, tmp_path, ["llama3.1", "gpt2"])


@pytest.mark.long
def test_transformers_opens_every_family(world: Callable, tmp_path: Path) -> None:
    check_families(world, tmp_path, [*FAMILIES])


# 1 GiB of float32, of which the embedding is the largest tensor, with 256 MiB.
LARGE = ModelConfig(
    layers=18, hidden=1024, heads=16, ffn_hidden=2432, vocab=65_536, tied_embeddings=True
)
_PEAK = """
import re, sys
from pathlib import Path
import torch
from parallel3d.tools.checkpoint.command import main
import parallel3d.tools.checkpoint.export
torch.set_num_threads(1)
def kib(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = kib("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
assert main(["export", *sys.argv[1:]]) == 0
print("KiB", kib("VmHWM") - before)
"""


def save_large(path: Path) -> None:
    """Saves random weights under the names of LARGE's parameters, as a run in one process does."""
    llama = model_class("llama")(
        LARGE, tp=None, sequence_parallel=False, recompute="none", recompute_every=1, device="meta"
    )
    state = {f"model.{name}": torch.rand(spec.shape) for name, spec in named_specs(llama)}
    progress = Progress(
        step=1, tokens=1, seed=0, global_batch_size=1, seq_len=SEQ_LEN, parameters=1, parallel={}
    )
    save_tensors(state, progress, path, to_yaml(make_recipe(LARGE, ParallelConfig())))


@pytest.mark.long
def test_exporting_a_gibibyte_takes_the_memory_of_the_largest_tensor(
    world: Callable, tmp_path: Path
) -> None:
    path = tmp_path / "step_00000001"
    world(1).run(save_large, path)
    assert sum(file.stat().st_size for file in path.iterdir()) > 2**30
    for dtype in ("fp32", "bf16"):
        words = [sys.executable, "-c", _PEAK, str(path), str(tmp_path / dtype), "--dtype", dtype]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        grown = int(done.stdout.split("KiB ")[1]) * 1024
        largest = LARGE.vocab * LARGE.hidden * (4 if dtype == "fp32" else 2)
        print(
            f"exporting {dtype}: {grown / 2**20:.0f} MiB, of which the largest tensor has "
            f"{largest / 2**20:.0f}"
        )
        assert largest < grown < largest + (256 << 20)
