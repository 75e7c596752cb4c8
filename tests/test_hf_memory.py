"""The memory estimate of Hugging Face models, which save other tensors than our layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.config.recipe import ParallelConfig
from tests.distributed.training_cases import long
from tests.hf_memory_grid import compared, model_section

TP = ParallelConfig(tp=2)


@pytest.mark.parametrize(
    ("family", "layout", "precision"),
    [
        ("gemma2", ParallelConfig(pp=2), "bf16"),
        ("gemma3_text", replace(TP, sequence_parallel=True), "bf16"),
        ("gpt2", replace(TP, recompute="selective"), "bf16"),
        ("falcon", ParallelConfig(dp_shard=4), "bf16"),
        ("mixtral", replace(TP, dp_shard=8), "bf16"),
        long("phi3", replace(TP, dp_shard=8), "bf16"),
        long("starcoder2", ParallelConfig(pp=2), "fp32"),
    ],
)
def test_an_estimate_is_close_to_the_dry_run_of_the_family(
    family: str, layout: ParallelConfig, precision: str, tmp_path: Path
) -> None:
    found = compared(model_section(family, tmp_path), layout, precision)
    assert -0.03 < found.difference < 0.10
    assert found.parameters == pytest.approx(found.dry.parameter_count, rel=1e-3)


@pytest.mark.long
def test_soft_caps_keep_eight_bytes_per_score(tmp_path: Path) -> None:
    """Of 16 heads and 2,048 x 2,048 scores, in each of 4 blocks."""
    none, selective = (
        compared(model_section("gemma2", tmp_path), ParallelConfig(recompute=how), seq_len=2048)
        for how in ("none", "selective")
    )
    scores = 16 * 2048 * 2048 * 8
    assert none.dry.peak.total - selective.dry.peak.total > 2 * scores
    assert none.model.activations - selective.model.activations > 4 * scores


@pytest.mark.parametrize("window", [1024, 8192])
def test_a_window_shorter_than_the_sequence_costs_a_mask(window: int, tmp_path: Path) -> None:
    model = model_section("mistral", tmp_path, sliding_window=window)
    found = compared(model, ParallelConfig())
    assert found.difference == pytest.approx(0, abs=0.01)
