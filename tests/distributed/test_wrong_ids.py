"""A token id beyond the vocabulary, which one data rank alone reads, ends the run of all ranks with
one message; and who reads ids at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch.distributed as dist
from numpy.typing import NDArray

from parallel3d.config.recipe import LocalSgdConfig, ParallelConfig, Recipe
from parallel3d.data.windows import TokenIds
from parallel3d.errors import DataError
from parallel3d.training.worker import training_loader
from tests.distributed.training_cases import (
    BATCH,
    GROUPED,
    SEQ_LEN,
    VOCAB,
    has_weights,
    local_weights,
    make_recipe,
    make_trainer,
)

WRONG = {
    2 * BATCH - 1: 400,
    2 * BATCH - 2: 130,
    3 * BATCH - 1: -3,
}  # by sample: of the last data rank, in steps 2 and 3


@dataclass
class PlantedIds:
    """Windows of small ids, but for WRONG ones, which tell what was drawn of them."""

    windows: int = 100
    drawn: list[int] = field(default_factory=list)

    def draw(self, samples: NDArray[np.int64]) -> TokenIds:
        self.drawn += samples.tolist()
        ids = (np.arange(SEQ_LEN + 1) + samples[:, None]) % VOCAB
        for row, sample in enumerate(samples.tolist()):
            ids[row, 5] = WRONG.get(sample, ids[row, 5])
        return ids


def meet_wrong_ids(recipe: Recipe) -> tuple[list[int], list[str]]:
    """Trains a step, and returns the samples that this rank drew for it, and what its next steps
    and an evaluation are refused with. Those change no parameter."""
    trainer = make_trainer(recipe)
    source = PlantedIds()
    loader = training_loader(recipe, source, dist.get_rank(), None)
    trainer.train_step(loader.batch(0))
    drawn = list(source.drawn)
    before = local_weights(trainer)
    words = []
    for refused in (trainer.train_step, lambda batch: trainer.evaluate([batch])):
        for step in (1, 2):
            with pytest.raises(DataError) as caught:
                refused(loader.batch(step))
            words.append(str(caught.value))
    assert has_weights(trainer, before)
    return drawn, words


def planted(**parallel: object) -> Recipe:
    return make_recipe(GROUPED, ParallelConfig(**parallel), grad_clip=None)  # type: ignore[arg-type]


DP_TP = planted(dp_shard=2, tp=2, microbatch_size=2)
RECIPES = {
    "dp 2, tp 2": DP_TP,
    "dp 2, pp 2": planted(dp_replicate=2, pp=2),
    "replicas apart": replace(
        planted(dp_replicate=2, pp=2), local_sgd=LocalSgdConfig(sync_every=2)
    ),
}


def run_all() -> list[tuple[list[int], list[str]]]:
    return [meet_wrong_ids(recipe) for recipe in RECIPES.values()]


def test_all_ranks_stop_alike_at_an_id_that_one_of_them_reads(world: Callable) -> None:
    has = f"model.vocab = {VOCAB} has ids 0 to {VOCAB - 1}; try"
    steps = [
        f"token id 130 at sample 14: {has} model.vocab=401 or more, or data encoded with this "
        "model's tokenizer",
        f"token id -3 at sample 23: {has} data encoded with this model's tokenizer",
    ]
    for rank, answers in enumerate(world(4).run(run_all)):
        for (name, recipe), (drawn, words) in zip(RECIPES.items(), answers, strict=True):
            place = recipe.parallel.coordinates(rank)
            share = BATCH // recipe.parallel.dp
            dp_rank = place.dp_replicate + place.dp_shard  # one of them is 0
            own = list(range(dp_rank * share, (dp_rank + 1) * share))
            assert drawn == own, name
            assert words == steps * 2, name
