"""A2 to A5, A10 and A11: the trainer on one rank."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from parallel3d.config.recipe import (
    BlockRecompute,
    LossScaleConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
)
from parallel3d.launch.deterministic import deterministic
from parallel3d.layers.dropout import Dropout, dropout_key
from parallel3d.reporting.metrics import gpu_bytes
from parallel3d.tools.bench.harness import own_device
from parallel3d.tools.bench.step import random_batch
from parallel3d.tools.gpu_check.findings import Findings
from parallel3d.tools.gpu_check.jobs import (
    GPT,
    LLAMA,
    Trained,
    compare,
    make_trainer,
    on_ranks,
    small,
    train,
    with_optimizer,
)
from parallel3d.tools.verify.dry_run import dry_run
from parallel3d.torch_private import compiled_graphs
from parallel3d.training.state import load_trainer, save_trainer, tensors_of

_MANY = ModelConfig(layers=8, hidden=2048, heads=16, kv_heads=8, ffn_hidden=5632, vocab=32_000)


def optimizers() -> dict[str, OptimizerConfig]:
    """Returns each optimizer as people use it."""
    return {
        "adamw": with_optimizer(),
        "adamw, states in bf16": with_optimizer(state_dtype="bf16"),
        "sgd": with_optimizer(name="sgd", lr=1e-1),
        "muon": with_optimizer(name="muon", ns_dtype="fp32"),
        "adafactor": with_optimizer(name="adafactor"),
    }


def same_losses_as_cpu(findings: Findings) -> None:
    """A2: trains a Llama and a GPT in float32 on a CPU and on the device."""
    recipes = {"llama": small(), "gpt": small(GPT)}
    mine, other = (on_ranks(findings, train, recipes, device, device=device) for device in (findings.device, "cpu"))
    for name in recipes:
        compare(findings, name, mine[name], other[name], loss=1e-5, norm=1e-4)


def precisions_and_optimizers(findings: Findings) -> None:
    """A3: trains in 16 bits beside float32, with each optimizer beside a CPU, and compiled beside eager."""
    stochastic = with_optimizer(stochastic_rounding=True)
    # A scale at which float16 overflows at once, and a fall of it to where it does not.
    overflow = LossScaleConfig(initial=2.0**40, backoff=2.0**-30)
    whole = ParallelConfig(microbatch_size=12)
    by_optimizer = {name: small(optimizer=optimizer) for name, optimizer in optimizers().items()}
    recipes = {
        "fp32": small(),
        "bf16": small(precision="bf16"),
        "bf16_pure, stochastic rounding": small(precision="bf16_pure", optimizer=stochastic),
        "fp16 with an overflow": replace(small(precision="fp16"), loss_scale=overflow),
        "step in the backward": small(parallel=whole, optimizer=with_optimizer(step_in_backward=True), grad_clip=None),
        "one microbatch": small(parallel=whole, grad_clip=None),
        **by_optimizer,
    }
    mine = on_ranks(findings, train, recipes, findings.device)
    other = on_ranks(findings, train, by_optimizer, "cpu", device="cpu")
    for name in ("bf16", "bf16_pure, stochastic rounding", "fp16 with an overflow"):
        findings.at_most(f"{name}: loss", _last_loss_ratio(mine[name], mine["fp32"]), 2e-2)
    findings.holds("the overflow's step is skipped", mine["fp16 with an overflow"].skipped_steps == 1)
    ratio = _last_loss_ratio(mine["step in the backward"], mine["one microbatch"])
    findings.at_most("step in the backward: loss", ratio, 1e-4)
    for name in by_optimizer:
        findings.at_most(f"{name}: loss", _last_loss_ratio(mine[name], other[name]), 1e-3)
    compiled, graphs = on_ranks(findings, _compiled, small(precision="bf16", compile=True), findings.device)
    findings.at_most("compiled: loss", _last_loss_ratio(compiled, mine["bf16"]), 1e-2)
    findings.at_most("graphs of all blocks", graphs, 1)


def _compiled(recipe: Recipe, device: str) -> tuple[Trained, int]:
    trained = train({"compiled": recipe}, device)["compiled"]
    return trained, compiled_graphs()


def _last_loss_ratio(mine: Trained, other: Trained) -> float:
    return abs(mine.curve[-1][0] / other.curve[-1][0] - 1)


def dropout_and_recompute(findings: Findings) -> None:
    """A4: compares the masks of dropout with a CPU's, and trainings with and without recompute, all to the bit."""
    device = torch.device(findings.device)
    x, key = torch.zeros(3, 64, 96), dropout_key(0, 7, torch.arange(3))
    exact, fast = (Dropout(0.3, name="layers.0", mode=mode) for mode in ("exact", "fast"))
    mask = exact.dropped(x.to(device), key)
    findings.holds("exact masks are a CPU's", bool(torch.equal(mask.cpu(), exact.dropped(x, key))))
    findings.at_most("their share beside 0.3", abs(mask.float().mean().item() - 0.3), 0.02)
    twice = [fast.dropped(x.to(device), key) for _ in range(2)]
    findings.holds("fast masks are the same twice", bool(torch.equal(*twice)))
    model = replace(LLAMA, dropout=0.1)
    kinds: tuple[BlockRecompute, ...] = ("none", "selective", "full")
    recipes = {kind: small(model, ParallelConfig(recompute=kind)) for kind in kinds}
    found = on_ranks(findings, _deterministic, recipes, findings.device)
    for kind in kinds[1:]:
        findings.holds(f"recompute {kind}: losses and norms of none", found[kind].curve == found["none"].curve)


def _deterministic(recipes: dict[str, Recipe], device: str) -> dict[str, Trained]:
    with deterministic(True):
        return train(recipes, device)


def waits_of_a_step(findings: Findings) -> None:
    """A5: counts how often the host waits for the device in a step, by torch's own debug mode."""
    recipes = {name: small(optimizer=optimizer) for name, optimizer in optimizers().items()}
    for name, places in on_ranks(findings, _waits, recipes, findings.device).items():
        findings.at_most(f"{name}: waits", len(places), 1)
        if places:
            findings.note(f"{name}: at", ", ".join(places))


def _waits(recipes: dict[str, Recipe], device: str) -> dict[str, list[str]]:
    found = {}
    for name, recipe in recipes.items():
        trainer = make_trainer(recipe, device)
        batches = [random_batch(recipe, 0, seed) for seed in range(3)]
        # As `data` hands them over: copying them is not the step's.
        batches = [replace(b, inputs=b.inputs.to(device), labels=b.labels.to(device)) for b in batches]
        for batch in batches[:2]:
            trainer.train_step(batch)
        with host_waits(device) as found[name]:
            trainer.train_step(batches[2])
    return found


@contextmanager
def host_waits(device: str) -> Iterator[list[str]]:
    """Gives a list that has, after the block, the place (file:line) of each wait of the host for a GPU in it."""
    places: list[str] = []
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield places
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    waits = (warning for warning in caught if "synchronizing" in str(warning.message))
    places += [f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits]


def checkpoint(findings: Findings) -> None:
    """A10: saves a trainer, and loads it on the device and on a CPU."""
    recipe = small(replace(_MANY, layers=1, vocab=8192) if findings.on_gpu else LLAMA)  # 80 million parameters
    with tempfile.TemporaryDirectory(prefix="parallel3d-gpu-check-") as folder:
        path = Path(folder) / "step"
        sizes, sums = on_ranks(findings, _save, recipe, findings.device, path)
        gigabytes, seconds = sizes
        findings.note("GB", gigabytes)
        findings.note("saved, GB/s", gigabytes / seconds)
        for device in (findings.device, "cpu"):
            seconds, loaded = on_ranks(findings, _load, recipe, device, path, device=device)
            findings.note(f"loaded on {device}, GB/s", gigabytes / seconds)
            findings.holds(f"equal to the bit on {device}", loaded == sums)


def _save(recipe: Recipe, device: str, path: Path) -> tuple[tuple[float, float], dict[str, int]]:
    trainer = make_trainer(recipe, device)
    trainer.train_step(random_batch(recipe, 0, 0))
    start = time.perf_counter()
    save_trainer(trainer, path)
    seconds = time.perf_counter() - start
    bytes_ = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return (bytes_ / 1e9, seconds), _bits(tensors_of(trainer.parameters, trainer.optimizer))


def _load(recipe: Recipe, device: str, path: Path) -> tuple[float, dict[str, int]]:
    trainer = make_trainer(recipe, device)
    start = time.perf_counter()
    load_trainer(trainer, path)
    return time.perf_counter() - start, _bits(tensors_of(trainer.parameters, trainer.optimizer))


def _bits(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Returns a number of each tensor that changes with any of its bits, alike on every device."""
    found = {}
    for name, tensor in tensors.items():
        flat = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().reshape(-1)
        words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
        places = torch.arange(1, 2 * words.numel(), 2, device=words.device)
        found[name] = int((words.long() * places).sum())  # int64 wraps alike everywhere
    return found


def memory_of_a_step(findings: Findings) -> None:
    """A11: compares what the allocator held at its most in a step with what a dry run of the same recipe says."""
    recipe = small(_MANY if findings.on_gpu else LLAMA, precision="bf16", global_batch_size=4, seq_len=2048)
    measured, memory = on_ranks(findings, _peak, recipe, findings.device) if findings.on_gpu else (0, None)
    dry = dry_run(recipe, 0, gpu_bytes=memory)
    findings.note("dry run, GiB", dry.peak.total / 2**30)
    findings.holds("the dry run counts parameters", dry.parameter_count > 0)
    if findings.on_gpu:
        findings.note("measured, GiB", measured / 2**30)
        findings.at_most("difference", abs(dry.peak.total / measured - 1), 0.03)


def _peak(recipe: Recipe, device: str) -> tuple[int, int | None]:
    """Returns the bytes of a step at its most, and those that the GPU has."""
    trainer = make_trainer(recipe, device)
    trainer.train_step(random_batch(recipe, 0, 0))
    torch.cuda.reset_peak_memory_stats()
    trainer.train_step(random_batch(recipe, 0, 1))
    return torch.cuda.max_memory_allocated(own_device(device)), gpu_bytes(own_device(device))
