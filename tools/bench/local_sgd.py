"""`bench local_sgd`: trains the quickstart on two replicas with local SGD.

The peer sums gradients in every step. Both see the same tokens. The results are the final
validation loss, and the bytes that a rank sends to the other replica.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from parallel3d.config.recipe import Recipe
from parallel3d.data.corpus import load_corpora
from parallel3d.mesh import build_mesh
from parallel3d.models import model_class
from parallel3d.recipes import named_recipe
from parallel3d.tools.bench.counting import CollectiveCounter
from parallel3d.tools.bench.report import Options, ResultRow, announced, chosen, row_of
from parallel3d.tools.local_ranks import run_ranks
from parallel3d.training.local_sgd import outer_loop_of
from parallel3d.training.trainer import Trainer
from parallel3d.training.worker import build_loaders

STEPS = 600
_PEER = "gradients summed in every step"
LOSS_BAR = 1.02
BYTES_BAR = 1 / 15
LAYOUT = (
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.dp_shard=1",
    "parallel.dp_replicate=2",
    "parallel.microbatch_size=8",
)
# A lower learning rate, because a replica has half of the batch and must stay close to the other.
# Thirty synchronizations are too few for an outer momentum of 0.9 (docs/how-to/local-sgd.md).
DILOCO = (
    "optimizer.lr=1.5e-3",
    "local_sgd.sync_every=20",
    "local_sgd.outer_lr=0.7",
    "local_sgd.outer_momentum=0.5",
)
CASES = {"sync_every 20": DILOCO}


def bench_local_sgd(options: Options) -> list[ResultRow]:
    """Trains the selected cases and returns two rows for each.

    The learning rate decays over `options.steps`.
    """
    names = chosen(CASES, options)
    steps = options.steps or STEPS
    length = (
        f"train.steps={steps}",
        f"optimizer.decay_steps={steps}",
        f"optimizer.warmup_steps={min(30, steps // 10)}",  # 30 as in the recipe
        "train.device=cpu",
        # fewer sequences would make the validation loss noisy
        "train.eval_sequences=256",
    )
    results = {}
    for name in announced([_PEER, *names]):
        overrides = (*LAYOUT, *length, *CASES.get(name, ()))
        recipe = named_recipe("quickstart", overrides)
        results[name] = run_ranks(train, recipe, world_size=recipe.parallel.world_size)
    rows = []
    for name in names:
        (loss, mib), (peer_loss, peer_mib) = results[name], results[_PEER]
        rows.append(row_of(name, "validation_loss", [(loss, peer_loss)], LOSS_BAR))
        rows.append(row_of(name, "MiB_to_replicas", [(mib, peer_mib)], BYTES_BAR))
    return rows


def train(recipe: Recipe) -> tuple[float, float]:
    """Trains a run without checkpoints. Runs on every rank.

    Returns the final validation loss, and the MiB that this rank sent to the other replica.
    """
    mesh = build_mesh(recipe.parallel, "cpu")
    rank = dist.get_rank()
    trainer = Trainer(
        recipe,
        mesh=mesh,
        device=torch.device("cpu"),
        model_class=model_class(recipe.model.architecture),
        outer_loop=outer_loop_of(recipe),
    )
    training, (validation,) = build_loaders(recipe, load_corpora(recipe.data), rank)
    with CollectiveCounter(mesh) as sent:
        for step in range(recipe.train.steps):
            result = trainer.train_step(training.batch(step))
            if rank == 0 and (step + 1) % 50 == 0:
                print(f"  step {step + 1}: loss {result.loss:.4f}", file=sys.stderr, flush=True)
    sent_bytes = round(sum(sent.bytes.values()))  # the only other rank is the other replica
    return trainer.evaluate(validation.batches), sent_bytes / 2**20
