"""Evaluates the model of a checkpoint, or writes text with it, in any layout: `parallel3d-train
evaluate|generate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from parallel3d.config.attention_kernels import attention_errors
from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import refuse
from parallel3d.data.corpus import load_corpora, load_corpus
from parallel3d.errors import printable
from parallel3d.launch.deterministic import deterministic
from parallel3d.launch.rendezvous import Rendezvous, process_group
from parallel3d.layers.fused_attention import device_of
from parallel3d.mesh import build_mesh
from parallel3d.parallelize import ModelClass
from parallel3d.reporting.metrics import gpu_bytes, perplexity
from parallel3d.torch_private import limit_waits
from parallel3d.training.callbacks import VALIDATION
from parallel3d.training.generation import generate
from parallel3d.training.state import load_model
from parallel3d.training.trainer import Trainer
from parallel3d.training.worker import build_loaders


def read_saved(
    recipe: Recipe,
    rendezvous: Rendezvous,
    model_class: ModelClass,
    command: str,
    *,
    as_json: bool,
) -> None:
    """Prints on rank 0 what `evaluate` or `generate` finds with the model of the checkpoint
    `checkpoint.resume`, on the ranks of the recipe's layout. Every rank calls it."""
    with deterministic(recipe.train.deterministic), process_group(recipe, rendezvous) as device:
        refuse(attention_errors(recipe, device_of(device)))
        trainer = Trainer(
            recipe,
            mesh=build_mesh(recipe.parallel, device.type),
            device=device,
            model_class=model_class,
            initialize=False,
            gpu_bytes=gpu_bytes(device),
        )
        limit_waits(recipe.train.start_timeout_s)
        saved = load_model(trainer, Path(recipe.checkpoint.resume))
        trainer.update_progress(step=saved.step, tokens=saved.tokens)
        use = _evaluate if command == "evaluate" else _generate
        text, answer = use(trainer, rendezvous.rank)
    if rendezvous.rank:
        return
    if as_json:
        checkpoint = recipe.checkpoint.resume
        text = json.dumps({"checkpoint": checkpoint, "step": trainer.step, **answer})
    elif sys.stdout.isatty():
        text = printable(text)
    print(text, flush=True)


def _evaluate(trainer: Trainer, rank: int) -> tuple[str, dict[str, object]]:
    """Returns the loss of each evaluation set, first that of the validation text, for people and
    for programs."""
    recipe = trainer.recipe
    _, evaluations = build_loaders(recipe, load_corpora(recipe.data), rank)
    text, answer = f"step {trainer.step}", dict[str, object](tokens=trainer.tokens)
    for each in evaluations:
        loss = trainer.evaluate_all(each.batches)
        name = "" if each.name == VALIDATION else f"/{each.name}"
        answer |= {f"loss{name}": loss, f"perplexity{name}": perplexity(loss)}
        text += f"  loss{name} {loss:.4f}  perplexity{name} {perplexity(loss):.2f}"
    return text, answer


def _generate(trainer: Trainer, rank: int) -> tuple[str, dict[str, object]]:
    """Returns a text that the model goes on with, as `train.sample_*` say."""
    recipe = trainer.recipe
    text = generate(trainer, load_corpus(recipe.data.corpora[0]).tokenizer, recipe.train)
    return text, {"text": text}
