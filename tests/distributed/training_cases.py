"""Training in a layout beside plain torch in one process: small recipes, trainers, curves, and
their comparison.

Tests import it, and the pool's workers import it by name. The package's docstring says how such a
test is written.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor, nn
from torch.distributed import get_rank

from parallel3d.checkpoint.files import save_tensors
from parallel3d.config.load import to_yaml
from parallel3d.config.recipe import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    RopeScaling,
    TrainConfig,
)
from parallel3d.data.loader import Batch, BatchLoader
from parallel3d.data.mixture import windows_of_run
from parallel3d.data.windows import TokensInMemory
from parallel3d.engine import Observe
from parallel3d.layers.parameter import initial_weights
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.mesh import build_mesh
from parallel3d.models import model_class
from parallel3d.models.llama import Llama
from parallel3d.tools.bench.plain_torch.llama import PlainLlama, PlainStack
from parallel3d.tools.check_layout.plain import plain_optimizers
from parallel3d.training.local_sgd import outer_loop_of
from parallel3d.training.state import load_trainer, state_of
from parallel3d.training.trainer import Trainer
from parallel3d.training.worker import training_loader

Curve = list[tuple[float, float]]  # (loss, gradient norm) of each step

VOCAB = 128
SEQ_LEN = 24
BATCH = 8
STEPS = 20
END_OF_TEXT = ord("e")  # with data.documents = mask: it cuts most sequences

# Three blocks: a first, a middle and a last one. More would only slow the tests. DEEP has four,
# for pipelines of four stages, real or virtual.
GROUPED = ModelConfig(
    layers=3,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn_hidden=48,
    vocab=VOCAB,
)
TIED = replace(GROUPED, tied_embeddings=True)
DEEP = replace(GROUPED, layers=4)
DEEP_TIED = replace(TIED, layers=4)
DROPPED = replace(GROUPED, dropout=0.1, attention_dropout=0.1)
GPT = ModelConfig(
    architecture="gpt",
    layers=3,
    hidden=32,
    heads=4,
    ffn_hidden=64,
    vocab=VOCAB,
    max_positions=32,
    tied_embeddings=True,
)
QWEN = replace(
    GROUPED,
    head_dim=12,
    qkv_bias=True,
    qk_norm=True,
    window=7,
    rope_scaling=RopeScaling(
        type="yarn",
        factor=4.0,
        original_max_positions=64,
    ),
)
MANY_HEADS = ModelConfig(
    layers=2,
    hidden=32,
    heads=8,
    ffn_hidden=64,
    vocab=VOCAB,
)


def make_recipe(model: ModelConfig, parallel: ParallelConfig, **train: object) -> Recipe:
    """Returns a recipe with a constant rate that learns fast, and a clipping limit that the
    gradient's norm exceeds."""
    settings: dict[str, object] = {
        "steps": STEPS,
        "global_batch_size": BATCH,
        "seq_len": SEQ_LEN,
        "grad_clip": 0.5,
    }
    return Recipe(
        model=model,
        parallel=parallel,
        train=TrainConfig(**{**settings, **train}),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=1e-3, min_lr_ratio=1.0),
    )


def make_loader(recipe: Recipe, rank: int) -> BatchLoader:
    """Returns batches of a Python module's source, or of a mixture of several's where the recipe
    has sources, for the data rank that `rank` belongs to."""
    modules = [import_module(source.path) for source in recipe.data.sources] or [textwrap]
    texts = [inspect.getsource(module).encode("ascii", "replace") for module in modules]
    streams = [TokensInMemory(np.frombuffer(text, dtype=np.uint8)) for text in texts]
    document_end = END_OF_TEXT if recipe.data.documents == "mask" else None
    return training_loader(recipe, windows_of_run(recipe, streams), rank, document_end)


def own_batch(recipe: Recipe, step: int) -> Batch:
    """Returns this rank's part of the batch of a step."""
    return make_loader(recipe, get_rank()).batch(step)


def make_trainer(recipe: Recipe, *, initialize: bool = True) -> Trainer:
    """Builds the recipe's trainer on this rank; every rank of the world calls it. What is not
    initialised is NaN."""
    mesh = build_mesh(recipe.parallel, "cpu")
    build = model_class(recipe.model.architecture)
    trainer = Trainer(
        recipe,
        mesh=mesh,
        device=torch.device("cpu"),
        model_class=build,
        initialize=initialize,
        outer_loop=outer_loop_of(recipe),
    )
    if not initialize:
        held = [parameter for stage in trainer.stages for parameter in stage.module.parameters()]
        for tensor in [*held, *(parameter.local for parameter in trainer.parameters)]:
            local_tensor(tensor.detach()).fill_(float("nan"))
    return trainer


def train(trainer: Trainer, steps: int) -> Curve:
    """Trains the next steps on their own batches, and returns their curve."""
    loader = make_loader(trainer.recipe, get_rank())
    results = []
    for _ in range(steps):
        result = trainer.train_step(loader.batch(trainer.step))
        results.append((result.loss, result.grad_norm))
    return results


def save_trainer(trainer: Trainer, path: Path) -> None:
    """Writes a checkpoint of the trainer's step. Every rank calls it."""
    save_tensors(*state_of(trainer), path, to_yaml(trainer.recipe))


def resume_beside(
    recipe: Recipe, path: Path, before: int, *, into: Recipe | None = None
) -> tuple[Curve, Curve]:
    """Saves a run after some steps, and returns the curves of two more steps: uninterrupted,
    and resumed.

    `into` is the recipe of the resumed run where it is another one.
    """
    trainer = make_trainer(recipe)
    resumed = make_trainer(into or recipe)
    train(trainer, before)
    save_trainer(trainer, path)
    load_trainer(resumed, path)
    assert resumed.step == before
    assert resumed.progress.tokens == trainer.progress.tokens
    return train(trainer, 2), train(resumed, 2)


def local_weights(trainer: Trainer) -> list[Tensor]:
    """Returns a copy of what this rank's optimizer steps."""
    return [parameter.local.detach().clone() for parameter in trainer.parameters]


def has_weights(trainer: Trainer, weights: list[Tensor]) -> bool:
    """Tells whether what this rank's optimizer steps is bitwise what `local_weights` returned
    before."""
    return all(
        torch.equal(old, new.local) for old, new in zip(weights, trainer.parameters, strict=True)
    )


def overflow_on(trainer: Trainer, steps: set[int], rank: int) -> None:
    """Makes one number of one rank's gradient infinite, after all of it is reduced, in the steps of
    these numbers."""
    complete = trainer.engine.finish_gradients

    def plant(observe: Observe | None = None) -> None:
        complete(observe)
        if trainer.step in steps and get_rank() == rank:
            gradient = trainer.parameters[-1].local.grad
            assert gradient is not None
            gradient.view(-1)[0] = float("inf")

    trainer.engine.finish_gradients = plant  # type: ignore[method-assign]


def whole_batch(recipe: Recipe, step: int) -> Batch:
    """Returns the global batch as one process has it, with two sequences in each microbatch."""
    alone = replace(recipe, parallel=ParallelConfig(microbatch_size=2))
    return make_loader(alone, 0).batch(step)


def plain_stack(recipe: Recipe) -> PlainStack:
    """Returns plain torch's run of the recipe in one process, with the weights that every layout
    starts from."""
    stack = PlainStack(
        recipe, initial_weights(Llama(recipe.model, device="meta"), recipe.train.seed)
    )
    stack.optimizers = plain_optimizers(stack.model, recipe.optimizer, block_matrices(stack.model))
    return stack


def block_matrices(model: PlainLlama) -> list[nn.Parameter]:
    """Returns the parameters that Muon steps."""
    return [p for p in model.layers.parameters() if p.ndim == 2]


@cache
def _plain_run(
    recipe: Recipe, batch_of: Callable[[Recipe, int], Batch]
) -> tuple[PlainStack, Curve]:
    return plain_stack(recipe), []


def plain_curve(
    recipe: Recipe, steps: int = STEPS, batch_of: Callable[[Recipe, int], Batch] = whole_batch
) -> Curve:
    """Returns the curve of plain torch in one process, whatever the recipe's layout.

    Each recipe is trained once in a session: a call that asks for more steps continues that run.
    """
    recipe = replace(recipe, parallel=ParallelConfig())
    stack, curve = _plain_run(recipe, batch_of)
    while len(curve) < steps:
        curve.append(stack.train_step(batch_of(recipe, len(curve))))
    return curve[:steps]


def losses(curve: Curve) -> list[float]:
    """Returns the losses of a curve, without the norms."""
    return [loss for loss, _ in curve]


def assert_follows(
    curve: Curve, reference: Curve, *, close: float = 1e-5, last: float | None = 1e-4
) -> None:
    """Asserts that two curves are the same training in float32: the first loss and norm agree to
    1e-6, so that every parameter counts once in the norm; every loss agrees to `close`; and the
    last loss and norm to `last`.

    Norms between are not compared: where the loss bends sharply, the same step in float64 is 1e-4
    away from both.
    """
    assert curve[0] == pytest.approx(reference[0], rel=1e-6)
    assert losses(curve) == pytest.approx(losses(reference), rel=close)
    if last is not None:
        assert curve[-1] == pytest.approx(reference[-1], rel=last)


def one_case(model: ModelConfig, settings: Mapping[str, object]) -> ParameterSet:
    """Returns the pytest case (model, parallel) of a layout, named after the layout. A microbatch
    has two sequences unless the layout sets another number. One sequence would double the time."""
    parallel = ParallelConfig(**{"microbatch_size": 2, **settings})  # type: ignore[arg-type]
    return pytest.param(model, parallel, id=label(parallel, model))


def long(*values: object) -> ParameterSet:
    """Returns a case marked to run in `make test-long` but not in `make test`. `values` holds an
    existing case, or the values of a new one."""
    case = values[0] if isinstance(values[0], ParameterSet) else pytest.param(*values)
    return pytest.param(*case.values, id=case.id, marks=pytest.mark.long)


def label(parallel: ParallelConfig, model: ModelConfig) -> str:
    """Returns the name of a case: its axes, its schedule, and what else is not as usual."""
    parts = [f"{axis}{size}" for axis, size in parallel.axes.items() if size > 1] or ["one"]
    if parallel.pp > 1:
        parts.append(parallel.schedule)
    if parallel.virtual_stages > 1:
        parts.append(f"v{parallel.virtual_stages}")
    if parallel.sequence_parallel:
        parts.append("sp")
    if parallel.recompute != "none":
        parts.append(parallel.recompute)
    if parallel.sharding or parallel.zero_stage is not None:
        parts.append(parallel.strategy)
    if parallel.stage_boundaries:
        parts.append("uneven")
    if model.tied_embeddings:
        parts.append("tied")
    return "-".join(parts)
