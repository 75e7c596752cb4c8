"""The loss is the mean over the global batch's real tokens, wherever in the batch they stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from einops import rearrange
from torch.distributed import get_rank
from torch.nn import functional as F

from parallel3d.config.recipe import LocalSgdConfig, ParallelConfig, Recipe
from parallel3d.data.loader import IGNORED, Batch, EvaluationSet
from parallel3d.data.windows import ShuffledWindows, WindowSource
from parallel3d.errors import DataError
from tests.distributed.training_cases import (
    DEEP_TIED,
    SEQ_LEN,
    Curve,
    assert_follows,
    has_weights,
    local_weights,
    losses,
    make_loader,
    make_recipe,
    make_trainer,
    plain_curve,
    plain_stack,
    whole_batch,
)

# labels of each sequence: nearly all are in the first half, which is data rank 0's
REAL = (24, 23, 24, 20, 0, 1, 0, 2)
STEPS = 3


def masked(recipe: Recipe, step: int) -> Batch:
    """Returns the whole global batch as one microbatch, [1, 8, seq], with the last `REAL` labels of
    each sequence."""
    whole = whole_batch(recipe, step)
    inputs, labels = (rearrange(x, "m b s -> 1 (m b) s") for x in (whole.inputs, whole.labels))
    samples = rearrange(whole.samples, "m b -> 1 (m b)")
    kept = torch.arange(SEQ_LEN) >= SEQ_LEN - torch.tensor(REAL).unsqueeze(1)
    return Batch(inputs, labels.masked_fill(~kept, IGNORED), samples)


def share(recipe: Recipe, batch: Batch) -> Batch:
    """Returns this data rank's part of a global batch, in its microbatches."""
    parallel = recipe.parallel
    place = parallel.coordinates(get_rank())
    rank = place.dp_replicate * parallel.dp_shard + place.dp_shard
    cut = "1 (rank m b) ... -> rank m b ..."
    parts = (batch.inputs, batch.labels, batch.samples)
    return Batch(
        *(rearrange(x, cut, rank=parallel.dp, b=parallel.microbatch_size)[rank] for x in parts)
    )


def train_masked(parallel: ParallelConfig) -> tuple[list[float], Curve, int]:
    """Returns the losses of batches before training on them, the curve of the training, and the
    tokens counted."""
    trainer = make_trainer(make_recipe(DEEP_TIED, parallel))
    evaluated = []
    curve = []
    for step in range(STEPS):
        batch = share(trainer.recipe, masked(trainer.recipe, step))
        evaluated.append(trainer.evaluate([batch]))
        result = trainer.train_step(batch)
        curve.append((result.loss, result.grad_norm))
    return evaluated, curve, trainer.progress.tokens


def train_all_masked(layouts: list[ParallelConfig]) -> list[tuple[list[float], Curve, int]]:
    return [train_masked(parallel) for parallel in layouts]


LAYOUTS = {
    1: [ParallelConfig(microbatch_size=8)],
    2: [
        ParallelConfig(dp_shard=2),
        ParallelConfig(dp_replicate=2, microbatch_size=2),
        ParallelConfig(pp=2, microbatch_size=2),
        ParallelConfig(tp=2, microbatch_size=2, sequence_parallel=True),
    ],
    4: [
        ParallelConfig(
            pp=2,
            dp_shard=2,
            schedule="interleaved_1f1b",
            virtual_stages=2,
            microbatch_size=2,
        )
    ],
}


@pytest.mark.parametrize("size", LAYOUTS)
def test_the_mean_is_that_of_plain_torch_however_the_real_tokens_are_spread(
    world: Callable, size: int
) -> None:
    expected = plain_curve(make_recipe(DEEP_TIED, ParallelConfig()), STEPS, masked)
    for evaluated, curve, tokens in world(size).run(train_all_masked, LAYOUTS[size])[0]:
        assert_follows(curve, expected)
        assert evaluated == pytest.approx(losses(curve), rel=1e-6)
        assert tokens == STEPS * sum(REAL)


def evaluate_sets(cases: list[tuple[ParallelConfig, LocalSgdConfig]]) -> list[float]:
    """Returns the loss of the corpus's first 11 sequences in each layout."""
    found = []
    for parallel, local_sgd in cases:
        recipe = replace(make_recipe(DEEP_TIED, parallel), local_sgd=local_sgd)
        like = make_loader(recipe, get_rank())
        chosen = EvaluationSet.build("first", like, in_order(recipe), 11)
        found.append(make_trainer(recipe).evaluate(chosen.batches))
    return found


def in_order(recipe: Recipe) -> WindowSource:
    source = make_loader(recipe, 0).source
    assert isinstance(source, ShuffledWindows)
    return replace(source, seed=None)


SETS: dict[int, list[tuple[ParallelConfig, LocalSgdConfig]]] = {
    1: [
        (ParallelConfig(microbatch_size=4), LocalSgdConfig()),
    ],
    2: [
        # 8 and 3: no sequence for the second rank
        (ParallelConfig(dp_shard=2, microbatch_size=2), LocalSgdConfig()),
        # nor for the second replica
        (ParallelConfig(dp_replicate=2, microbatch_size=2), LocalSgdConfig(sync_every=5)),
        (ParallelConfig(pp=2), LocalSgdConfig()),
        (ParallelConfig(tp=2, microbatch_size=4), LocalSgdConfig()),
    ],
}


@pytest.mark.parametrize("size", SETS)
def test_an_evaluation_that_fills_no_batch_is_plain_torchs_in_every_layout(
    world: Callable, size: int
) -> None:
    recipe = make_recipe(DEEP_TIED, ParallelConfig())
    drawn = torch.from_numpy(in_order(recipe).draw(np.arange(11)).astype(np.int64))
    with torch.no_grad():
        logits = plain_stack(recipe).model(drawn[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), drawn[:, 1:].flatten()).item()
    for found in world(size).run(evaluate_sets, SETS[size]):
        assert found == pytest.approx([expected] * len(SETS[size]), rel=1e-6)


def train_on_nothing(parallel: ParallelConfig) -> list[str]:
    trainer = make_trainer(make_recipe(DEEP_TIED, parallel))
    before = local_weights(trainer)
    batch = share(trainer.recipe, masked(trainer.recipe, 0))
    batch = replace(batch, labels=torch.full_like(batch.labels, IGNORED))
    messages = []
    for use in (trainer.train_step, lambda batch: trainer.evaluate([batch])):
        with pytest.raises(DataError) as error:
            use(batch)
        messages.append(str(error.value))
    assert has_weights(trainer, before)
    return messages


def test_a_batch_without_a_label_is_refused_by_every_rank(world: Callable) -> None:
    for messages in world(2).run(train_on_nothing, ParallelConfig(dp_shard=2)):
        assert messages[0].startswith("step 1: no target token in the batch")
        assert messages[1].startswith("step 1: no target token in the batch")
