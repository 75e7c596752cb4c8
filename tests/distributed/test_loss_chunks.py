"""Logits that are made a few tokens at a time train the same model, and are all that exists of
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from parallel3d.build_engine import align_logits
from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.layers.loss import TokenLoss
from parallel3d.mesh import ONE_RANK
from parallel3d.training.loss import MeanLoss
from parallel3d.training.loss_chunks import chunk_bytes
from tests.distributed.training_cases import (
    DEEP_TIED,
    GROUPED,
    TIED,
    Curve,
    assert_follows,
    make_recipe,
    make_trainer,
    own_batch,
    plain_curve,
    train,
)

STEPS = 4
CHUNK = 7  # a microbatch's 48 or 96 tokens are no multiple of it


def train_in_chunks(cases: list[tuple[ModelConfig, ParallelConfig]]) -> list[Curve]:
    """Returns the curve of each run; validation and generation in between see the same model."""
    curves = []
    for model, parallel in cases:
        trainer = make_trainer(make_recipe(model, parallel, loss_chunk_tokens=CHUNK))
        whole = make_trainer(make_recipe(model, parallel))
        batch = own_batch(trainer.recipe, 0)
        assert trainer.evaluate([batch]) == pytest.approx(whole.evaluate([batch]), rel=1e-6)
        for chunked, at_once in zip(
            trainer.logits(batch.inputs), whole.logits(batch.inputs), strict=True
        ):
            torch.testing.assert_close(chunked, at_once)
        with watched_logits() as pieces:
            curves.append(train(trainer, STEPS))
        assert (max(pieces) == CHUNK) if trainer.pipeline.is_last else not pieces
    return curves


@contextmanager
def watched_logits() -> Iterator[list[int]]:
    """The tokens of each piece of logits that a loss is computed of."""
    forward = TokenLoss.forward
    seen = []

    def watched(
        token_loss: TokenLoss, logits: torch.Tensor, labels: torch.Tensor, **kwargs: bool
    ) -> object:
        seen.append(logits.shape[0])
        return forward(token_loss, logits, labels, **kwargs)

    with patch.object(TokenLoss, "forward", watched):
        yield seen


V2 = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
V_SHAPED = {"schedule": "zb_v", "virtual_stages": 2}
CASES = {
    1: [(TIED, ParallelConfig(microbatch_size=4))],
    2: [
        (TIED, ParallelConfig(tp=2, microbatch_size=4, sequence_parallel=True)),
        (GROUPED, ParallelConfig(tp=2, microbatch_size=4)),
        (TIED, ParallelConfig(dp_shard=2, microbatch_size=2)),
        (TIED, ParallelConfig(dp_shard=2, sharding="NO_SHARD", microbatch_size=4)),
        (DEEP_TIED, ParallelConfig(pp=2, microbatch_size=2, **V2)),
        (DEEP_TIED, ParallelConfig(pp=2, microbatch_size=2, **V_SHAPED)),
    ],
    4: [
        (
            TIED,
            ParallelConfig(
                tp=2,
                dp_shard=2,
                sequence_parallel=True,
                microbatch_size=2,
            ),
        ),
        # A backward follows another, which has freed the head's weight.
        (
            GROUPED,
            ParallelConfig(
                pp=2,
                dp_shard=2,
                schedule="gpipe",
                gather="microbatch",
                microbatch_size=2,
            ),
        ),
    ],
}


@pytest.mark.parametrize("size", CASES)
def test_chunks_train_as_plain_torch_does(world: Callable, size: int) -> None:
    for (model, _), curve in zip(
        CASES[size], world(size).run(train_in_chunks, CASES[size])[0], strict=True
    ):
        expected = plain_curve(make_recipe(model, ParallelConfig()), STEPS)
        assert_follows(curve, expected, last=None)


def aligned_logits(parallel: ParallelConfig) -> None:
    """The head's rows are filled up as on a GPU: the logits and all that is kept stay what they
    are. tests/distributed/test_custom_logits.py trains such heads."""
    recipe = make_recipe(replace(TIED, vocab=130), parallel)
    plain = make_trainer(recipe)
    aligned = make_trainer(recipe)
    (stage,) = aligned.stages
    align_logits(stage.module)
    for ours, theirs in zip(aligned.parameters, plain.parameters, strict=True):
        assert ours.local.shape == theirs.local.shape
    batch = own_batch(recipe, 0)
    for ours, theirs in zip(aligned.logits(batch.inputs), plain.logits(batch.inputs), strict=True):
        assert ours.shape[-1] == 65
        torch.testing.assert_close(ours, theirs)
    assert stage.module.head.padded_width == 128


def test_aligned_rows_give_the_same_logits(world: Callable) -> None:
    world(2).run(aligned_logits, ParallelConfig(tp=2, sequence_parallel=True))


def test_a_chunk_is_a_share_of_the_devices_memory() -> None:
    assert chunk_bytes(None) == 2**29
    assert chunk_bytes(79.1 * 2**30) == 2**31


def test_only_large_logits_come_in_chunks_unless_the_recipe_says_so() -> None:
    recipe = make_recipe(TIED, ParallelConfig(microbatch_size=4))
    assert MeanLoss(recipe, ONE_RANK).chunk_tokens is None
    large = replace(
        recipe,
        model=replace(TIED, vocab=128_256),
        train=replace(recipe.train, seq_len=2048),
    )
    assert MeanLoss(large, ONE_RANK).chunk_tokens == 1046  # 512 MiB of float32
    for chunk, expected in ((512, 512), (4 * 2048, None)):
        asked = replace(large, train=replace(large.train, loss_chunk_tokens=chunk))
        assert MeanLoss(asked, ONE_RANK).chunk_tokens == expected
