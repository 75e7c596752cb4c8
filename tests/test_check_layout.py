"""The comparison's arithmetic and the command line; the faults planted in ranks are in
tests/distributed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.tools.check_layout import command as check_layout
from parallel3d.tools.check_layout.compare import (
    LIMITS,
    Difference,
    LayoutComparison,
    compare,
    norm_of,
)
from parallel3d.tools.check_layout.data import Array, StepRecord, TrainingRecord, Views
from parallel3d.tools.check_layout.report import as_text
from parallel3d.tools.check_layout.shrink import shrink

NAMES = ("norm.weight", "up.weight", "down.weight")
ALONE = ParallelConfig()
LAYOUT = ParallelConfig(tp=2, dp_replicate=3)


def drawn(seed: int) -> dict[str, Array]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=(4, 4)).astype(np.float32) for name in NAMES}


def seen_by(ranks: int, tensors: dict[str, Array]) -> Views:
    return {name: dict.fromkeys(range(ranks), tensor) for name, tensor in tensors.items()}


def record(parallel: ParallelConfig = ALONE) -> TrainingRecord:
    """Two steps of a run that is the same whatever its layout."""
    ranks = parallel.world_size
    weights = drawn(0)
    steps = []
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
    assert comparison.steps == 2
    assert set(comparison.largest.values()) == {0.0}
    # These records have neither outputs nor experts, so none is said to agree.
    assert {*LIMITS} - {*comparison.largest} == {"choice", "load", "output"}


def test_the_gradient_that_the_backward_pass_reaches_first_is_named_with_its_ratio() -> None:
    comparison = compared(lambda layout: scale_gradients(layout, 3.0, *NAMES))
    found = comparison.first
    assert found is not None
    assert found.step == 2
    assert found.what == "gradient"
    assert found.name == NAMES[-1]
    assert found.causes[0].startswith("it is 3 x the reference: summed instead of averaged")
    text = as_text(comparison)
    assert text.startswith("dp_replicate 3 x tp 2 compared with one process, 2 steps in float32")
    said = "differs first in step 2: gradient of down.weight, by 2 (limit 0.0001), on ranks 0, 1, 2"
    assert said in text


def test_copies_that_differ_are_named() -> None:
    def change(layout: TrainingRecord) -> None:
        layout.steps[0].gradients["norm.weight"][3] = drawn(7)["norm.weight"]

    found = first(change)
    assert found.step == 1
    assert found.name == "norm.weight"
    assert found.ranks == (3,)
    assert found.causes[0].startswith("the ranks hold different gradients")


def test_a_gradient_that_only_one_side_has_is_named() -> None:
    alone = record()
    del alone.steps[0].gradients["up.weight"]
    frozen = compare(alone, record(LAYOUT)).first
    missing = first(lambda layout: layout.steps[0].gradients.pop("up.weight"))
    assert frozen is not None
    assert missing.size == float("inf")
    for found in (frozen, missing):
        assert found.what == "gradient"
        assert found.name == "up.weight"
        assert found.causes[0].startswith("only one side has a gradient for it")


def test_the_norm_is_compared_with_the_gradients_of_its_own_layout() -> None:
    def scale(layout: TrainingRecord, factor: float) -> None:
        scale_gradients(layout, 1 + 5e-6, *NAMES)
        layout.steps[1].grad_norm *= factor

    assert compared(lambda layout: scale(layout, 1 + 5e-6)).first is None
    assert first(lambda layout: scale(layout, 1 + 1e-5)).what == "gradient norm"


def test_a_parameter_that_does_not_move_and_a_loss_are_named() -> None:
    def stop(layout: TrainingRecord) -> None:
        layout.steps[0].parameters["down.weight"] = layout.start["down.weight"]

    def triple(layout: TrainingRecord) -> None:
        layout.steps[0].loss *= 3.0

    assert first(stop).what == "parameter"
    assert first(stop).name == "down.weight"
    assert first(triple).what == "loss"


def test_shrinking_keeps_the_layout_and_what_it_divides() -> None:
    parallel = ParallelConfig(
        tp=8,
        pp=4,
        schedule="interleaved_1f1b",
        virtual_stages=5,
        dp_shard=8,
    )
    model = ModelConfig(
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        ffn_hidden=28672,
        vocab=128256,
    )
    train = TrainConfig(
        steps=1000,
        global_batch_size=1024,
        seq_len=8192,
        precision="bf16",
    )
    recipe = shrink(Recipe(model=model, train=train, parallel=parallel), layers=3)
    assert recipe.parallel.axes == parallel.axes
    assert recipe.model.layers == max(3, parallel.stages)
    assert recipe.model.heads == 2 * recipe.model.key_value_heads
    assert recipe.model.hidden <= 128
    assert recipe.train.precision == "fp32"
    assert recipe.microbatches <= 2 * parallel.pp


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "give a RECIPE, such as quickstart"),
        ("quickstart --steps 0", "--steps: '0' must be an integer of at least 1"),
        ("quickstart parallel.dp_shard=8", "a check starts at most 16; 2 along each axis"),
        ("--model nowhere:build parallel.tp=2", "nowhere:build: No module named 'nowhere'"),
        ("--model json parallel.tp=2", "must be module:function of a function (mesh, *, vocab"),
        (
            "--model json:dumps parallel.pp=2",
            "with --model set only parallel.dp_replicate, dp_shard and tp",
        ),
        ("--model json:dumps", "at least two processes in total; try parallel.tp=2"),
        (f"--model {__name__}:forgetful parallel.tp=2 --layers 3", "keyword argument 'layers'"),
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


def test_the_command_exits_with_1_where_a_model_differs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check_layout.main(["--model", f"{__name__}:forgetful", "parallel.dp_shard=2"]) == 1
    said = capsys.readouterr().out
    assert "differs first in step 1: gradient of 1.bias" in said
    assert "the ranks hold different gradients of one parameter" in said


def forgetful(mesh: object, hidden: int = 8, vocab: int = 20) -> nn.Module:
    """A model whose gradients nobody averages over the DP ranks."""
    return nn.Sequential(nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab))
