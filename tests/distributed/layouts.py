"""What the distributed tests share: small recipes, the batches of a rank, and a run of some steps of training.

Imported as a plain module by tests and, by name, by the pool's workers.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from parallel3d.config.recipe import ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.data.loader import Batch, BatchLoader
from parallel3d.mesh import build_mesh
from parallel3d.models import model_class
from parallel3d.training.trainer import Trainer
from parallel3d.training.worker import training_loader

VOCAB, SEQ_LEN, BATCH, STEPS = 128, 24, 8, 20

# A first block, one in the middle and a last one: more of them only take longer. DEEP is for pipelines of more stages.
GROUPED = ModelConfig(layers=3, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, vocab=VOCAB)
TIED = replace(GROUPED, tied_embeddings=True)
DEEP = replace(GROUPED, layers=6)
DEEP_TIED = replace(TIED, layers=6)
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
QWEN = replace(GROUPED, qkv_bias=True, qk_norm=True, window=7)
MANY_HEADS = ModelConfig(layers=2, hidden=32, heads=8, ffn_hidden=64, vocab=VOCAB)


def make_recipe(model: ModelConfig, parallel: ParallelConfig, **train: object) -> Recipe:
    """A constant rate that learns fast, and a clipping limit that the gradient's norm exceeds."""
    settings: dict[str, object] = {"steps": STEPS, "global_batch_size": BATCH, "seq_len": SEQ_LEN, "grad_clip": 0.5}
    return Recipe(
        model=model,
        parallel=parallel,
        train=TrainConfig(**{**settings, **train}),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=1e-3, min_lr_ratio=1.0),
    )


def make_loader(recipe: Recipe, rank: int) -> BatchLoader:
    """Batches of a Python module's source, for the data rank that `rank` belongs to."""
    tokens = np.frombuffer(inspect.getsource(textwrap).encode("ascii", "replace"), dtype=np.uint8)
    return training_loader(recipe, tokens, rank)


def make_trainer(recipe: Recipe) -> Trainer:
    mesh = build_mesh(recipe.parallel, "cpu")
    return Trainer(recipe, mesh=mesh, device=torch.device("cpu"), model_class=model_class(recipe.model.architecture))


def train(trainer: Trainer, steps: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each of the next steps."""
    loader = make_loader(trainer.recipe, dist.get_rank())
    results = []
    for _ in range(steps):
        result = trainer.train_step(loader.batch(trainer.step))
        results.append((result.loss, result.grad_norm))
    return results


def whole_batch(recipe: Recipe, step: int) -> Batch:
    """The global batch as one process has it, a microbatch a sequence."""
    alone = replace(recipe, parallel=ParallelConfig())
    return make_loader(alone, 0).batch(step)
