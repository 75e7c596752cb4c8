"""Cutting a model: every layer on one stage, every parameter under its own name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config import ModelConfig
from parallel3d.models.llama import Llama
from parallel3d.pipeline.stage import check_nothing_lost, cut, names_of, spread_layers

MODEL = ModelConfig(layers=5, hidden=8, heads=2, ffn_hidden=12, vocab=16)


@given(stages=st.integers(1, 12), more=st.integers(0, 30))
def test_every_layer_is_on_one_stage(stages: int, more: int) -> None:
    layers = stages + more
    spans = spread_layers(layers, stages)
    assert [i for span in spans for i in range(span.first, span.end)] == list(range(layers))
    sizes = [span.end - span.first for span in spans]
    assert max(sizes) - min(sizes) <= 1


def test_left_over_layers_go_to_the_middle() -> None:
    assert [span.end - span.first for span in spread_layers(30, 4)] == [7, 8, 8, 7]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot fill 4 stages"):
        spread_layers(2, 4)


def test_stages_hold_the_whole_model_under_its_own_names() -> None:
    names = {name for name, _ in Llama(MODEL, device="meta").named_parameters()}
    spans = spread_layers(MODEL.layers, 3)
    check_nothing_lost(names, spans)
    cut_names = [{n for n, _ in cut(Llama(MODEL, device="meta"), span).named_parameters()} for span in spans]
    assert cut_names == [names_of(span, names) for span in spans]
    assert set().union(*cut_names) == names
    assert sum(map(len, cut_names)) == len(names)
    assert "layers.4.mlp.down.weight" in cut_names[2] and "embed.weight" in cut_names[0]


def test_a_parameter_that_no_stage_would_take_is_refused() -> None:
    with pytest.raises(ValueError, match="position.weight"):
        check_nothing_lost({"embed.weight", "position.weight"}, spread_layers(1, 1))
