"""Mixtures: of any first samples each source has its share to within one, by arithmetic that stores
nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.load import load_recipe
from parallel3d.config.mixture import MixtureStage, mixture_stages
from parallel3d.config.recipe import (
    BatchSizes,
    DataConfig,
    Recipe,
    SequenceRange,
    SourceConfig,
    TrainConfig,
    WeightsConfig,
)
from parallel3d.data.corpus import check_data
from parallel3d.data.loader import BatchLoader
from parallel3d.data.mixture import (
    Mixture,
    MixtureOrder,
    drawn_by_source,
    mixture_pattern,
)
from parallel3d.data.order import SkippedRanges
from parallel3d.data.windows import ShuffledWindows, TokensInMemory
from parallel3d.errors import ConfigError
from tests.one_rank import SMALL

MODEL = SMALL.model
WEB_AND_CODE = "data.sources=[{path: text/web, weight: 0.7}, {path: text/code, weight: 0.3}]"


def weights_of(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, most), min_size=1, max_size=9).filter(any).map(tuple)


weights = st.one_of(weights_of(4), weights_of(300))


@st.composite
def orders(draw: st.DrawFn) -> MixtureOrder:
    """Returns stages of a few samples to some thousand, with weights for equally many sources."""
    count = draw(st.integers(1, 5))
    one = st.lists(st.integers(0, 12), min_size=count, max_size=count).filter(any).map(tuple)
    lengths = draw(st.lists(st.integers(1, 200), max_size=4))
    first = 0
    stages = []
    for length in [*lengths, 0]:
        stages.append(MixtureStage(first, draw(one)))
        first += length
    return MixtureOrder(tuple(stages))


@given(weights)
def test_each_source_has_its_share_of_any_first_samples_to_within_one(
    weights: tuple[int, ...],
) -> None:
    period = sum(weights)
    used = sum(weight > 0 for weight in weights)
    source = np.tile(mixture_pattern(weights)[0], 2)
    counts = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
    # in 1 / W samples
    off = np.abs(counts * period - np.arange(1, 2 * period + 1)[:, None] * np.array(weights)).max()
    assert off * (2 * used - 2) <= period * (2 * used - 3) if used > 1 else off == 0
    assert counts[period - 1].tolist() == list(weights)


@given(orders(), st.integers(1, 1000))
def test_every_source_goes_through_its_own_samples_in_order_whatever_the_stages(
    order: MixtureOrder, samples: int
) -> None:
    chosen, own = order.draws(np.arange(samples))
    for source, count in enumerate(order.drawn(samples)):
        assert own[chosen == source].tolist() == list(range(count))


def test_the_pattern_is_pinned_because_a_resumed_run_depends_on_it() -> None:
    assert "".join(map(str, mixture_pattern((5, 3, 2))[0])) == "0102010201"


STREAMS = [
    np.arange(base, base + 7 * length + 1) for base, length in ((0, 40), (1000, 10), (2000, 300))
]
STAGES = (MixtureStage(0, (7, 3, 0)), MixtureStage(100, (1, 1, 2)), MixtureStage(260, (0, 1, 5)))


def loader(dp_rank: int, dp_size: int) -> BatchLoader:
    """Returns batches of 12, and of 4 and 8 at first, of three sources whose ids tell where they
    come from."""
    sources = tuple(ShuffledWindows(TokensInMemory(ids), seq_len=7, seed=5) for ids in STREAMS)
    return BatchLoader(
        Mixture(sources, MixtureOrder(STAGES)),
        global_batch_size=12,
        microbatch_size=1,
        dp_rank=dp_rank,
        dp_size=dp_size,
        vocab=10_000,
        sizes=BatchSizes(full=12, start=4, increment=4, warmup_steps=9),
    )


def firsts(dp_size: int, step: int) -> list[int]:
    """Returns the first id of each sequence of a step, rank after rank."""
    shares = [loader(rank, dp_size).batch(step) for rank in range(dp_size)]
    return [first for share in shares for first in share.inputs[..., 0].flatten().tolist()]


def test_a_run_that_goes_on_in_the_middle_of_a_stage_at_another_dp_draws_each_sequence_once() -> (
    None
):
    alone = [firsts(1, step) for step in range(40)]
    # 11, 20 and 25 are in the second stage, 30 in the third
    dp_sizes = [2] * 11 + [4] * 9 + [1] * 5 + [2] * 15
    assert [firsts(dp_size, step) for step, dp_size in enumerate(dp_sizes)] == alone
    samples = sum(len(batch) for batch in alone)
    for ids, count in zip(STREAMS, MixtureOrder(STAGES).drawn(samples), strict=True):
        source = ShuffledWindows(TokensInMemory(ids), seq_len=7, seed=5)
        own = [first for batch in alone for first in batch if ids[0] <= first <= ids[-1]]
        assert own == source.draw(np.arange(count))[:, 0].tolist()
        assert len({*own}) == min(len(own), source.windows)  # none twice in a pass
    assert loader(0, 1).source.windows == 350


def recipe_of(tmp_path: Path, *overrides: str) -> Recipe:
    path = tmp_path / "small.yaml"
    path.write_text(
        "model: {layers: 1, hidden: 16, heads: 2, ffn_hidden: 32, vocab: 264}\n"
        "train: {steps: 20, global_batch_size: 8, seq_len: 8}\ndata: {source: text}\n"
    )
    return load_recipe(path, overrides, cards={})


# What is said, the line it gives, and a value that the line suggests.
REFUSED = [
    (
        "data.sources=[{path: a, weight: -1}]",
        "data.sources[0].weight = -1 (command line): must be at least 0; try 1.0",
    ),
    (
        "data.sources=[{path: a/web}, {path: b/web}]",
        "data.sources[1].name = web: is already the name of another source; try name: web-1",
    ),
    (
        "data.sources=[{path: a, weight: 0.1234567}, {path: b, weight: 0.8765433}]",
        "add up to at most 100000 when scaled to integers; try [1, 1]",
    ),
    (
        "data.stages=[{from_step: 2, weights: [1]}]",
        "data.stages[0].weights = [1.0]: must be 2 numbers, one for each of data.sources, ",
    ),
    (
        "data.stages=[{from_step: 9, weights: [1, 1]}, {from_step: 9, weights: [1, 2]}]",
        "data.stages[1].from_step = 9: must be above 9, the step of the stage before; try ",
    ),
]


@pytest.mark.parametrize("override, line", REFUSED)
def test_a_mixture_that_cannot_be_drawn_is_refused_in_one_line(
    tmp_path: Path, override: str, line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_of(tmp_path, WEB_AND_CODE, override)
    assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def text_source(folder: Path, text: str) -> SourceConfig:
    folder.mkdir()
    (folder / "a.txt").write_text(text)
    return SourceConfig(path=str(folder))


def test_the_check_of_the_data_names_the_source_that_will_not_do(tmp_path: Path) -> None:
    fine = text_source(tmp_path / "web", "w" * 90_000)
    short = text_source(tmp_path / "code", "c" * 3000)
    with pytest.raises(
        ConfigError,
        match=r"2001 tokens, but data.sources\[1\].path = .*code for validation has 151",
    ):
        check_data(DataConfig(source="text", sources=(fine, short)), seq_len=2000, vocab=264)


@given(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 30)), max_size=4), st.integers(0, 20))
def test_what_is_left_out_is_not_counted_as_drawn(
    skipped: list[tuple[int, int]], steps: int
) -> None:
    sources = SourceConfig(path="web", weight=0.7), SourceConfig(path="code", weight=0.3)
    stage = WeightsConfig(from_step=6, weights=(0.2, 0.8))
    train = TrainConfig(steps=20, global_batch_size=8, seq_len=8)
    recipe = Recipe(
        model=MODEL,
        train=train,
        data=DataConfig(
            source="text",
            sources=sources,
            stages=(stage,),
        ),
    )
    ranges = SkippedRanges.merge(
        SequenceRange(first=first, last=first + more) for first, more in skipped
    )
    samples = ranges.samples(np.arange(8 * steps))
    drawn = np.bincount(MixtureOrder(mixture_stages(recipe)).draws(samples)[0], minlength=2)
    assert drawn_by_source(recipe, steps, ranges) == {
        name: count for name, count in zip(("web", "code"), drawn.tolist(), strict=True) if count
    }
