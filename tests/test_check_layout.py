"""The comparison's arithmetic and the command line; the faults planted in ranks are in tests/distributed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, RopeScaling, TrainConfig
from parallel3d.tools.check_layout import command as check_layout
from parallel3d.tools.check_layout.compare import Difference, LayoutComparison, compare
from parallel3d.tools.check_layout.data import Array, StepRecord, TrainingRecord, Views
from parallel3d.tools.check_layout.report import as_json, as_text
from parallel3d.tools.check_layout.shrink import shrink

NAMES = ("norm.weight", "up.weight", "down.weight")
SPLIT = {"norm.weight": None, "up.weight": 0, "down.weight": 1}
ALONE, LAYOUT = ParallelConfig(), ParallelConfig(tp=2, dp_replicate=3)


def drawn(seed: int) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=(4,) if "norm" in name else (4, 4)).astype(np.float32) for name in NAMES}


def seen_by(ranks: int, tensors: dict[str, Array]) -> Views:
    return {name: dict.fromkeys(range(ranks), tensor) for name, tensor in tensors.items()}


def norm_of(tensors: dict[str, Array]) -> float:
    return float(np.sqrt(sum(np.square(t, dtype=np.float64).sum() for t in tensors.values())))


def record(parallel: ParallelConfig = ALONE) -> TrainingRecord:
    """Two steps of a run that is the same whatever its layout."""
    ranks = parallel.world_size
    weights, steps = drawn(0), []
    for number in range(2):
        gradients = drawn(number + 1)
        weights = {name: weights[name] - 0.01 * gradients[name] for name in NAMES}
        steps.append(
            StepRecord(5.0 - number, norm_of(gradients), {}, seen_by(ranks, gradients), seen_by(ranks, weights))
        )
    first = seen_by(ranks, drawn(0))
    return TrainingRecord(parallel, dict(first), dict(first), steps, dict(SPLIT), ["up.weight"])


def first(change: Callable[[TrainingRecord], None], parallel: ParallelConfig = LAYOUT) -> Difference:
    layout = record(parallel)
    change(layout)
    found = compare(record(), layout).first
    assert found is not None
    return found


def scale_gradients(factor: float, *names: str) -> Callable[[TrainingRecord], None]:
    def change(layout: TrainingRecord) -> None:
        for name in names:
            views = layout.steps[1].gradients[name]
            layout.steps[1].gradients[name] = dict.fromkeys(views, factor * views[0])

    return change


def test_the_same_records_have_no_difference() -> None:
    comparison = compare(record(), record(LAYOUT))
    assert comparison.first is None
    assert [row.step for row in comparison.rows] == [1, 2]
    assert all(size == 0.0 for row in comparison.rows for _, size in row.worst.values())


@pytest.mark.parametrize(
    ("factor", "names", "cause"),
    [
        (3.0, NAMES, "every gradient is 3 x the reference, which is dp: summed over data ranks and not averaged"),
        (1 / 3, NAMES, "every gradient is 0.3333 x the reference, which is 1 / dp: averaged"),
        (2.0, ("down.weight",), "the gradient is 2 x the reference, which is tp: summed over tp though"),
        (0.5, ("norm.weight",), "the gradient is 0.5 x the reference, which is 1 / tp: averaged over tp"),
        (2.0, ("up.weight",), "the gradient is 2 x the reference: a tied weight's gradient is summed between"),
        (3.0, ("down.weight",), "the gradient is 3 x the reference, which is dp: summed over the data ranks where"),
    ],
)
def test_a_ratio_tells_its_cause(factor: float, names: tuple[str, ...], cause: str) -> None:
    found = first(scale_gradients(factor, *names))
    *others, last = names  # the backward comes to it first
    assert (found.step, found.what, found.name, found.also) == (2, "gradient", last, tuple(reversed(others)))
    assert found.causes[0].startswith(cause)


@pytest.mark.parametrize(
    ("axis", "stride", "size", "share", "cause"),
    [
        ("tp", 1, 2, 1.0, "each tp rank has a summand of it"),
        ("dp_replicate", 2, 3, 1.0, "each dp_replicate rank has a summand of it: its gradient is not summed"),
        ("dp_replicate", 2, 3, 3.0, "the dp_replicate ranks' gradients are not averaged: their mean is right"),
    ],
)
def test_copies_that_differ_tell_what_is_missing(axis: str, stride: int, size: int, share: float, cause: str) -> None:
    def change(layout: TrainingRecord) -> None:
        whole = layout.steps[0].gradients["norm.weight"][0]
        noise = [np.float32(i) * np.ones_like(whole) for i in range(size - 1)]
        parts = [share * (whole / size + extra) for extra in (*noise, -sum(noise))]
        layout.steps[0].gradients["norm.weight"] = {rank: parts[rank // stride % size] for rank in range(6)}

    found = first(change)
    assert (found.step, found.what, found.name) == (1, "gradient", "norm.weight")
    assert found.causes[0].startswith(cause)


def test_blocks_in_another_order_tell_of_a_gather() -> None:
    def change(layout: TrainingRecord) -> None:
        views = layout.steps[0].gradients["down.weight"]
        layout.steps[0].gradients["down.weight"] = dict.fromkeys(views, np.roll(views[0], 2, axis=1))

    assert "dim 1 has the right 2 blocks in the order [1, 0]: a gather over tp" in first(change).causes[0]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("norm.weight", "only parameters that tp replicates differ"),
        ("up.weight", "only column-parallel weights differ, and the loss agrees"),
        ("down.weight", "the backward of a collective is not the conjugate of its forward"),
    ],
)
def test_without_a_pattern_the_kind_of_parameter_tells_where_to_look(name: str, cause: str) -> None:
    def change(layout: TrainingRecord) -> None:
        layout.steps[0].gradients[name] = dict.fromkeys(range(6), drawn(9)[name])

    assert first(change).causes[0].startswith(cause)


def test_a_gradient_of_a_frozen_parameter_is_named() -> None:
    alone = record()
    del alone.steps[0].gradients["up.weight"]
    found = compare(alone, record(LAYOUT)).first
    assert found is not None and (found.what, found.name) == ("gradient", "up.weight")
    assert found.causes[0].startswith("one process has no gradient for it: it is frozen")


def test_the_norm_of_right_gradients_raises_no_alarm_however_steep_the_model() -> None:
    def round_gradients(layout: TrainingRecord) -> None:
        for name, views in layout.steps[1].gradients.items():
            layout.steps[1].gradients[name] = dict.fromkeys(views, views[0] * np.float32(1 + 5e-6))
        layout.steps[1].grad_norm *= 1 + 5e-6

    layout = record(LAYOUT)
    round_gradients(layout)
    assert compare(record(), layout).first is None
    layout.steps[1].grad_norm *= 1 + 5e-6  # which no gradient has
    found = compare(record(), layout).first
    assert found is not None and found.what == "gradient norm"


def test_a_missing_gradient_is_named() -> None:
    found = first(lambda layout: layout.steps[0].gradients.pop("up.weight", None) and None)
    assert found.name == "up.weight" and found.size == float("inf")
    assert found.causes[0].startswith("no rank has a gradient for it")


def test_a_gradient_that_is_not_finite_differs() -> None:
    found = first(scale_gradients(float("nan"), "norm.weight"))
    assert (found.what, found.name) == ("gradient", "norm.weight")


@pytest.mark.parametrize(("name", "times"), [("norm.weight", 2), ("down.weight", 3)])
def test_a_norm_that_differs_names_who_is_counted_twice(name: str, times: int) -> None:
    def change(layout: TrainingRecord) -> None:
        extra = (times - 1) * np.square(layout.steps[0].gradients[name][0]).sum()
        layout.steps[0].grad_norm = float(np.sqrt(layout.steps[0].grad_norm ** 2 + extra))

    found = first(change)
    assert (found.step, found.what, found.parameters) == (1, "gradient norm", (name,))
    assert f"parameters counted {times} times" in found.causes[0]


def test_a_parameter_that_does_not_move_is_named() -> None:
    def change(layout: TrainingRecord) -> None:
        layout.steps[0].parameters["down.weight"] = layout.start["down.weight"]

    found = first(change)
    assert (found.step, found.what, found.name) == (1, "parameter", "down.weight")
    assert found.causes[0].startswith("it has not moved")


def test_a_loss_that_differs_names_its_ratio_and_the_gradients() -> None:
    def change(layout: TrainingRecord) -> None:
        layout.steps[0].loss *= 3.0

    found = first(change)
    assert (found.what, found.parameters) == ("loss", ())
    assert found.causes[0].startswith("the loss is 3 x the reference (which is dp_replicate or dp)")


def test_the_report_tells_the_first_difference() -> None:
    layout = record(LAYOUT)
    scale_gradients(2.0, "down.weight")(layout)
    comparison: LayoutComparison = compare(record(), layout)
    text = as_text(comparison)
    assert text.startswith("dp_replicate 3 x tp 2 against one process, 2 steps in float32")
    assert "differs first in step 2: gradient of down.weight, by 1 (limit 0.0001), on ranks 0, 1, 2, 3, 4, 5" in text
    content = json.loads(as_json(comparison))
    assert content["same"] is False and content["layout"]["tp"] == 2
    assert content["first_difference"]["name"] == "down.weight"
    assert content["steps"][1]["worst"]["gradient"]["name"] == "down.weight"


def big(**parallel: object) -> Recipe:
    return Recipe(
        model=ModelConfig(layers=80, hidden=8192, heads=64, kv_heads=8, ffn_hidden=28672, vocab=128256),
        train=TrainConfig(steps=1000, global_batch_size=1024, seq_len=8192, precision="bf16", eval_every=10),
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 8, "pp": 4, "dp_shard": 8},
        {"tp": 4, "sequence_parallel": True},
        {"pp": 4, "schedule": "interleaved_1f1b", "virtual_stages": 5, "dp_replicate": 2, "microbatch_size": 4},
    ],
)
def test_shrinking_keeps_the_layout_and_what_it_divides(parallel: dict[str, object]) -> None:
    recipe = shrink(big(**parallel), layers=3)
    assert recipe.parallel.axes == ParallelConfig(**parallel).axes  # type: ignore[arg-type]
    assert recipe.model.layers == max(3, recipe.parallel.stages)
    assert recipe.model.heads == 2 * recipe.model.key_value_heads
    assert recipe.model.hidden <= 128 and recipe.train.precision == "fp32"
    assert recipe.microbatches <= 2 * recipe.parallel.pp


def test_shrinking_keeps_heads_wider_or_narrower_than_the_model_and_their_scaling() -> None:
    scaling = RopeScaling(type="yarn", factor=4.0, original_max_positions=8192)
    recipe = big(tp=4, pp=2)
    for head_dim, small in ((256, 16), (80, 4), (128, 8)):
        shrunk = shrink(replace(recipe, model=replace(recipe.model, head_dim=head_dim, rope_scaling=scaling)))
        assert (shrunk.model.hidden, shrunk.model.heads, shrunk.model.head_size) == (64, 8, small)
        assert shrunk.model.rope_scaling == scaling


def test_help_and_a_wrong_key_do_not_import_torch() -> None:
    program = (
        "import sys; from parallel3d.tools.check_layout import command; "
        "print(command.main(sys.argv[1:]), 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, "quickstart", "modle.layers=2"], capture_output=True, text=True
    )
    assert run.stdout.strip() == "2 False"
    assert "did you mean model.layers?" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no RECIPE is given; try quickstart, another that --help lists"),
        (
            ["quickstart", "--steps", "0"],
            "--steps: '0' must be a whole number from 1 on; see parallel3d-check-layout --help",
        ),
        (["quickstart", "--vocab", "9"], "--vocab: goes with --model"),
        (["quickstart", "parallel.tp=3"], "parallel.tp = 3: must divide"),
        (["quickstart", "parallel.dp_shard=8"], "a check starts at most 16; 2 along each axis show the same faults"),
        (["--model", "nowhere:build", "parallel.tp=2"], "--model nowhere:build: No module named 'nowhere'"),
        (["--model", "json:nothing", "parallel.tp=2"], "json has no function nothing"),
        (["--model", "json", "parallel.tp=2"], "--model json: must be module:function"),
        (
            ["--model", "json:dumps", "parallel.pp=2"],
            "with --model only parallel.dp_replicate, dp_shard and tp are set",
        ),
        (["--model", "json:dumps", "parallel.tp=two"], "parallel.tp=two: must be a whole number"),
        (["--model", "json:dumps"], "one process has nothing to be compared with; try parallel.tp=2"),
        (
            ["--model", f"{__name__}:norm_of", "parallel.tp=2", "--layers", "3"],
            "--layers: norm_of has no parameter layers",
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_would_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert check_layout.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_command_checks_the_model_of_its_page(tmp_path: Path) -> None:
    blocks = re.findall(
        r"```python\n(# (\S+)\n.*?)```", (Path(__file__).parents[1] / "docs" / "check-layout.md").read_text(), re.DOTALL
    )
    for text, name in blocks:
        (tmp_path / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "parallel3d.tools.check_layout",
        "--model",
        "my_model:build",
        "parallel.tp=2",
    ]
    run = subprocess.run([*command, "--layers", "3", "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    content = json.loads(run.stdout)
    assert content["same"] is True and len(content["steps"]) == 3


def test_the_command_exits_with_1_where_a_model_differs(tmp_path: Path) -> None:
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    command = [
        sys.executable,
        "-m",
        "parallel3d.tools.check_layout",
        "--model",
        "forgetful:build",
        "parallel.dp_shard=2",
    ]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert "differs first in step 1: gradient of 1.bias" in run.stdout
    assert "the dp_shard ranks' gradients are not averaged: their mean is right" in run.stdout


FORGETFUL = """
from torch import nn

def build(mesh, hidden=8, vocab=20):
    return nn.Sequential(nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab))
"""
