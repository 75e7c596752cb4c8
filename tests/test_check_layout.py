"""The comparison's arithmetic and the command line; the faults planted in ranks are in
tests/distributed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.tools.check_layout import command as check_layout
from parallel3d.tools.check_layout.compare import (
    Difference,
    LayoutComparison,
    compare,
    norm_of,
)
from parallel3d.tools.check_layout.data import Array, StepRecord, TrainingRecord, Views
from parallel3d.tools.check_layout.report import as_json, as_text
from parallel3d.tools.check_layout.shrink import shrink

NAMES = ("norm.weight", "up.weight", "down.weight")
ALONE, LAYOUT = ParallelConfig(), ParallelConfig(tp=2, dp_replicate=3)


def drawn(seed: int) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=(4, 4)).astype(np.float32) for name in NAMES}


def seen_by(ranks: int, tensors: dict[str, Array]) -> Views:
    return {name: dict.fromkeys(range(ranks), tensor) for name, tensor in tensors.items()}


def record(parallel: ParallelConfig = ALONE) -> TrainingRecord:
    """Two steps of a run that is the same whatever its layout."""
    ranks, weights, steps = parallel.world_size, drawn(0), []
    start = seen_by(ranks, weights)
    for number in (1, 2):
        gradients = drawn(number)
        weights = {name: weights[name] - 0.01 * gradients[name] for name in NAMES}
        seen = seen_by(ranks, gradients)
        steps.append(StepRecord(6.0 - number, norm_of(seen), {}, seen, seen_by(ranks, weights)))
    return TrainingRecord(parallel, start, start, steps)


def compared(change: Callable[[TrainingRecord], object]) -> LayoutComparison:
    layout = record(LAYOUT)
    change(layout)
    return compare(record(), layout)


def first(change: Callable[[TrainingRecord], object]) -> Difference:
    found = compared(change).first
    assert found is not None
    return found


def scale_gradients(layout: TrainingRecord, factor: float, *names: str) -> None:
    for name in names:
        views = layout.steps[1].gradients[name]
        layout.steps[1].gradients[name] = dict.fromkeys(views, np.float32(factor) * views[0])


def test_the_same_records_have_no_difference() -> None:
    comparison = compare(record(), record(LAYOUT))
    assert comparison.first is None
    assert [row.step for row in comparison.rows] == [1, 2]
    for row in comparison.rows:
        assert all(worst.difference == 0.0 for worst in row.worst.values())


def test_the_gradient_that_the_backward_pass_reaches_first_is_named_with_its_ratio() -> None:
    found = first(lambda layout: scale_gradients(layout, 3.0, *NAMES))
    *others, last = NAMES
    assert (found.step, found.what, found.name) == (2, "gradient", last)
    assert found.also == tuple(reversed(others))
    assert found.causes[0].startswith("it is 3 x the reference: summed instead of averaged")


def test_copies_that_differ_are_named() -> None:
    def change(layout: TrainingRecord) -> None:
        layout.steps[0].gradients["norm.weight"][3] = drawn(7)["norm.weight"]

    found = first(change)
    assert (found.step, found.name, found.ranks) == (1, "norm.weight", (3,))
    assert found.causes[0].startswith("the ranks hold different gradients")


def test_a_gradient_that_only_one_side_has_is_named() -> None:
    alone = record()
    del alone.steps[0].gradients["up.weight"]
    frozen = compare(alone, record(LAYOUT)).first
    assert frozen is not None and (frozen.what, frozen.name) == ("gradient", "up.weight")
    assert frozen.causes[0].startswith("one process has no gradient for it")
    missing = first(lambda layout: layout.steps[0].gradients.pop("up.weight"))
    assert missing.name == "up.weight" and missing.size == float("inf")
    assert missing.causes[0].startswith("no rank has a gradient for it")


def test_the_norm_is_compared_with_the_gradients_of_its_own_layout() -> None:
    def scale(layout: TrainingRecord, factor: float) -> None:
        scale_gradients(layout, 1 + 5e-6, *NAMES)
        layout.steps[1].grad_norm *= factor

    assert compared(lambda layout: scale(layout, 1 + 5e-6)).first is None
    assert first(lambda layout: scale(layout, 1 + 1e-5)).what == "gradient norm"


def test_a_number_that_is_not_finite_differs_and_is_null_in_json() -> None:
    comparison = compared(lambda layout: scale_gradients(layout, float("nan"), "norm.weight"))
    content = json.loads(as_json(comparison), parse_constant=pytest.fail)
    assert content["first_difference"]["name"] == "norm.weight"
    assert content["steps"][1]["worst"]["gradient"] == {"name": "norm.weight", "difference": None}


def test_a_parameter_that_does_not_move_and_a_loss_are_named() -> None:
    def stop(layout: TrainingRecord) -> None:
        layout.steps[0].parameters["down.weight"] = layout.start["down.weight"]

    def triple(layout: TrainingRecord) -> None:
        layout.steps[0].loss *= 3.0

    assert (first(stop).what, first(stop).name) == ("parameter", "down.weight")
    assert first(triple).what == "loss"


def test_the_report_tells_the_first_difference() -> None:
    comparison = compared(lambda layout: scale_gradients(layout, 2.0, "down.weight"))
    text = as_text(comparison)
    assert text.startswith("dp_replicate 3 x tp 2 against one process, 2 steps in float32")
    said = "differs first in step 2: gradient of down.weight, by 1 (limit 0.0001), on ranks 0, 1, 2"
    assert said in text
    content = json.loads(as_json(comparison))
    assert content["same"] is False and content["layout"]["tp"] == 2
    assert content["first_difference"]["name"] == "down.weight"


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=8, pp=4, dp_shard=8),
        ParallelConfig(pp=4, schedule="interleaved_1f1b", virtual_stages=5, microbatch_size=4),
    ],
    ids=["1f1b", "interleaved"],
)
def test_shrinking_keeps_the_layout_and_what_it_divides(parallel: ParallelConfig) -> None:
    model = ModelConfig(
        layers=80, hidden=8192, heads=64, kv_heads=8, ffn_hidden=28672, vocab=128256
    )
    train = TrainConfig(steps=1000, global_batch_size=1024, seq_len=8192, precision="bf16")
    recipe = shrink(Recipe(model=model, train=train, parallel=parallel), layers=3)
    assert recipe.parallel.axes == parallel.axes
    assert recipe.model.layers == max(3, parallel.stages)
    assert recipe.model.heads == 2 * recipe.model.key_value_heads
    assert recipe.model.hidden <= 128 and recipe.train.precision == "fp32"
    assert recipe.microbatches <= 2 * parallel.pp


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no RECIPE is given; try quickstart, another that --help lists"),
        ("quickstart --steps 0", "--steps: '0' must be a whole number from 1 on"),
        ("quickstart modle.layers=2", "did you mean model.layers?"),
        ("quickstart --vocab 9", "--vocab: goes with --model"),
        ("quickstart parallel.dp_shard=8", "a check starts at most 16; 2 along each axis"),
        ("--model nowhere:build parallel.tp=2", "nowhere:build: No module named 'nowhere'"),
        ("--model json parallel.tp=2", "--model json: must be module:function"),
        ("--model json:dumps parallel.pp=2", "only parallel.dp_replicate, dp_shard and tp are"),
        ("--model json:dumps parallel.tp=two", "set, to whole numbers from 1; try parallel.tp=2"),
        ("--model json:dumps", "one process has nothing to be compared with; try parallel.tp=2"),
        (f"--model {__name__}:drawn parallel.tp=2 --layers 3", "drawn has no parameter layers"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_do(
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert check_layout.main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "parallel3d.tools.check_layout", "--model", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_command_checks_the_model_of_its_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "check-layout.md").read_text()
    for text, name in re.findall(r"```python\n(# (\S+)\n.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(text)
    done = run(tmp_path, "my_model:build", "parallel.tp=2", "--layers", "3", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["same"] is True and len(content["steps"]) == 3


def test_the_command_exits_with_1_where_a_model_differs(tmp_path: Path) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    done = run(tmp_path, "forgetful:build", "parallel.dp_shard=2")
    assert done.returncode == 1, done.stderr
    assert "differs first in step 1: gradient of 1.bias" in done.stdout
    assert "the ranks hold different gradients of one parameter" in done.stdout


FORGETFUL = """
from torch import nn

def build(mesh, hidden=8, vocab=20):
    return nn.Sequential(nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab))
"""
