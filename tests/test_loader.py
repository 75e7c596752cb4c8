"""Batches: the same sequences whatever the layout, and the same whenever they are asked for."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from parallel3d.config.recipe import BatchSizes, SequenceRange
from parallel3d.data.loader import (
    IGNORED,
    Batch,
    BatchLoader,
    EvaluationSet,
    WrongId,
    batches_ahead,
)
from parallel3d.data.order import SkippedRanges
from parallel3d.data.windows import ShuffledWindows, TokensInMemory
from parallel3d.errors import ConfigError

# each token is its own place, so a sequence tells where it comes from
TOKENS = np.arange(1000, dtype=np.uint16)


def loader(tokens: NDArray[np.integer] = TOKENS, *, seed: int | None = 5) -> BatchLoader:
    windows = ShuffledWindows(TokensInMemory(tokens), seq_len=7, seed=seed)
    return BatchLoader(
        windows,
        global_batch_size=12,
        microbatch_size=1,
        dp_rank=0,
        dp_size=1,
        vocab=1000,
    )


def sequences(*shares: Batch) -> list[int]:
    """Returns the first token of each sequence, in order."""
    return [first for share in shares for first in share.inputs[..., 0].flatten().tolist()]


@dataclass(frozen=True)
class Division:
    dp_size: int
    microbatch_size: int
    microbatches: int

    def of(self, whole: BatchLoader, dp_rank: int) -> BatchLoader:
        return replace(
            whole,
            dp_rank=dp_rank,
            dp_size=self.dp_size,
            microbatch_size=self.microbatch_size,
        )


divisions = st.builds(Division, *[st.integers(1, 6)] * 3)
steps = st.integers(0, 300)


def whole_loader(division: Division, seed: int | None) -> BatchLoader:
    size = division.dp_size * division.microbatch_size * division.microbatches
    return replace(loader(seed=seed), global_batch_size=size)


@given(divisions, steps, st.one_of(st.none(), st.integers(0, 2**40)))
def test_the_global_batch_is_the_same_however_it_is_divided(
    division: Division, step: int, seed: int | None
) -> None:
    whole = whole_loader(division, seed)
    shares = [division.of(whole, rank).batch(step) for rank in range(division.dp_size)]
    for share in shares:
        assert (
            share.inputs.shape
            == share.labels.shape
            == (division.microbatches, division.microbatch_size, 7)
        )
    assert sequences(*shares) == sequences(whole.batch(step))


@given(steps)
def test_labels_are_the_inputs_one_token_later(step: int) -> None:
    batch = loader().batch(step)
    assert batch.inputs.dtype == batch.labels.dtype == torch.int64
    assert batch.inputs.is_contiguous()
    assert batch.labels.is_contiguous()
    assert torch.equal(batch.labels, batch.inputs + 1)
    assert torch.equal(batch.inputs, batch.inputs[..., :1] + torch.arange(7))


def test_a_token_id_beyond_the_vocabulary_is_told_by_the_rank_that_reads_it_and_read_as_0() -> None:
    tokens: NDArray[np.integer] = np.ones(1000, dtype=np.uint32)
    # sample 20, which is in the second step
    tokens[7 * 20 + 3] = 300
    tokens[7 * 20 + 5] = 999
    whole = replace(loader(tokens, seed=None), vocab=264)
    for dp_size, microbatch_size in ((1, 1), (2, 3), (4, 3), (12, 1)):
        for rank in range(dp_size):
            share = replace(
                whole,
                dp_rank=rank,
                dp_size=dp_size,
                microbatch_size=microbatch_size,
            )
            assert share.batch(0).wrong_id is None
            batch = share.batch(1)
            if 20 in batch.samples:
                assert batch.wrong_id == WrongId(sample=20, token_id=300, largest_id=999)
                assert batch.inputs[batch.samples == 20].tolist() == [[1, 1, 1, 0, 1, 0, 1]]
                assert batch.labels[batch.samples == 20].tolist() == [[1, 1, 0, 1, 0, 1, 1]]
            else:
                assert batch.wrong_id is None


def test_ignored_ids_are_read_and_not_learned() -> None:
    some = replace(loader(seed=None), ignored_ids=(3, 5, 999))
    batch = some.batch(0)
    first = batch.inputs[0, 0].tolist(), batch.labels[0, 0].tolist()
    assert first == ([0, 1, 2, 3, 4, 5, 6], [1, 2, IGNORED, 4, IGNORED, 6, 7])
    assert (batch.labels == IGNORED).sum().item() == 2


def test_a_batch_that_does_not_divide_is_refused_with_one_that_does() -> None:
    with pytest.raises(ConfigError) as caught:
        replace(loader(), dp_size=4, microbatch_size=2)
    assert str(caught.value) == (
        "train.global_batch_size = 12: must be a multiple of 4 data-parallel ranks x "
        "parallel.microbatch_size 2; try 16"
    )
    replace(loader(), dp_size=4, microbatch_size=2, global_batch_size=16)


def ahead(asked: object, steps: range) -> Generator[Batch, None, None]:
    return batches_ahead(asked, steps, torch.device("cpu"))  # type: ignore[arg-type]


def test_batches_made_ahead_are_the_loaders_own_also_where_their_size_changes() -> None:
    growing = replace(loader(), sizes=BatchSizes(full=12, start=4, increment=4, warmup_steps=6))
    found = list(ahead(growing, range(1, 9)))
    assert [len(batch.inputs) for batch in found] == [4, 4, 8, 8, 8, 12, 12, 12]
    for step, batch in enumerate(found, 1):
        expected = growing.batch(step)
        assert torch.equal(batch.inputs, expected.inputs)
        assert torch.equal(batch.labels, expected.labels)
        assert torch.equal(batch.samples, expected.samples)


@given(divisions, st.integers(1, 142))
def test_an_evaluation_reads_each_of_its_sequences_once_in_every_division(
    division: Division, sequences: int
) -> None:
    whole = whole_loader(division, None)
    shares = []
    for rank in range(division.dp_size):
        own = division.of(whole, rank)
        shares += EvaluationSet.build("wiki", own, whole.source, sequences).batches
    for share in shares:
        assert share.labels.shape[0] <= division.microbatches
    learned = [share.labels[share.labels != IGNORED] for share in shares]
    assert sorted(torch.cat(learned).tolist()) == list(range(1, sequences * 7 + 1))
    padded = sum(share.labels.shape[:2].numel() for share in shares) - sequences
    assert padded < division.dp_size * division.microbatch_size * len(shares) / division.dp_size


ranges = st.builds(
    lambda first, count: SequenceRange(first=first, last=first + count), *[st.integers(0, 60)] * 2
)


@given(divisions, st.lists(ranges, min_size=1, max_size=5), st.integers(0, 20))
def test_the_batches_without_some_samples_are_the_stream_without_them_however_divided(
    division: Division, skipped: list[SequenceRange], step: int
) -> None:
    whole = whole_loader(division, seed=5)
    gone = {sample for each in skipped for sample in range(each.first, each.last + 1)}
    size = whole.global_batch_size
    end = (step + 1) * size
    remaining = [sample for sample in range(end + len(gone)) if sample not in gone]
    kept = remaining[step * size : end]
    shares = [
        division.of(replace(whole, skipped=SkippedRanges.merge(skipped)), rank).batch(step)
        for rank in range(division.dp_size)
    ]
    assert [sample for share in shares for sample in share.samples.flatten().tolist()] == kept
    assert sequences(*shares) == whole.source.draw(np.array(kept))[:, 0].tolist()
