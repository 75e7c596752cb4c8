"""Cutting a model into pipeline stages.

The model says which of its parts are its blocks (`layers`, a ModuleDict whose keys are the blocks' indices in the
whole model), which come before them (`embed`) and which after (`norm`, `head`). A stage is the model itself without
the parts of the others, so that every parameter keeps its global name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

FIRST_PARTS = ("embed",)
LAST_PARTS = ("norm", "head")


@dataclass(frozen=True)
class Span:
    """The blocks first <= i < end of the whole model, and whether the embedding or the head go with them."""

    first: int
    end: int
    is_first_stage: bool
    is_last_stage: bool


def spread_layers(layers: int, stages: int) -> list[Span]:
    """Every layer on a stage, as evenly as can be; those left over go to the middle, because the first stage also has
    the embedding and the last the head. Raises ValueError where there are more stages than layers."""
    if stages > layers:
        raise ValueError(f"{layers} layers cannot fill {stages} stages")
    each, left_over = divmod(layers, stages)
    from_the_middle = sorted(range(stages), key=lambda stage: abs(2 * stage - (stages - 1)))
    takes_one_more = set(from_the_middle[:left_over])
    spans, first = [], 0
    for stage in range(stages):
        end = first + each + (stage in takes_one_more)
        spans.append(Span(first, end, is_first_stage=stage == 0, is_last_stage=stage == stages - 1))
        first = end
    return spans


def cut(model: nn.Module, span: Span) -> nn.Module:
    """Takes out of `model` (changed in place) what is not of this stage, and returns it."""
    layers = model.layers
    assert isinstance(layers, nn.ModuleDict)
    for index in list(layers):
        if not span.first <= int(index) < span.end:
            del layers[index]
    gone = ([] if span.is_first_stage else list(FIRST_PARTS)) + ([] if span.is_last_stage else list(LAST_PARTS))
    for name in gone:
        setattr(model, name, None)
    return model


def names_of(span: Span, names: Iterable[str]) -> set[str]:
    """Those of the model's parameter names that belong to a stage."""
    blocks = {str(index) for index in range(span.first, span.end)}
    parts = {*(FIRST_PARTS if span.is_first_stage else ()), *(LAST_PARTS if span.is_last_stage else ())}
    return {
        name
        for name in names
        if name.split(".")[0] in parts or (name.startswith("layers.") and name.split(".")[1] in blocks)
    }


def check_nothing_lost(names: set[str], spans: list[Span]) -> None:
    """Raises ValueError where a parameter of the model would be on no stage, or on two."""
    kept = [name for span in spans for name in names_of(span, names)]
    if sorted(kept) != sorted(names):
        lost, doubled = sorted(names - set(kept)), sorted({name for name in kept if kept.count(name) > 1})
        raise ValueError(f"the stages lose {lost[:4]} and have twice {doubled[:4]} of the model's parameters")
