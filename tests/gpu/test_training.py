"""The trainer on one GPU, compared with a CPU and with float32."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from parallel3d.config.recipe import (
    LossScaleConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
)
from parallel3d.launch.deterministic import deterministic
from parallel3d.layers.dropout import Dropout, dropout_key
from parallel3d.tools.bench.step import random_batch
from parallel3d.tools.check_layout.data import Array
from parallel3d.tools.check_layout.record import whole
from parallel3d.tools.local_ranks import own_device, run_ranks
from parallel3d.tools.verify.dry_run import dry_run
from parallel3d.training.state import load_trainer, tensors_of
from parallel3d.training.trainer import Trainer
from tests.distributed.training_cases import save_trainer
from tests.gpu.conftest import Measure
from tests.gpu.training import GPT, LLAMA, Trained, make_trainer, small, train
from tests.one_rank import read_metrics

MODELS = {"llama": small(), "gpt": small(GPT)}
OPTIMIZERS = {
    "adamw": small(),
    "adamw, states in bf16": small(optimizer=OptimizerConfig(lr=1e-3, state_dtype="bf16")),
    "sgd": small(optimizer=OptimizerConfig(name="sgd", lr=1e-1)),
    "muon": small(optimizer=OptimizerConfig(name="muon", lr=1e-3, ns_dtype="fp32")),
}
# float16 overflows at once, and no longer after one skipped step.
OVERFLOW = LossScaleConfig(initial=2.0**40, backoff=2.0**-30)
PRECISIONS = {
    "fp32": small(),
    "bf16": small(precision="bf16"),
    "bf16_pure": small(precision="bf16_pure"),
    "fp16": replace(small(precision="fp16"), loss_scale=OVERFLOW),
}
LARGE = ModelConfig(
    layers=8,
    hidden=2048,
    heads=16,
    kv_heads=8,
    ffn_hidden=5632,
    vocab=32_000,
)


def on_gpu_and_cpu(recipes: dict[str, Recipe]) -> tuple[dict[str, Trained], dict[str, Trained]]:
    gpu = run_ranks(train, recipes, "cuda", world_size=1, device="cuda")
    return gpu, run_ranks(train, recipes, "cpu", world_size=1)


def test_losses_in_float32_are_those_of_a_cpu() -> None:
    gpu, cpu = on_gpu_and_cpu(MODELS)
    for name in MODELS:
        gpu[name].assert_follows(cpu[name], loss=1e-5, norm=1e-4)


def test_optimizers_train_as_on_a_cpu(measured: Measure) -> None:
    gpu, cpu = on_gpu_and_cpu(OPTIMIZERS)
    for name in OPTIMIZERS:
        assert measured(name, gpu[name].last_loss_off(cpu[name])) <= 1e-3


def test_16_bits_train_as_float32_and_an_overflow_is_skipped(measured: Measure) -> None:
    found = run_ranks(train, PRECISIONS, "cuda", world_size=1, device="cuda")
    for name in PRECISIONS:
        assert measured(name, found[name].last_loss_off(found["fp32"])) <= 2e-2
    assert found["fp16"].skipped_steps == 1


def train_compiled(recipe: Recipe) -> tuple[Trained, int]:
    from torch._dynamo.utils import counters

    trained = train({"compiled": recipe}, "cuda")["compiled"]
    return trained, counters["stats"]["unique_graphs"]


def test_all_blocks_share_one_compiled_graph(measured: Measure) -> None:
    recipe = small(precision="bf16", compile=True)
    compiled, graphs = run_ranks(train_compiled, recipe, world_size=1, device="cuda")
    eager = run_ranks(train, {"bf16": PRECISIONS["bf16"]}, "cuda", world_size=1, device="cuda")
    assert measured("loss", compiled.last_loss_off(eager["bf16"])) <= 1e-2
    assert graphs == 1


def test_the_causes_of_a_run_sum_to_its_steps(measured: Measure, tmp_path: Path) -> None:
    """CUDA events time the causes, and the host times the step."""
    layout = "parallel.pp=1 parallel.dp_shard=1 parallel.tp=1 parallel.recompute=full"
    model = "model.hidden=1536 model.heads=12 model.ffn_hidden=4096 train.seq_len=1024"
    rest = f"train.steps=30 train.device=cuda train.precision=bf16 run_dir={tmp_path / 'run'}"
    command = [sys.executable, "-m", "parallel3d.recipes.pretrain", "quickstart"]
    subprocess.run([*command, *f"{layout} {model} {rest}".split()], check=True)
    last = read_metrics(tmp_path / "run")[-1]
    ratio = sum(last["time_s"].values()) / last["step_time_s"]
    assert abs(measured("causes / step", ratio) - 1) <= 0.05
    assert last["time_s"]["recompute"] > 0.1 * last["time_s"]["compute"]
    assert sum(last["memory_bytes"].values()) == last["peak_memory_bytes"]


def test_dropout_drops_what_a_cpu_drops() -> None:
    x = torch.zeros(3, 64, 96)
    key = dropout_key(0, 7, torch.arange(3))
    dropout = Dropout(0.3, name="layers.0")
    mask = dropout.dropped(x.cuda(), key, {})
    assert torch.equal(mask.cpu(), dropout.dropped(x, key, {}))
    assert abs(mask.float().mean().item() - 0.3) <= 0.02


def train_deterministically(recipes: dict[str, Recipe]) -> dict[str, Trained]:
    with deterministic(True):
        return train(recipes, "cuda")


def test_recompute_changes_no_bit() -> None:
    model = replace(LLAMA, dropout=0.1)
    recipes = {
        "none": small(model),
        "selective": small(model, ParallelConfig(recompute="selective")),
        "full": small(model, ParallelConfig(recompute="full")),
    }
    found = run_ranks(train_deterministically, recipes, world_size=1, device="cuda")
    assert found["selective"] == found["none"]
    assert found["full"] == found["none"]


def waits_in_a_step(recipe: Recipe) -> list[str]:
    """Returns the places at which the host waits for the GPU in the third step."""
    trainer = make_trainer(recipe, "cuda")
    batches = []
    for seed in range(3):
        batch = random_batch(recipe, 0, seed)
        # The loader hands over batches on the device.
        inputs = batch.inputs.cuda()
        labels = batch.labels.cuda()
        batches.append(replace(batch, inputs=inputs, labels=labels))
    for batch in batches[:2]:
        trainer.train_step(batch)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train_step(batches[2])
    torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "synchronizing" in str(each.message)]
    return [f"{Path(wait.filename).name}:{wait.lineno}" for wait in waits]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_host_waits_at_most_once_in_a_step(name: str) -> None:
    places = run_ranks(waits_in_a_step, OPTIMIZERS[name], world_size=1, device="cuda")
    assert len(places) <= 1, places


def save(recipe: Recipe, path: Path) -> dict[str, Array]:
    trainer = make_trainer(recipe, "cuda")
    trainer.train_step(random_batch(recipe, 0, 0))
    save_trainer(trainer, path)
    return state(trainer)


def load(recipe: Recipe, path: Path, device: str) -> dict[str, Array]:
    trainer = make_trainer(recipe, device)
    load_trainer(trainer, path)
    return state(trainer)


def state(trainer: Trainer) -> dict[str, Array]:
    tensors = tensors_of(trainer)
    return {name: whole(tensor).cpu().numpy() for name, tensor in tensors.items()}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_checkpoint_loads_bitwise(device: str, tmp_path: Path) -> None:
    saved = run_ranks(save, small(), tmp_path / "step", world_size=1, device="cuda")
    loaded = run_ranks(load, small(), tmp_path / "step", device, world_size=1, device=device)
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        assert np.array_equal(tensor, loaded[name]), name


def peak_and_memory(recipe: Recipe) -> tuple[int, int | None]:
    """Returns the peak bytes of a step, and the bytes that the trainer takes the GPU to have."""
    trainer = make_trainer(recipe, "cuda")
    trainer.train_step(random_batch(recipe, 0, 0))
    torch.cuda.reset_peak_memory_stats()
    trainer.train_step(random_batch(recipe, 0, 1))
    total = torch.cuda.get_device_properties(own_device("cuda")).total_memory
    return torch.cuda.max_memory_allocated(), total


def test_the_dry_run_predicts_the_memory_of_a_step(measured: Measure) -> None:
    recipe = small(LARGE, precision="bf16", global_batch_size=4, seq_len=2048)
    peak, memory = run_ranks(peak_and_memory, recipe, world_size=1, device="cuda")
    predicted = dry_run(recipe, 0, gpu_bytes=memory).peak.total
    measured("GiB", peak / 2**30)
    assert abs(measured("predicted / measured", predicted / peak) - 1) <= 0.03
