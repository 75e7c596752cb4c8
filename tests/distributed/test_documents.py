"""With `data.documents: mask` every layout trains the packed documents as if each came alone:
losses and gradient norms of 8 steps beside plain torch in one process, which is given one document
after the other and knows of no packing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from parallel3d.config.recipe import DataConfig, ModelConfig, ParallelConfig, Recipe
from parallel3d.data.loader import documents_ended_by
from parallel3d.data.tokenizers import ByteTokenizer
from parallel3d.training.generation import generate
from tests.distributed.training_cases import (
    BATCH,
    DEEP,
    END_OF_TEXT,
    GPT,
    GROUPED,
    QWEN,
    SEQ_LEN,
    Curve,
    assert_follows,
    make_loader,
    make_recipe,
    make_trainer,
    one_case,
    own_batch,
    plain_stack,
    train,
    whole_batch,
)

STEPS = 5
PRELOAD = ("torch._inductor.compile_fx",)


def masked(model: ModelConfig, parallel: ParallelConfig, **settings: object) -> Recipe:
    return replace(make_recipe(model, parallel, **settings), data=DataConfig(documents="mask"))


def documents_of(ids: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cuts a sequence into its documents, token by token."""
    parts: list[tuple[Tensor, Tensor]] = []
    begin = 0
    for place, token in enumerate(ids.tolist()):
        if token == END_OF_TEXT or place == len(ids) - 1:
            parts.append((ids[begin : place + 1], labels[begin : place + 1]))
            begin = place + 1
    return parts


def one_by_one(model: ModelConfig, steps: int) -> Curve:
    """Returns the curve of plain torch, which computes each document of a batch in a forward of its
    own."""
    recipe = make_recipe(model, ParallelConfig())
    stack = plain_stack(recipe)
    curve = []
    for step in range(steps):
        batch = whole_batch(recipe, step)
        stack.model.zero_grad()
        total = 0.0
        for ids, labels in zip(batch.inputs.flatten(0, 1), batch.labels.flatten(0, 1), strict=True):
            for own_ids, own_labels in documents_of(ids, labels):
                logits = stack.model(own_ids.unsqueeze(0)).squeeze(0)
                loss = F.cross_entropy(logits, own_labels, reduction="sum") / batch.labels.numel()
                loss.backward()
                total += loss.item()
        assert recipe.train.grad_clip is not None
        norm = clip_grad_norm_(stack.model.parameters(), recipe.train.grad_clip)
        for optimizer in stack.optimizers:
            optimizer.step()
        curve.append((total, norm.item()))
    return curve


@pytest.fixture(scope="module")
def references() -> dict[ModelConfig, Curve]:
    return {model: one_by_one(model, STEPS) for model in (GROUPED, DEEP)}


def run_layout(model: ModelConfig, parallel: ParallelConfig) -> tuple[float, Curve]:
    """Returns the loss of the first batch without training on it, and the curve."""
    trainer = make_trainer(masked(model, parallel))
    evaluated = trainer.evaluate([own_batch(trainer.recipe, 0)])
    return evaluated, train(trainer, STEPS)


LAYOUTS: list[tuple[ModelConfig, dict[str, Any]]] = [
    (GROUPED, {"microbatch_size": 4}),
    (GROUPED, {"tp": 2, "microbatch_size": 4, "sequence_parallel": True, "recompute": "selective"}),
    (GROUPED, {"pp": 2, "schedule": "zb_h1", "recompute": "selective"}),
    (DEEP, {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "recompute": "full"}),
    (DEEP, {"pp": 4}),  # whose middle ranks need neither inputs nor labels
    (GROUPED, {"dp_shard": 2, "recompute": "full"}),
]


@pytest.mark.parametrize(
    "model, parallel",
    [one_case(*each) for each in LAYOUTS],
)
def test_packed_documents_train_as_documents_one_by_one(
    world: Callable,
    references: dict[ModelConfig, Curve],
    model: ModelConfig,
    parallel: ParallelConfig,
) -> None:
    found = world(parallel.world_size).run(run_layout, model, parallel)
    for each in found:
        assert each == found[0], "the ranks do not agree on what they did"
    evaluated, curve = found[0]
    assert_follows(curve, references[model])
    assert evaluated == pytest.approx(references[model][0][0], rel=1e-6)


def gradients(model: ModelConfig, alone: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss of a batch and its gradients: packed, or of each document in a forward of its own,
    which the project's own model computes without knowing of documents."""
    trainer = make_trainer(masked(model, ParallelConfig(microbatch_size=BATCH)))
    batch = make_loader(trainer.recipe, 0).batch(0)
    (stage,) = trainer.stages
    assert batch.documents is not None
    inputs = batch.inputs[0]
    labels = batch.labels[0]
    if alone:
        pairs = [pair for row in zip(inputs, labels, strict=True) for pair in documents_of(*row)]
        parts = [(stage.module(ids.unsqueeze(0)), own.unsqueeze(0)) for ids, own in pairs]
    else:
        parts = [(stage.module(inputs, documents=batch.documents[0]), labels)]
    loss = torch.zeros(())
    for y, own in parts:
        loss = loss + F.cross_entropy(y.flatten(0, 1), own.flatten(), reduction="sum")
    loss.backward()
    named = stage.module.named_parameters()
    return loss.item(), {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize("model", [GPT, QWEN], ids=["gpt", "window, biases, norms of heads"])
def test_losses_and_gradients_are_those_of_documents_alone(
    world: Callable, model: ModelConfig
) -> None:
    (packed,), (alone,) = (world(1).run(gradients, model, each) for each in (False, True))
    assert packed[0] == pytest.approx(alone[0], rel=1e-6)
    assert packed[1].keys() == alone[1].keys()
    for name, gradient in packed[1].items():
        torch.testing.assert_close(
            gradient,
            alone[1][name],
            rtol=1e-4,
            atol=1e-5,
            msg=name,
        )


def gpt_curve(parallel: ParallelConfig) -> Curve:
    return train(make_trainer(masked(GPT, parallel)), 5)


def test_learned_positions_restart_in_every_layout(world: Callable) -> None:
    (alone,) = world(1).run(gpt_curve, ParallelConfig(microbatch_size=4))
    split = ParallelConfig(microbatch_size=4, tp=2, sequence_parallel=True)
    for curve in world(2).run(gpt_curve, split):
        assert_follows(curve, alone)


def continued(parallel: ParallelConfig) -> tuple[str, list[Tensor]]:
    """Returns a text after a prompt, and the logits of two sequences that differ in their first
    document alone."""
    model = replace(GPT, vocab=264, max_positions=SEQ_LEN)
    trainer = make_trainer(masked(model, parallel, sample_prompt="ab", sample_tokens=4))
    ids = torch.arange(2 * SEQ_LEN).view(1, 2, SEQ_LEN)
    ids[..., 9], ids[:, 1, 10:] = 256, ids[:, 0, 10:]
    text = generate(trainer, ByteTokenizer(), trainer.recipe.train)
    return text, trainer.logits(ids, documents_ended_by(256, ids))


def test_a_generated_token_sees_its_own_document_alone(world: Callable) -> None:
    ((alone, (logits,)),) = world(1).run(continued, ParallelConfig())
    assert torch.equal(logits[0, 10:], logits[1, 10:])
    assert not torch.equal(logits[0, 8], logits[1, 8])
    for text, _ in world(2).run(continued, ParallelConfig(pp=2)):
        assert text == alone
