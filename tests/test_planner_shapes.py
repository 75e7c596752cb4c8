"""Parameter counts of the planner: those of the real modules, and of the papers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parallel3d.config.hugging_face import from_hugging_face
from parallel3d.config.recipe import ModelConfig
from parallel3d.errors import ConfigError
from parallel3d.models import shape_cards
from parallel3d.planner.model.named import named_shape, shape_names
from parallel3d.planner.model.parameters import rank_numel, total_parameters
from parallel3d.planner.model.planned_run import _cut_by_cost, spread
from parallel3d.planner.model.shapes import StageSlice, from_config
from parallel3d.schedules.balance import PartCosts, balanced_cut

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


def test_every_name_is_within_a_rounding_of_what_it_says() -> None:
    for name in shape_names(shape_cards()):
        assert total_parameters(named_shape(name, shape_cards())) > 1e8


LLAMA = ModelConfig(layers=7, hidden=64, heads=8, kv_heads=4, ffn_hidden=96, vocab=128)
MODELS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied_embeddings=True),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=12),
    "nemo": replace(LLAMA, head_dim=6, qkv_bias=True),
    "gpt": replace(LLAMA, architecture="gpt", kv_heads=8, max_positions=32, tied_embeddings=True),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "stages"), [(1, 1), (2, 1), (2, 3), (4, 5)])
def test_stage_parameters_are_those_of_the_real_modules(tp: int, stages: int, model: str) -> None:
    from parallel3d.layers.parameter import ParallelModule
    from parallel3d.models import model_class
    from parallel3d.pipeline.stage import block_ranges, cut

    config = MODELS[model]
    whole = model_class(config.architecture)
    for blocks in block_ranges(spread(config.layers, stages)):
        stage = cut(
            whole(config, tp=None, sequence_parallel=False, recompute="none", recompute_every=1, device="meta"), blocks
        )
        real: dict[int, int] = {}
        for module in stage.modules():
            for name, spec in module.specs.items() if isinstance(module, ParallelModule) else ():
                parameter = getattr(module, name)
                real[id(parameter)] = parameter.numel() // (tp if spec.dim is not None else 1)
        part = StageSlice(layers=blocks.end - blocks.first, embedding=blocks.is_first_stage, head=blocks.is_last_stage)
        assert rank_numel(from_config(config), (part,), tp, repeats_kv_heads=True) == sum(real.values())


@pytest.mark.parametrize("stages", range(1, 9))
def test_layers_are_spread_as_the_pipeline_spreads_them(stages: int) -> None:
    even = PartCosts(embedding=0.0, block=1.0, head=0.0)
    assert list(spread(8, stages)) == balanced_cut(8, stages, even)


@pytest.mark.parametrize("model", MODELS)
def test_the_planner_prices_the_stages_that_the_trainer_cuts(model: str) -> None:
    config = replace(MODELS[model], layers=30, vocab=4096)
    for stages in (2, 3, 8):
        trained = balanced_cut(30, stages, config.part_costs(512))
        assert list(_cut_by_cost(from_config(config), stages, 512)) == trained
    assert trained[-1] < trained[1], "the head takes blocks from the last stage"


def test_a_config_json_gives_the_same_shape_as_the_card(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert total_parameters(from_config(from_hugging_face(tmp_path / "config.json"))) == PUBLISHED["llama3-8b"]


def test_an_inconsistent_config_json_is_one_clear_line(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 100,
        "num_attention_heads": 3,
        "intermediate_size": 8,
        "vocab_size": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="heads = 3: must divide hidden = 100"):
        from_hugging_face(tmp_path / "config.json")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="llama3-8b"):
        named_shape("llama-3-8b", shape_cards())
