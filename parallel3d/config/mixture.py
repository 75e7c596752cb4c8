"""The mixture that `data.sources` and `data.stages` ask for: its weights in whole numbers, which
make it exact, its stages in samples, and its rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import NamedTuple

from parallel3d.config.recipe import Recipe
from parallel3d.config.yaml_text import shown

# samples after which the pattern of a stage repeats: a table of a MiB, made in 0.1 s
LONGEST_PERIOD = 100_000


class MixtureStage(NamedTuple):
    """Samples whose sources have the same weights: those from `first_sample` to the next
    stage's."""

    first_sample: int
    weights: tuple[int, ...]  # one for each source


def mixture_stages(recipe: Recipe) -> tuple[MixtureStage, ...]:
    """Returns the stages of the recipe's mixture, at least one; a single corpus has the weight
    1."""
    first = MixtureStage(0, whole_weights([source.weight for source in recipe.data.sources] or [1]))
    begins = recipe.batch_sizes.before
    later = (
        MixtureStage(begins(stage.from_step - 1), whole_weights(stage.weights))
        for stage in recipe.data.stages
    )
    return (first, *later)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns the smallest whole numbers in the proportion of `weights`, whose decimals are taken
    at their word: those of 0.7, 0.25 and 0.05 are 14, 5 and 1."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = gcd(*whole) or 1
    return tuple(weight // divisor for weight in whole)


def mixture_errors(recipe: Recipe) -> Iterator[str]:
    """One line for each setting of the sources and their weights that contradicts another one or
    cannot be drawn."""
    data = recipe.data
    sources = recipe.data.sources
    if data.stages and not sources:
        yield "data.stages: weighs data.sources, and there are none; try data.stages=[]"
    if sources and data.path is not None:
        yield f"data.path = {shown(data.path)}: data.sources names the corpora; try data.path=null"
    labels = [source.label for source in sources]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            yield (
                f"data.sources[{index}].name = {label}: is the name of another source; try name: "
                f"{label}-{index}"
            )
    weighings = {"the weights of data.sources": [source.weight for source in sources]}
    before = 1
    for index, stage in enumerate(data.stages):
        weighings[f"data.stages[{index}].weights"] = [*stage.weights]
        if stage.from_step <= before:
            yield (
                f"data.stages[{index}].from_step = {stage.from_step}: must be above {before}, that "
                f"of the stage before; try from_step: {before + 1}"
            )
        before = stage.from_step
    if not sources:
        return
    for key, weights in weighings.items():
        period = sum(whole_weights(weights))
        if len(weights) != len(sources) or not 0 < period <= LONGEST_PERIOD:
            yield (
                f"{key} = {shown(weights)}: must be {len(sources)} numbers, one for each of "
                "data.sources, not all 0, which as whole numbers add up to at most "
                f"{LONGEST_PERIOD}; try {[1] * len(sources)}"
            )
