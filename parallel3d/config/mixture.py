"""The data mixture of `data.sources` and `data.stages`: exact integer weights, stages in samples,
and the rules for both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

from parallel3d.config.recipe import Recipe
from parallel3d.config.yaml_text import shown

# Maximum number of samples after which the pattern of a stage repeats. Its table then takes 1 MiB
# and 0.1 s.
LONGEST_PERIOD = 100_000


class MixtureStage(NamedTuple):
    """A range of samples with constant weights, from `first_sample` to that of the next stage."""

    first_sample: int
    weights: tuple[int, ...]  # one for each source


def mixture_stages(recipe: Recipe) -> tuple[MixtureStage, ...]:
    """Returns the stages of the data mixture, at least one. A single corpus has weight 1."""
    first = MixtureStage(0, whole_weights([source.weight for source in recipe.data.sources] or [1]))
    begins = recipe.batch_sizes.before
    later = (
        MixtureStage(begins(stage.from_step - 1), whole_weights(stage.weights))
        for stage in recipe.data.stages
    )
    return (first, *later)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest integers in the proportion of `weights`. Decimals count exactly: 0.7,
    0.25 and 0.05 become 14, 5 and 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = gcd(*whole) or 1
    return tuple(weight // divisor for weight in whole)


def mixture_errors(recipe: Recipe) -> Iterator[str]:
    """Yields an error line for each conflict in the sources and their weights."""
    data = recipe.data
    sources = recipe.data.sources
    if data.stages and not sources:
        yield "data.stages: weighs data.sources, which is empty; try data.stages=[]"
    if sources and data.path is not None:
        yield f"data.path = {shown(data.path)}: must be null with data.sources; try data.path=null"
    labels = [source.label for source in sources]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            yield (
                f"data.sources[{index}].name = {label}: is already the name of another source; "
                f"try name: {label}-{index}"
            )
    weighings = {"the weights of data.sources": [source.weight for source in sources]}
    before = 1
    for index, stage in enumerate(data.stages):
        weighings[f"data.stages[{index}].weights"] = [*stage.weights]
        if stage.from_step <= before:
            yield (
                f"data.stages[{index}].from_step = {stage.from_step}: must be above {before}, the "
                f"step of the stage before; try from_step: {before + 1}"
            )
        before = stage.from_step
    if not sources:
        return
    for key, weights in weighings.items():
        period = sum(whole_weights(weights))
        if len(weights) != len(sources) or not 0 < period <= LONGEST_PERIOD:
            yield (
                f"{key} = {shown(weights)}: must be {len(sources)} numbers, one for each of "
                f"data.sources, not all 0, that add up to at most {LONGEST_PERIOD} when scaled to "
                f"integers; try {[1] * len(sources)}"
            )
