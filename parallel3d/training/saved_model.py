"""Evaluates the model of a checkpoint, or writes text with it, in any layout: `parallel3d-train
evaluate|generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def _saved_model(
    recipe: Recipe, rendezvous: Rendezvous, model_class: ModelClass
) -> Iterator[Trainer]:
    """Holds the model of the checkpoint `checkpoint.resume`, on the ranks of the recipe's layout,
    for a block."""
    with deterministic(recipe.train.deterministic), process_group(recipe, rendezvous) as device:
        refuse(attention_errors(recipe, device_of(device)))
        mesh = build_mesh(recipe.parallel, device.type)
        trainer = Trainer(
            recipe,
            mesh=mesh,
            device=device,
            model_class=model_class,
            initialize=False,
            gpu_bytes=gpu_bytes(device),
        )
        limit_waits(recipe.train.start_timeout_s)
        saved = load_model(trainer, Path(recipe.checkpoint.resume))
        trainer.update_progress(step=saved.step, tokens=saved.tokens)
        yield trainer


def evaluate_saved(
    recipe: Recipe, rendezvous: Rendezvous, model_class: ModelClass, *, as_json: bool
) -> None:
    """Prints the loss of each evaluation set on rank 0, first that of the validation text; every
    rank calls it."""
    with _saved_model(recipe, rendezvous, model_class) as trainer:
        _, evaluations = build_loaders(recipe, load_corpora(recipe.data), rendezvous.rank)
        losses = {each.name: trainer.evaluate_all(each.batches) for each in evaluations}
    answer: dict[str, object] = {"step": trainer.step, "tokens": trainer.tokens}
    text = f"step {trainer.step}"
    for name, loss in losses.items():
        of, named = ("", "") if name == VALIDATION else (f"/{name}", f"{name} ")
        answer |= {f"loss{of}": loss, f"perplexity{of}": perplexity(loss)}
        text += f"  {named}loss {loss:.4f}  perplexity {perplexity(loss):.2f}"
    _print(recipe, rendezvous, text, answer if as_json else None)


def write_with_saved(
    recipe: Recipe, rendezvous: Rendezvous, model_class: ModelClass, *, as_json: bool
) -> None:
    """Prints a text that the model goes on with, as `train.sample_*` say, on rank 0; every rank
    calls it."""
    with _saved_model(recipe, rendezvous, model_class) as trainer:
        text = generate(trainer, load_corpus(recipe.data.corpora[0]).tokenizer, recipe.train)
    _print(recipe, rendezvous, text, {"step": trainer.step, "text": text} if as_json else None)


def _print(
    recipe: Recipe, rendezvous: Rendezvous, text: str, answer: Mapping[str, object] | None
) -> None:
    """Prints the text, or the answer as JSON where there is one, on rank 0."""
    if rendezvous.rank == 0:
        text = printable(text) if sys.stdout.isatty() else text
        print(
            text
            if answer is None
            else json.dumps({"checkpoint": recipe.checkpoint.resume, **answer}),
            flush=True,
        )
