"""Mixes data sources by weight. Each contributes its exact share of the samples, to within one.

The weights of a mixture stage are integers w_i with sum W. A pattern of W samples, w_i of them from
source i, repeats throughout the stage. Sample n of the stage is position n % W of repetition
n // W, an exact and stateless lookup.

The pattern is Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32,
1980). Let k > 1 be the number of sources with a positive weight. Among the first n samples of the
stage, the number from source i differs from n * w_i / W by at most 1 - 1 / (2k - 2). No smaller
bound holds for all weights. It implies a first and a last allowed position for each sample. Each
position takes, among the samples allowed there, the one with the earliest last position."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.mixture import MixtureStage, mixture_stages
from parallel3d.config.recipe import Recipe
from parallel3d.data.order import SkippedRanges
from parallel3d.data.windows import ShuffledWindows, TokenIds, TokenStream, WindowSource

Int64s = NDArray[np.int64]


@cache
def mixture_pattern(weights: tuple[int, ...]) -> tuple[Int64s, Int64s]:
    """Returns the pattern for integer `weights`, not all 0. For each position it has the source and
    the number of earlier samples from that source."""
    period = sum(weights)
    twice = max(2 * np.count_nonzero(weights) - 2, 1)  # 2k - 2, or any number for one source.
    source = np.repeat(np.arange(len(weights)), weights)
    earlier = np.concatenate([np.arange(weight) for weight in weights])
    share = twice * np.repeat(weights, weights)
    # With sample m at position n (from 1), the source is m + 1 - n * w / W samples ahead of its
    # share. w is its weight, W the sum of all weights. `first` is the smallest n for which this is
    # within the bound.
    first = -(-(earlier * twice + 1) * period // share)
    # Without sample m, the source would be n * w / W - m samples behind. `last` is the largest n
    # for which this is within the bound.
    last = ((earlier + 1) * twice - 1) * period // share + 1
    samples_from = defaultdict(list)  # Keyed by the first position that is allowed.
    for sample, place in enumerate(first.tolist()):
        samples_from[place].append(sample)
    pattern = []
    waiting: list[tuple[int, int]] = []  # (last allowed position, sample)
    for place in range(1, period + 1):
        for sample in samples_from[place]:
            heapq.heappush(waiting, (int(last[sample]), sample))
        _, most_urgent = heapq.heappop(waiting)
        pattern.append(most_urgent)
    return source[pattern], earlier[pattern]


@dataclass(frozen=True)
class MixtureOrder:
    """Assigns each sample of a run to a source. The samples of a source are numbered 0, 1, 2, ...
    over all mixture stages, so a source is not restarted when weights change."""

    stages: tuple[MixtureStage, ...]

    def drawn(self, samples: int) -> Int64s:
        """Returns how many of the run's first `samples` samples come from each source."""
        total = np.zeros(len(self.stages[0].weights), dtype=np.int64)
        end = samples
        for first, weights in reversed(self.stages):
            in_stage = max(end - first, 0)
            repetitions, rest = divmod(in_stage, sum(weights))
            source, _ = mixture_pattern(weights)
            total += repetitions * np.array(weights)
            total += np.bincount(source[:rest], minlength=len(weights))
            end = min(end, first)
        return total

    def draws(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Returns the source of each sample index in `samples`, and the sample's index within that
        source."""
        source = np.empty_like(samples)
        own = np.empty_like(samples)
        begins = [stage.first_sample for stage in self.stages]
        stage_of = np.searchsorted(begins, samples, side="right") - 1
        for index in np.unique(stage_of):
            first, weights = self.stages[index]
            pattern, earlier = mixture_pattern(weights)
            here = stage_of == index
            repetition, place = np.divmod(samples[here] - first, len(pattern))
            chosen = pattern[place]
            before = self.drawn(first)[chosen] + repetition * np.array(weights)[chosen]
            source[here] = chosen
            own[here] = before + earlier[place]
        return source, own


@dataclass(frozen=True, eq=False)
class Mixture:
    """A window source that draws from several `sources` according to `order`."""

    sources: Sequence[WindowSource]
    order: MixtureOrder

    @property
    def windows(self) -> int:
        """Number of windows of all sources together. Each source has its own epochs."""
        return sum(source.windows for source in self.sources)

    def draw(self, samples: Int64s) -> TokenIds:
        """Returns the windows `[len(samples), seq_len + 1]` for sample indices of the run."""
        chosen, own = self.order.draws(samples)
        by_source = np.argsort(chosen, kind="stable")
        parts = []
        for index in np.unique(chosen):
            parts.append(self.sources[index].draw(own[chosen == index]))
        ids: TokenIds = np.concatenate(parts)
        return ids[np.argsort(by_source)]


def windows_of_run(
    recipe: Recipe, streams: Sequence[TokenStream], *, for_validation: bool = False
) -> WindowSource:
    """Returns the window source of a run for `streams`, one per corpus.

    With `for_validation`, it uses the weights of the first mixture stage and seed 0, whatever
    `train.seed` is."""
    stages = mixture_stages(recipe)
    seed = recipe.train.seed
    if for_validation:
        stages = stages[:1]
        seed = 0
    sources = []
    for stream in streams:
        sources.append(ShuffledWindows(stream, seq_len=recipe.train.seq_len, seed=seed))
    if len(sources) == 1:
        return sources[0]
    return Mixture(sources, MixtureOrder(stages))


def drawn_by_source(recipe: Recipe, steps: int, skipped: SkippedRanges) -> dict[str, int]:
    """Returns how many sequences the first `steps` steps draw from each of `data.sources`, keyed by
    name. Sources without sequences are omitted."""
    order = MixtureOrder(mixture_stages(recipe))
    sequences = recipe.batch_sizes.before(steps)
    drawn = order.drawn(skipped.end(sequences))
    for passed in skipped.before(sequences):
        drawn -= order.drawn(passed.last + 1) - order.drawn(passed.first)
    counts = zip(recipe.data.sources, drawn.tolist(), strict=False)
    return {source.label: count for source, count in counts if count}
