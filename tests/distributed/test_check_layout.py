"""Faults planted in the ranks are found and named; layouts that are right pass.

Each fault is a patch in the worker that records, and none an option of the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.nn import functional as F

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.convert import forms as convert_forms
from parallel3d.convert.apply import tensor_parallelize
from parallel3d.convert.rules import Column, Rules
from parallel3d.layers import norm
from parallel3d.layers.gradients import local_tensor
from parallel3d.layers.parameter import ParameterSpec
from parallel3d.mesh import Axis
from parallel3d.models import shape_cards
from parallel3d.recipes import find_recipe
from parallel3d.sharding.optimizer_parts import LocalParameter
from parallel3d.tools.check_layout.compare import LayoutComparison, compare
from parallel3d.tools.check_layout.data import TrainingRecord
from parallel3d.tools.check_layout.model import ModelCheck, record_model
from parallel3d.tools.check_layout.plain import record_plain
from parallel3d.tools.check_layout.record import record_recipe
from parallel3d.tools.check_layout.report import told
from parallel3d.tools.check_layout.shrink import shrink
from parallel3d.training import update

ROOT = Path(__file__).parents[2]
STEPS = 2


class Toy(nn.Module):
    """A model of somebody else: blocks of a norm and an MLP, with biases."""

    def __init__(self, layers: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(hidden), "up": nn.Linear(hidden, 64), "down": nn.Linear(64, hidden)})
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["down"](F.gelu(block["up"](block["norm"](x))))  # type: ignore[index]
        return self.head(x)


RULES: Rules = {
    "embed": "vocab",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": Column(gather_output=True),
}


def build_toy(mesh: DeviceMesh | None, layers: int = 2, hidden: int = 16, vocab: int = 50) -> nn.Module:
    model = Toy(layers, hidden, vocab)
    if mesh is not None:
        tensor_parallelize(model, mesh, RULES, check=False)  # parallel3d-check-layout is the check
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: mean_over_data(p, mesh))
    return model


def mean_over_data(parameter: Tensor, mesh: DeviceMesh) -> None:
    assert parameter.grad is not None
    local = local_tensor(parameter.grad)
    dist.all_reduce(local, group=mesh["dp_shard"].get_group())
    local.div_(divisor(mesh))


def divisor(mesh: DeviceMesh) -> int:
    return mesh["dp_shard"].size()


def summed_where_whole(self: convert_forms.RowForm, x: Tensor) -> Tensor:
    weight, bias = self.weight_and_bias()
    return convert_forms.reduce_from_region(F.linear(x, weight, bias), self.axis)


def gathered_backwards(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    return torch.cat(GATHER(x, axis, dim).chunk(axis.size, dim)[::-1], dim)


def cut_backwards(self: ParameterSpec, tp: Axis, shards: Axis | None = None) -> tuple[range, range]:
    return BOX(self, replace(tp, rank=tp.size - 1 - tp.rank), shards)


def whole_gradient(*args: object, partial_gradient: bool = False, **kwargs: object) -> ParameterSpec:
    return ParameterSpec(*args, **kwargs)  # type: ignore[arg-type]


def replicated_twice(parameters: list[LocalParameter], axes: dict[str, Axis]) -> Tensor:
    again = [p for p in parameters if p.spec.dim is None and p.local.grad is not None]
    extra = sum(p.local.grad.double().square().sum() for p in again) / axes["tp"].size  # type: ignore[union-attr]
    return SQUARED_NORM(parameters, axes) + extra / axes["dp_replicate"].size


def completed_twice(self: update.GradientSync) -> None:
    COMPLETE(self)
    COMPLETE(self)


GATHER, BOX = convert_forms.gather_from_region, ParameterSpec.box
SQUARED_NORM, COMPLETE = update.squared_norm, update.GradientSync.complete
FAULTS = {
    "none": nullcontext,
    "norm gradient not reduced": lambda: mock.patch.object(norm, "ParameterSpec", whole_gradient),
    "bias added tp times": lambda: mock.patch.object(convert_forms.RowForm, "forward", summed_where_whole),
    "replicated twice in the norm": lambda: mock.patch.object(update, "squared_norm", replicated_twice),
    "gather in the wrong order": lambda: mock.patch.object(convert_forms, "gather_from_region", gathered_backwards),
    "weights cut in the wrong order": lambda: mock.patch.object(ParameterSpec, "box", cut_backwards),
    "dp averaging forgotten": lambda: mock.patch(f"{__name__}.divisor", lambda mesh: 1),
    "tied summed twice": lambda: mock.patch.object(update.GradientSync, "complete", completed_twice),
}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    with FAULTS[fault]():
        yield


def record(fault: str, job: Recipe | ModelCheck) -> TrainingRecord:
    torch.manual_seed(dist.get_rank())  # what depends on it would differ between the ranks
    with planted(fault):
        return record_model(job) if isinstance(job, ModelCheck) else record_recipe(job)


def record_alone(job: Recipe | ModelCheck) -> TrainingRecord:
    return record_model(job) if isinstance(job, ModelCheck) else record_plain(job)


def small(name: str, **parallel: object) -> Recipe:
    """Returns a shipped recipe, shrunk, in a layout of the test's."""
    tied = bool(parallel.pop("tied", False))
    changes: Any = parallel.pop("model", {})
    recipe = load_recipe(find_recipe(name), cards=shape_cards())
    layout = ParallelConfig(microbatch_size=2, **parallel)  # type: ignore[arg-type]
    model = replace(recipe.model, **changes)
    model = replace(model, tied_embeddings=tied or model.tied_embeddings)
    return shrink(replace(recipe, model=model, parallel=layout), steps=STEPS)


def toy(**parallel: int) -> ModelCheck:
    return ModelCheck(
        target=f"{__name__}:build_toy", parallel=ParallelConfig(**parallel), options={}, vocab=50, steps=STEPS
    )


@pytest.fixture
def checked(world: Callable) -> Callable[[Recipe | ModelCheck, str], LayoutComparison]:
    def check(job: Recipe | ModelCheck, fault: str = "none") -> LayoutComparison:
        alone = replace(job, parallel=ParallelConfig(microbatch_size=job.parallel.microbatch_size))
        layout = world(job.parallel.world_size).run(record, fault, job)[0]
        return compare(reference(world, alone), layout)

    return check


REFERENCES: dict[str, TrainingRecord] = {}


def reference(world: Callable, job: Recipe | ModelCheck) -> TrainingRecord:
    if repr(job) not in REFERENCES:
        REFERENCES[repr(job)] = world(1).run(record_alone, job)[0]
    return REFERENCES[repr(job)]


LAYOUTS = [
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True, "tied": True},
    {"pp": 2, "tied": True},
    {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    {"dp_shard": 2},
    {"dp_replicate": 2, "recompute": "full"},
    {"dp_replicate": 2, "dp_shard": 2},
    {"tp": 2, "dp_shard": 2, "sequence_parallel": True},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "tied": True},
]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("quickstart", layout) for layout in LAYOUTS),
        # The others' models are one of two when they are shrunk.
        ("gpt2-124m", {"tp": 2, "pp": 2}),
        ("llama3.1-405b-16384gpu", {"pp": 2, "tp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}),
    ],
    ids=lambda case: case if isinstance(case, str) else "-".join(f"{k}{v}" for k, v in case.items()),
)
def test_a_shipped_recipe_is_the_same_model(checked: Callable, name: str, layout: dict[str, object]) -> None:
    comparison = checked(small(name, **layout))
    assert comparison.first is None, comparison.first
    assert len(comparison.rows) == STEPS


GPT = {
    "architecture": "gpt",
    "max_positions": 2048,
    "kv_heads": None,
    "tied_embeddings": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, {"tp": 2, "sequence_parallel": True, "recompute": "every_n", "recompute_every": 2}),
        (GPT, {"tp": 2, "pp": 2}),
        ({"heads": 8, "kv_heads": 2, "hidden": 128, "vocab": 1005, "qkv_bias": True, "qk_norm": True}, {"tp": 4}),
    ],
    ids=["gpt, sequence parallel", "gpt, pipeline", "shared heads, odd vocabulary"],
)
def test_every_architecture_is_the_same_model(
    checked: Callable, model: dict[str, object], layout: dict[str, object]
) -> None:
    """Dropout's masks too are those of one process."""
    comparison = checked(small("quickstart", model=model, **layout))
    assert comparison.first is None, comparison.first


@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp_shard": 2}, {"tp": 2, "dp_shard": 2}], ids=str)
def test_a_model_of_the_users_is_the_same(checked: Callable, layout: dict[str, int]) -> None:
    comparison = checked(toy(**layout))
    assert comparison.first is None, comparison.first


def test_a_norm_gradient_that_is_not_summed_over_tp_is_named(checked: Callable) -> None:
    first = checked(small("quickstart", tp=2, sequence_parallel=True), "norm gradient not reduced").first
    assert (first.step, first.what, first.name) == (1, "gradient", "norm.weight")  # the backward comes to it first
    assert "each tp rank has a summand of it (under sequence parallelism" in first.causes[0]
    assert {"layers.0.mlp_norm.weight", "layers.0.attention_norm.weight"} <= set(first.also)
    said, *rest = told(first)
    page = (Path(__file__).parents[2] / "docs" / "check-layout.md").read_text()
    assert said.partition(", by")[0] in page and "\n".join(rest) in page


def test_a_bias_that_is_added_on_every_rank_is_named(checked: Callable) -> None:
    first = checked(toy(tp=2), "bias added tp times").first
    assert (first.step, first.what, first.name) == (1, "output", "blocks.0.down")
    assert "blocks.0.down.bias" in first.parameters
    assert first.causes[0].startswith("blocks.0.down.bias is added 2 times (which is tp): add it after the sum")


def test_replicated_parameters_that_count_twice_in_the_norm_are_named(checked: Callable) -> None:
    first = checked(small("quickstart", tp=2), "replicated twice in the norm").first
    assert (first.step, first.what) == (1, "gradient norm")
    assert first.parameters and all("norm" in name for name in first.parameters)
    assert "parameters counted 2 times (which is tp) in the squared norm: replicated over tp" in first.causes[0]


def test_a_gather_in_the_wrong_order_is_named(checked: Callable) -> None:
    first = checked(toy(tp=2), "gather in the wrong order").first
    assert (first.step, first.what, first.name, first.parameters) == (1, "output", "head", ("head.weight",))
    assert "dim 2 has the right 2 blocks in the order [1, 0]: a gather over tp" in first.causes[0]


def test_weights_that_are_cut_in_the_wrong_order_are_named(checked: Callable) -> None:
    first = checked(small("quickstart", tp=2), "weights cut in the wrong order").first
    assert (first.step, first.what, first.name) == (0, "initial weight", "embed.weight")
    assert "dim 0 has the right 2 blocks in the order [1, 0]" in first.causes[0]


def test_forgotten_averaging_over_data_ranks_is_named(checked: Callable) -> None:
    first = checked(toy(dp_shard=2), "dp averaging forgotten").first
    assert (first.step, first.what, first.name) == (1, "gradient", "head.weight")
    assert first.causes[0].startswith(
        "every gradient is 2 x the reference, which is dp: summed over data ranks and not"
    )


def test_a_tied_weight_that_is_summed_twice_is_named(checked: Callable) -> None:
    first = checked(small("quickstart", pp=2, tied=True), "tied summed twice").first
    assert (first.step, first.what, first.name, first.also) == (1, "gradient", "embed.weight", ())
    assert first.causes[0].startswith("the gradient is 2 x the reference: a tied weight's gradient is summed between")
