"""Faults planted in the ranks are found and named; layouts that are right pass.

Each fault is a patch in the worker that records, and none an option of the product.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
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

from parallel3d import engine
from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.recipe import ParallelConfig, Recipe
from parallel3d.convert.apply import tensor_parallelize
from parallel3d.convert.rules import Column, Rules
from parallel3d.data.loader import Batch
from parallel3d.layers import context_parallel, experts, norm, router
from parallel3d.layers.experts import ExpertWeights
from parallel3d.layers.parameter import ParameterSpec
from parallel3d.layers.positions import RotaryEmbedding
from parallel3d.layers.router import Router
from parallel3d.layers.sequence import SequencePart
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.mesh import Axis
from parallel3d.recipes import named_recipe
from parallel3d.sharding.optimizer_parts import OptimizerPart
from parallel3d.tools.check_layout.compare import LayoutComparison, compare
from parallel3d.tools.check_layout.data import TrainingRecord
from parallel3d.tools.check_layout.model import ModelCheck, record_model
from parallel3d.tools.check_layout.plain import record_plain
from parallel3d.tools.check_layout.record import record_recipe
from parallel3d.tools.check_layout.shrink import shrink
from parallel3d.training.loss import MeanLoss
from parallel3d.training.step_result import StepResult
from parallel3d.training.trainer import Trainer
from tests.distributed.training_cases import long

ROOT = Path(__file__).parents[2]
STEPS = 2


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 64)
        self.down = nn.Linear(64, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


RULES: Rules = {
    "embed": "vocab",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": Column(gather_output=True),
}


def build_toy(
    mesh: DeviceMesh | None,
    hidden: int = 16,
    vocab: int = 50,
) -> nn.Module:
    """A model of somebody else: blocks of a norm and an MLP, with biases."""
    parts = {
        "embed": nn.Embedding(vocab, hidden),
        "blocks": nn.Sequential(Block(hidden), Block(hidden)),
        "head": nn.Linear(hidden, vocab, bias=False),
    }
    model = nn.Sequential(OrderedDict(parts))
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


def doubled_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return 2 * LAYER_NORM(self, x)


def cut_backwards(
    self: ParameterSpec,
    tp: Axis,
    shards: Axis | None = None,
) -> tuple[range, range]:
    return BOX(self, replace(tp, rank=tp.size - 1 - tp.rank), shards)


def whole_gradient(
    *args: object, partial_gradient: bool = False, **kwargs: object
) -> ParameterSpec:
    return ParameterSpec(*args, **kwargs)  # type: ignore[arg-type]


def replicated_twice(self: engine.Engine) -> Tensor:
    axes = self.axes
    again = [p for p in self.trained if p.spec.dim is None and p.local.grad is not None]
    extra = sum(p.local.grad.double().square().sum() for p in again) / axes["tp"].size  # type: ignore[union-attr]
    return SQUARED_NORM(self) + extra / axes["dp_replicate"].size


def completed_twice(self: engine.Engine, observe: Any = None) -> None:
    COMPLETE(self, observe)
    data = self.data
    self.data = []
    COMPLETE(self, observe)
    self.data = data


def positions_from_zero(self: RotaryEmbedding, x: Tensor, *_: object) -> Tensor:
    return ROTATE(self, x)


def labels_shifted_on_each_rank(self: Trainer, batch: Batch, **settings: Any) -> StepResult:
    """The label of a part's last token is the first token of the part."""
    take = self.sequence_part.take
    labels = batch.labels.clone()
    own = self.sequence_part.positions(labels.shape[2], labels.device)
    labels[..., own] = take(batch.inputs, 2).roll(-1, 2)
    return TRAIN_STEP(self, replace(batch, labels=labels), **settings)


def own_keys_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return ctx.part.take(grad, 1), None, None


def chunks_in_rank_order(
    self: SequencePart, parts: list[Tensor], dim: int, out: Tensor | None = None
) -> Tensor:
    return torch.cat(parts, dim, out=out)


def without_experts(self: engine.Engine) -> Tensor:
    trained = self.trained
    self.trained = [p for p in trained if p.spec.stacked == 1]
    square = SQUARED_NORM(self)
    self.trained = trained
    return square


def biased_weights(self: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    chosen, weights = ROUTE(self, x)
    assert self.bias is not None
    return chosen, weights + self.bias[chosen]


def reversed_results(*args: Any) -> Tensor:
    return COMBINE(*args).flip(0)


def experts_of_rank_0(self: OptimizerPart, local: Tensor) -> Tensor:
    if isinstance(self._find.args[0], ExpertWeights):  # type: ignore[attr-defined]
        dist.broadcast(local, 0)
    return DISTRIBUTED(self, local)


ADD_PRODUCT = experts.add_product
ROUTE = Router.forward
COMBINE = experts.combine
DISTRIBUTED = OptimizerPart.distributed
LAYER_NORM = nn.LayerNorm.forward
ROTATE = RotaryEmbedding.forward
TRAIN_STEP = Trainer.train_step
MEAN_LOSS = MeanLoss.__call__
BOX = ParameterSpec.box
SQUARED_NORM = engine.Engine.squared_norm_share
COMPLETE = engine.Engine.finish_gradients
PATCHES: dict[str, tuple[object, str, object]] = {
    "norm gradient not reduced": (norm, "ParameterSpec", whole_gradient),
    "output doubled": (nn.LayerNorm, "forward", doubled_norm),
    "replicated twice in the norm": (engine.Engine, "squared_norm_share", replicated_twice),
    "weights cut in the wrong order": (ParameterSpec, "box", cut_backwards),
    "dp averaging forgotten": (sys.modules[__name__], "divisor", lambda mesh: 1),
    "tied summed twice": (engine.Engine, "finish_gradients", completed_twice),
    "positions from 0 on each rank": (RotaryEmbedding, "forward", positions_from_zero),
    "labels shifted after slicing": (Trainer, "train_step", labels_shifted_on_each_rank),
    "gradients of k and v not summed": (
        context_parallel._GatherSequence,
        "backward",
        own_keys_gradient,
    ),
    "norm counts a number cp times": (
        engine.Engine,
        "squared_norm_share",
        lambda self: 2 * SQUARED_NORM(self),
    ),
    "chunks in another order": (SequencePart, "joined", chunks_in_rank_order),
    "router's gradient not summed over tp": (router, "ParameterSpec", whole_gradient),
    "experts' gradients times ep": (
        experts,
        "add_product",
        lambda total, grad, x: ADD_PRODUCT(total, 2 * grad, x),
    ),
    "experts missing from the norm": (engine.Engine, "squared_norm_share", without_experts),
    "loads counted again in a recompute": (router, "is_in_backward", lambda: False),
    "bias in the weight": (Router, "forward", biased_weights),
    "results in another order": (experts, "combine", reversed_results),
    "one rank's experts saved for all": (OptimizerPart, "distributed", experts_of_rank_0),
    "loss divided by local tokens": (
        MeanLoss,
        "__call__",
        lambda self, *args: 2 * MEAN_LOSS(self, *args),
    ),
}


@contextmanager
def planted(fault: str) -> Iterator[None]:
    with mock.patch.object(*PATCHES[fault]) if fault else nullcontext():
        yield


def record(fault: str, job: Recipe | ModelCheck) -> TrainingRecord:
    torch.manual_seed(dist.get_rank())  # what depends on it would differ between the ranks
    with planted(fault):
        return record_model(job) if isinstance(job, ModelCheck) else record_recipe(job)


def record_alone(job: Recipe | ModelCheck) -> TrainingRecord:
    return record_model(job) if isinstance(job, ModelCheck) else record_plain(job)


def small(name: str, model: Any = None, tied: bool = False, **parallel: Any) -> Recipe:
    """Returns a shipped recipe, shrunk, in a layout of the test's."""
    recipe = named_recipe(name)
    changed = replace(recipe.model, **(model or {}))
    changed = replace(changed, tied_embeddings=tied or changed.tied_embeddings)
    layout = ParallelConfig(microbatch_size=2, **parallel)
    return shrink(replace(recipe, model=changed, parallel=layout), steps=STEPS)


def toy(**parallel: int) -> ModelCheck:
    return ModelCheck(f"{__name__}:build_toy", ParallelConfig(**parallel), {"vocab": 50}, STEPS)


REFERENCES: dict[str, TrainingRecord] = {}


@pytest.fixture
def checked(world: Callable) -> Callable[[Recipe | ModelCheck, str], LayoutComparison]:
    def check(job: Recipe | ModelCheck, fault: str = "") -> LayoutComparison:
        alone = replace(job, parallel=ParallelConfig(microbatch_size=job.parallel.microbatch_size))
        if repr(alone) not in REFERENCES:
            REFERENCES[repr(alone)] = world(1).run(record_alone, alone)[0]
        layout = world(job.parallel.world_size).run(record, fault, job)[0]
        return compare(REFERENCES[repr(alone)], layout)

    return check


GPT = {
    "architecture": "gpt",
    "max_positions": 2048,
    "kv_heads": None,
    "tied_embeddings": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
SEQUENCE = {"tp": 2, "sequence_parallel": True}
MIXTURE = {
    "experts": ExpertsConfig(
        count=8,
        per_token=2,
        hidden=96,
        bias_rate=0.01,
    )
}


LAYOUTS = [
    ("quickstart", {**SEQUENCE, "tied": True}),
    ("quickstart", {**SEQUENCE, "dp_shard": 2, "ep": 4, "model": MIXTURE}),
    # The others' models are one of two when they are shrunk.
    ("gpt2-124m", {"tp": 2, "pp": 2}),
    (
        "llama3.1-405b-16384gpu",
        {
            "pp": 2,
            "tp": 2,
            "schedule": "interleaved_1f1b",
            "virtual_stages": 2,
        },
    ),
    # Dropout's masks too are those of one process.
    ("quickstart", {**SEQUENCE, "recompute": "every_n", "recompute_every": 2, "model": GPT}),
    long("quickstart", {"pp": 2, "tied": True}),
]


@pytest.mark.parametrize("name, layout", LAYOUTS)
def test_a_recipe_is_the_same_model(
    checked: Callable,
    name: str,
    layout: dict[str, Any],
) -> None:
    comparison = checked(small(name, **layout))
    assert comparison.first is None, comparison.first
    assert comparison.steps == STEPS


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "dp_shard": 2}], ids=str)
def test_a_model_of_the_users_is_the_same(
    checked: Callable,
    layout: dict[str, int],
) -> None:
    comparison = checked(toy(**layout))
    assert comparison.first is None, comparison.first


@pytest.mark.parametrize("half", [0, long(1)])
def test_a_planted_fault_is_named(checked: Callable, half: int) -> None:
    sequence_parallel = small("quickstart", **SEQUENCE)
    tied = small("quickstart", pp=2, tied=True)
    split = small("quickstart", cp=2)
    mixture = small("quickstart", dp_shard=2, ep=2, model=MIXTURE)
    faults = {
        "weights cut in the wrong order": (small("quickstart", tp=2), 0, "initial weight"),
        "output doubled": (toy(tp=2), 1, "output of blocks.0.norm"),
        "norm gradient not reduced": (sequence_parallel, 1, "gradient of norm.weight"),
        "dp averaging forgotten": (toy(dp_shard=2), 1, "gradient of head.weight"),
        "tied summed twice": (tied, 1, "gradient of embed.weight"),
        "replicated twice in the norm": (small("quickstart", tp=2), 1, "gradient norm"),
        "positions from 0 on each rank": (split, 1, "output of layers.0.attention"),
        "labels shifted after slicing": (split, 1, "loss"),
        "gradients of k and v not summed": (split, 1, "gradient of layers.1.attention.v.weight"),
        "norm counts a number cp times": (split, 1, "gradient norm"),
        "chunks in another order": (split, 1, "output of layers.0.attention"),
        "loss divided by local tokens": (split, 1, "loss"),
        "router's gradient not summed over tp": (
            small("quickstart", tp=2, model=MIXTURE),
            1,
            "gradient of layers.1.mlp.router.weight",
        ),
        "experts' gradients times ep": (mixture, 1, "gradient of layers.1.mlp.experts.down"),
        "experts missing from the norm": (mixture, 1, "gradient norm"),
        "loads counted again in a recompute": (
            small("quickstart", tp=2, recompute="full", model=MIXTURE),
            1,
            "load of layers.0.mlp.router",
        ),
        "bias in the weight": (mixture, 2, "output of layers.0.mlp"),
        "results in another order": (mixture, 1, "output of layers.0.mlp"),
        "one rank's experts saved for all": (mixture, 0, "initial weight of layers.0.mlp.experts"),
    }
    assert faults.keys() == PATCHES.keys()
    for fault, (job, step, what) in [*faults.items()][half::2]:
        first = checked(job, fault).first
        assert first is not None and first.step == step, fault
        assert f"{first.what} of {first.name}".startswith(what), fault
