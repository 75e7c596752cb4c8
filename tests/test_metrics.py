"""Metrics and progress: what a line holds, what a resumed run keeps of the file, what a person
sees."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from parallel3d.config.recipe import (
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    Precision,
    Recipe,
    TrainConfig,
)
from parallel3d.models import shape_cards
from parallel3d.planner.model.parameters import model_flops_per_token
from parallel3d.planner.model.shapes import from_config
from parallel3d.recipes import peak_flops
from parallel3d.reporting.metrics import (
    MetricsFile,
    flops_per_token,
    peak_tokens_per_s,
)
from parallel3d.reporting.profiler import ProfilerWindow
from parallel3d.reporting.progress import describe
from parallel3d.training.learning_rate import learning_rate
from tests.report_runs import METRICS


def test_a_line_says_what_a_person_asks() -> None:
    line = "step 20/300  loss 3.1235  grad 0.812  lr 1.00e-03  8,192 tok/s  mem 412 MiB"
    assert describe(METRICS, 300, 100) == f"{line}  eta 0:01:10"
    assert describe(METRICS, 300, 80) == line  # 76 characters
    sets = describe(replace(METRICS, val_loss=3.2, set_losses={"wiki": 2.0}, mfu=0.4127), 300, 200)
    assert "loss 3.1235  val 3.2000  wiki 2.0000  grad" in sets
    assert "mfu 41.3%" in sets
    in_float16 = replace(METRICS, loss_scale=65536.0, skipped_steps=3)
    assert "8,192 tok/s  scale 65536  skipped 3  mem 412 MiB" in describe(in_float16, 300, 200)


def test_a_resumed_run_drops_the_lines_beyond_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in path.read_text().splitlines()]

    for resumed_step, written in ((0, (10, 20, 30)), (20, (30,))):
        file = MetricsFile(path, resumed_step=resumed_step)
        for step in written:
            file.write(replace(METRICS, step=step, grad_norm=float("inf")))
    with path.open("a") as cut_off:
        cut_off.write('{"step": 40, "lo')
    file = MetricsFile(path, resumed_step=30)
    assert steps() == [10, 20, 30]
    file.go_back(20)
    file.write(replace(METRICS, step=25))
    assert steps() == [10, 20, 25]
    last = json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)
    assert last["grad_norm"] is None, "JSON has no infinity"


def test_a_profile_holds_its_steps_and_no_others(tmp_path: Path) -> None:
    notes: list[str] = []
    config = LoggingConfig(profile_steps=(2, 3), profile_ranks=(1,))
    with ProfilerWindow(config, tmp_path / "profile", 1, notes.append) as window:
        for step in range(1, 6):
            with window.step(step):
                torch.ones(8, 8) @ torch.ones(8, 8)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank_1.00000003.pt.trace.json.gz"
    assert notes == [f"profile of steps 2 to 3: {path}"]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events]
    assert [name for name in names if name.startswith("step ")] == ["step 2", "step 3"]
    assert names.count("aten::mm") == 2


def test_flops_count_the_head_and_not_the_table() -> None:
    """6 N + 12 L D S, N = 4 matrices of D x D, three of D x F, and the head; norms are not
    multiplied."""
    model = ModelConfig(
        layers=2,
        hidden=8,
        heads=2,
        ffn_hidden=16,
        vocab=32,
    )
    blocks = 2 * (4 * 8 * 8 + 3 * 8 * 16)
    assert (
        flops_per_token(model, model.block_weights, seq_len=4)
        == 6 * (blocks + 32 * 8) + 12 * 2 * 8 * 4
    )
    tied = replace(model, tied_embeddings=True)
    assert flops_per_token(tied, tied.block_weights, 4) == flops_per_token(
        model, model.block_weights, 4
    )


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2-xl", "qwen2.5-7b"])
def test_the_trainer_and_the_planner_count_the_same_operations(name: str) -> None:
    tree = yaml.safe_load(shape_cards()[name].read_text())
    model = ModelConfig(**tree)
    assert flops_per_token(model, model.block_weights, 2048) == model_flops_per_token(
        from_config(model), 2048
    )


def recipe(precision: Precision, peak_tflops: float | None = None) -> Recipe:
    model = ModelConfig(
        layers=1,
        hidden=8,
        heads=2,
        ffn_hidden=16,
        vocab=32,
    )
    train = TrainConfig(
        steps=1,
        global_batch_size=1,
        seq_len=4,
        precision=precision,
    )
    return Recipe(
        model=model,
        train=train,
        logging=LoggingConfig(peak_tflops=peak_tflops),
    )


def test_mfu_goes_by_the_peak_of_the_devices_full_name_or_by_the_one_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda")
    model = recipe("bf16").model
    flops = flops_per_token(model, model.block_weights, seq_len=4)

    def peak(name: str, tflops: float | None = None) -> tuple[float | None, str]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        own = recipe("bf16", tflops)
        return peak_tokens_per_s(own, device, peak_flops, own.model.block_weights)

    assert peak("NVIDIA H100 80GB HBM3") == (pytest.approx(989.4e12 / flops), "")
    assert peak("NVIDIA H100 NVL") == (pytest.approx(835.5e12 / flops), "")
    unknown = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    found, line = peak(unknown)
    assert found is None
    assert f"{unknown!r} is unknown; set it, for example logging.peak_tflops=989.4" in line
    assert peak(unknown, 140.0) == (pytest.approx(140e12 / flops), "")


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"schedule": "constant"}, [0.5, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "cosine"}, [0.5, 1.0, 0.1 + 0.9 * 0.413176, 0.1 + 0.9 * 0.178606, 0.1]),
        ({"schedule": "linear"}, [0.5, 1.0, 1.0 - 0.9 * 50 / 90, 1.0 - 0.9 * 65 / 90, 0.1]),
        ({"schedule": "wsd", "decay_start": 60}, [0.5, 1.0, 1.0, 1.0 - 0.9 * 15 / 40, 0.1]),
        (
            {"schedule": "wsd", "decay_start": 60, "decay_shape": "sqrt"},
            [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.387628, 0.1],
        ),
        (
            {"schedule": "range_test", "min_lr_ratio": 1e-4},
            [1e-4 ** (95 / 99), 1e-4 ** (90 / 99), 1e-4 ** (40 / 99)],
        ),
    ],
    ids=lambda value: str(value.get("schedule")) if isinstance(value, dict) else "",
)
def test_a_schedule_has_these_rates(settings: dict[str, Any], expected: list[float]) -> None:
    config = OptimizerConfig(**{"lr": 1.0, "warmup_steps": 10, "min_lr_ratio": 0.1, **settings})
    rates = [learning_rate(config, step, steps=100) for step in (5, 10, 60, 75, 100)]
    assert rates[: len(expected)] == pytest.approx(expected, rel=1e-5)
    assert learning_rate(config, 100, steps=100) == pytest.approx(
        1.0 if len(expected) == 3 else expected[-1]
    )
