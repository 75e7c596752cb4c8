"""The recipe gpt2-124m, made small, is trained on a BPE of Python's own source files, in tp 2 x dp 2, beside
transformers' GPT-2, which a plain loop trains in one process."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe
from parallel3d.data.corpus import load_corpora
from parallel3d.data.loader import Batch, BatchLoader
from parallel3d.data.mixture import training_windows
from parallel3d.layers.parameter import initialize
from parallel3d.models import shape_cards
from parallel3d.models.gpt import GPT
from parallel3d.recipes import find_recipe
from parallel3d.tools.data.command import main as parallel3d_data
from parallel3d.training.worker import training_loader
from tests.distributed.training_cases import make_trainer
from tests.test_models import gpt_pairs

STEPS = 100
SMALL = (
    "model.layers=2 model.hidden=64 model.heads=4 model.ffn_hidden=256 model.vocab=512 model.max_positions=64 "
    "train.precision=fp32 train.seq_len=64 train.global_batch_size=16 parallel.microbatch_size=4 "
    f"train.steps={STEPS} optimizer.warmup_steps=20"
)


def small_recipe(tokens: Path, *layout: str) -> Recipe:
    overrides = [*SMALL.split(), f"data.path={tokens}", *layout]
    return load_recipe(find_recipe("gpt2-124m"), overrides, cards=shape_cards())


def loader(recipe: Recipe, rank: int) -> BatchLoader:
    streams = [corpus.train for corpus in load_corpora(recipe.data)]
    return training_loader(recipe, training_windows(recipe, streams), rank, document_end=None)


def losses(tokens: Path) -> list[float]:
    recipe = small_recipe(tokens, "parallel.dp_shard=2", "parallel.tp=2")
    trainer, batches = make_trainer(recipe), loader(recipe, dist.get_rank())
    return [trainer.train_step(batches.batch(step)).loss for step in range(STEPS)]


def peer_losses(tokens: Path) -> list[float]:
    transformers = pytest.importorskip("transformers", reason="the referee is transformers' GPT-2")
    recipe = small_recipe(tokens, "parallel.dp_shard=1")
    model, optimizer, batches = recipe.model, recipe.optimizer, loader(recipe, 0)
    config = transformers.GPT2Config(
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        n_inner=model.ffn_hidden,
        vocab_size=model.vocab,
        n_positions=model.max_positions,
        layer_norm_epsilon=model.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    )
    peer, ours = transformers.GPT2LMHeadModel(config), GPT(model, device="meta").to_empty(device="cpu")
    initialize(ours, recipe.train.seed, "cpu")
    with torch.no_grad():
        for _, own, theirs in gpt_pairs(ours, peer, gradients=False):
            theirs.copy_(own)
    matrices = [parameter for parameter in peer.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in peer.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": optimizer.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    steps = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)

    def share(step: int) -> float:
        """The rate rises linearly, then falls along a cosine to a tenth of the peak."""
        warmup = optimizer.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step + 1 - warmup) / (STEPS - warmup)))

    rates, found = torch.optim.lr_scheduler.LambdaLR(steps, share), []
    for step in range(STEPS):
        batch: Batch = batches.batch(step)
        logits = peer(batch.inputs.flatten(0, 1)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        steps.step()
        rates.step()
        steps.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.long
def test_a_small_gpt2_124m_trains_as_that_of_transformers(world: Callable, tmp_path: Path) -> None:
    tokens, stdlib = tmp_path / "tokens", Path(sysconfig.get_path("stdlib"))
    command = ["tokenize", str(stdlib / "json"), str(stdlib / "email"), "--pattern", "*.py", "--train-bpe", "512"]
    assert parallel3d_data([*command, "--out", str(tokens)]) == 0
    expected = peer_losses(tokens)
    assert expected[-1] < expected[0] - 0.8  # it learns
    for ours in world(4).run(losses, tokens):
        assert ours == pytest.approx(expected, abs=1e-5)
