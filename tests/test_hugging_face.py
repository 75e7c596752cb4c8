"""Models under the names of transformers: each family's table and config.json, written and read,
beside its code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from parallel3d.checkpoint.hugging_face_names import hf_tensors
from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.hugging_face import (
    family_of,
    from_hugging_face,
    ignored_keys,
    read_config_json,
    to_hugging_face,
)
from parallel3d.config.recipe import ModelConfig, RopeScaling
from parallel3d.errors import ConfigError
from parallel3d.layers.parameter import named_specs
from parallel3d.models import unsharded_model

SEQ_LEN = 24
LLAMA = ModelConfig(
    layers=4,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn_hidden=48,
    vocab=260,
    rope_theta=100.0,
)
GPT2 = ModelConfig(
    architecture="gpt",
    layers=4,
    hidden=32,
    heads=4,
    ffn_hidden=48,
    vocab=1005,
    max_positions=SEQ_LEN,
    tied_embeddings=True,
)
FAMILIES = {
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tied_embeddings=True),
    "llama3.1": replace(
        LLAMA,
        rope_scaling=RopeScaling(
            type="llama3",
            factor=8.0,
            original_max_positions=16,
        ),
    ),
    "llama yarn": replace(
        LLAMA,
        rope_scaling=RopeScaling(
            type="yarn",
            factor=4.0,
            original_max_positions=16,
        ),
    ),
    "qwen2": replace(LLAMA, qkv_bias=True, tied_embeddings=True),
    "qwen2 window": replace(LLAMA, qkv_bias=True, window=7),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=12),
    "mistral": replace(LLAMA, window=7, head_dim=6),
    "gpt2": GPT2,
    "gpt2 untied": replace(GPT2, tied_embeddings=False),
}

EXPERTS = ExpertsConfig(count=6, per_token=2, hidden=48)
MIXTURES = {
    "mixtral": replace(LLAMA, experts=EXPERTS, window=7),
    "qwen2_moe": replace(
        LLAMA,
        qkv_bias=True,
        experts=replace(
            EXPERTS,
            shared_hidden=24,
            shared_gate=True,
            dense_layers=2,
        ),
    ),
    "qwen3_moe": replace(
        LLAMA,
        qk_norm=True,
        head_dim=12,
        window=7,
        tied_embeddings=True,
        experts=replace(
            EXPERTS,
            hidden=20,
            normalize=False,
        ),
    ),
}


def config_json(model: ModelConfig) -> dict[str, Any]:
    return to_hugging_face(model, seq_len=SEQ_LEN, dtype="float32", end_of_text=5)


def as_read_from(config: dict[str, Any], folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    found = read_config_json(folder / "config.json")
    assert [*ignored_keys(found, folder)] == []
    return from_hugging_face(found, folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_table_has_all_parameters_of_ours_and_all_hf_tensors(
    family: str, tmp_path: Path
) -> None:
    model = FAMILIES[family]
    (tmp_path / "config.json").write_text(json.dumps(config_json(model)))
    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(tmp_path)
        )
    assert type(peer).__name__ == config_json(model)["architectures"][0]
    shapes = {name: spec.shape for name, spec in named_specs(unsharded_model(model))}
    table = [*hf_tensors(model, ())]
    used = [name for each in table for name in each.parameters]
    assert sorted(used) == sorted(shapes)
    theirs = {name: tuple(parameter.shape) for name, parameter in peer.named_parameters()}
    assert {each.name: each.shape(shapes[each.parameters[0]]) for each in table} == theirs


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_a_config_json_is_read_as_it_was_written_by_new_readers_and_old(
    family: str, tmp_path: Path
) -> None:
    model = {**FAMILIES, **MIXTURES}[family]
    config = config_json(model)
    assert as_read_from(config, tmp_path) == model
    if family.startswith("gpt2"):
        return
    # A reader of version 4 knows the top level alone, one of version 5 `rope_parameters` alone.
    four = {key: value for key, value in config.items() if key != "rope_parameters"}
    five = {
        key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")
    }
    assert four["rope_theta"] == 100.0
    assert as_read_from(four, tmp_path) == model
    assert five["rope_parameters"]["rope_theta"] == 100.0
    assert as_read_from(five, tmp_path) == model


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("gpt2")])
def test_both_forms_of_the_rotary_base_give_transformers_the_same_angles(
    family: str, tmp_path: Path
) -> None:
    config = config_json(FAMILIES[family])
    found = []
    for left in ((), ("rope_parameters",), ("rope_theta", "rope_scaling")):
        (tmp_path / "config.json").write_text(
            json.dumps({key: config[key] for key in config if key not in left})
        )
        read = transformers.AutoConfig.from_pretrained(tmp_path)
        rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(read)
        found.append((rotary.inv_freq.tolist(), rotary.attention_scaling))
    assert found[0] == found[1] == found[2]
    assert found[0][0][1] < 1.0


_SHARED = {"shared_hidden": 24, "shared_gate": True}
REFUSED_EXPERTS: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"score": "sigmoid"}, "score = sigmoid: .* only softmax"),
    ("mixtral", {"scale": 2.5}, "scale = 2.5: .* only 1.0"),
    ("mixtral", {"bias_rate": 1e-3}, "bias_rate = 0.001: .* only 0"),
    ("mixtral", _SHARED, "shared_hidden = 24: .* only 0 with model.qkv_bias = false"),
    ("mixtral", {"normalize": False}, "normalize = false: .* only true without model.qk_norm"),
    ("mixtral", {"dense_layers": 1}, "dense_layers = 1: .* only 0 without model.qk_norm"),
    ("qwen2_moe", {}, "shared_hidden = 0: .* only 48 with model.qkv_bias = true"),
    ("qwen2_moe", {"shared_hidden": 24}, "shared_gate = false: .* only true"),
    ("qwen3_moe", _SHARED, "shared_hidden = 24: .* only 0 with model.qkv_bias = false"),
]


@pytest.mark.parametrize(
    "model, refusal",
    [
        (
            replace(LLAMA, architecture="my_model:MyModel"),
            "model.architecture = my_model:MyModel: .* only llama or gpt",
        ),
        (
            replace(LLAMA, qk_norm=True, qkv_bias=True),
            "model.qk_norm = true: .* only false with model.qkv_bias",
        ),
        (replace(GPT2, kv_heads=2), "model.kv_heads = 2: .* only 4 can"),
        (replace(GPT2, head_dim=16), "model.head_dim = 16: .* only 8 can"),
        *[
            (
                replace(MIXTURES[family], experts=replace(EXPERTS, **keys)),
                f"model.experts.{refusal} can be exported",
            )
            for family, keys, refusal in REFUSED_EXPERTS
        ],
        (replace(MIXTURES["qwen2_moe"], window=7), "model.window = 7: .* only null"),
    ],
)
def test_a_model_that_no_family_has_is_refused_by_its_key(model: ModelConfig, refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        family_of(model)


@pytest.mark.parametrize(
    "family, keys, refusal",
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0: "),
        ("mixtral", {"num_local_experts": None}, "num_local_experts = null: must be an integer"),
        ("mixtral", {"num_experts_per_tok": 9}, "per_token = 9: must be at most .*; try 2"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias = false: .*; try true"),
        ("qwen3_moe", {"mlp_only_layers": [1, 3]}, r"mlp_only_layers = \[1, 3\]: .* try \[0, 1\]"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers = 3: "),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2: .*; try 1"),
        ("qwen3_moe", {"model_type": "qwen3"}, "qwen3 with num_experts = 6: must be one of"),
    ],
)
def test_experts_that_a_recipe_cannot_say_are_refused(
    family: str, keys: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        as_read_from(config_json(MIXTURES[family]) | keys, tmp_path)


# Keys of a config.json under which the same weights would compute something else here.
DIFFERING: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"attention_bias": True}, "attention_bias"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
    ("llama yarn", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("qwen2 window", {"max_window_layers": 2}, "sliding_window"),
    (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
        "sliding_window",
    ),
    ("gpt2", {"activation_function": "relu"}, "activation_function = relu"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
]


@pytest.mark.parametrize("family, keys, named", DIFFERING)
def test_what_a_recipe_cannot_say_is_told(
    family: str, keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (line,) = ignored_keys(config_json(FAMILIES[family]) | keys, tmp_path)
    assert named in line
