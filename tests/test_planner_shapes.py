"""Parameter counts of the planner: those of the real modules, and of the papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel3d.config.recipe import ModelConfig
from parallel3d.models import shape_cards
from parallel3d.planner.model.named import named_shape
from parallel3d.planner.model.parameters import total_parameters
from parallel3d.planner.model.planned_run import _cut_by_cost
from parallel3d.planner.model.shapes import from_config
from parallel3d.schedules.blocks_per_stage import blocks_per_stage

PUBLISHED = {  # as Hugging Face and the papers count them
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-nemo-12b": 12_247_782_400,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert total_parameters(named_shape(name, shape_cards())) == PUBLISHED[name]


LLAMA = ModelConfig(
    layers=7,
    hidden=64,
    heads=8,
    kv_heads=4,
    ffn_hidden=96,
    vocab=128,
)
MODELS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=12),
    "nemo": replace(LLAMA, head_dim=6, qkv_bias=True),
    "gpt": replace(
        LLAMA,
        architecture="gpt",
        kv_heads=8,
        max_positions=32,
        tied_embeddings=True,
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_planner_prices_the_stages_that_the_trainer_cuts(model: str) -> None:
    config = replace(MODELS[model], layers=30, vocab=4096)
    for stages in (2, 3, 8):
        trained = blocks_per_stage(30, stages, config.part_costs(512))
        assert list(_cut_by_cost(from_config(config), stages, 512)) == trained
    assert trained[-1] < trained[1], "the head takes blocks from the last stage"
