"""Shapes from the `config.json` of families that this project's trainer has no module for, as
transformers 4 and 5 write it: mixtures of experts and Gemmas. What such a file says and a shape
cannot say is an error or a note."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel3d.config.hugging_face import (
    check_numbers,
    sliding_window,
    whole_number,
    windowed_layers,
)
from parallel3d.config.recipe import ModelConfig
from parallel3d.errors import ConfigError
from parallel3d.planner.model.experts import Experts, LatentAttention
from parallel3d.planner.model.shapes import ModelShape, from_config

# which layers have experts, where that is all
_DENSE_SWITCHES = {"decoder_sparse_step": 1, "moe_layer_freq": 1}
_GEMMA = "Gemma's scaled embeddings, norms after each half of a block and GeGLU"
# What transformers takes where a file leaves a key out.
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {**_GEMMA3, "sliding_window": 4096},
    "gemma": {"head_dim": 256},
}


def hf_config_shape(config: Mapping[str, Any], name: str, path: Path) -> ModelShape | None:
    """Returns the shape of a config.json whose family is one of these; None for any other. Raises
    ConfigError for what a shape cannot say."""
    said = text_part(config)
    kind = str(said.get("model_type"))
    if kind not in PLANNED_FAMILIES:
        return None
    said = {**_DEFAULTS.get(kind, {}), **said}

    def number(key: str) -> int:
        return whole_number(said, key, path)

    def optional(key: str) -> int | None:
        if said.get(key) is None:
            return None
        return number(key)

    for key, usual in _DENSE_SWITCHES.items():
        if said.get(key, usual) != usual:
            raise ConfigError(
                f"{path}: {key} = {said[key]}: must be {usual}, experts in every layer after the "
                "first ones"
            )
    if said.get("mlp_only_layers"):
        raise ConfigError(
            f"{path}: mlp_only_layers = {said['mlp_only_layers']}: must be empty: such layers are "
            "not priced"
        )
    plain = ModelConfig(
        name=name,
        hidden=number("hidden_size"),
        heads=number("num_attention_heads"),
        layers=number("num_hidden_layers"),
        kv_heads=optional("num_key_value_heads"),
        head_dim=optional("head_dim"),
        ffn_hidden=number("intermediate_size"),
        vocab=number("vocab_size"),
        tied_embeddings=bool(said.get("tie_word_embeddings", kind.startswith("gemma"))),
    )
    check_numbers(plain, str(path))
    own: dict[str, Any] = PLANNED_FAMILIES[kind](said, number)
    if (latent := own.get("latent")) is not None:
        own |= {"head_dim": latent.plain + latent.turned, "kv_heads": plain.heads}
    elif plain.heads % plain.key_value_heads:
        raise ConfigError(
            f"{path}: num_key_value_heads = {plain.kv_heads}: must divide num_attention_heads = "
            f"{plain.heads}"
        )
    layers = windowed_layers(said)
    window = sliding_window(said) if layers else None
    return replace(from_config(plain), window=window, windowed_layers=layers, **own)


def hf_config_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields what such a file says and the shape leaves out."""
    said = text_part(config)
    if said is not config:
        yield "the text model of config.json is planned, and what else it has (images) is left out"
    if said.get("num_nextn_predict_layers"):
        yield (
            "num_nextn_predict_layers of config.json is left out: modules that predict more tokens "
            "are not counted"
        )
    for key in ("attn_logit_softcapping", "clip_qkv"):
        if said.get(key):
            yield f"{key} of config.json is left out: attention takes as long as without it"


def window_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields how a plan counts a window."""
    if layers := windowed_layers(config):
        yield (
            f"sliding_window {sliding_window(config)} of config.json: the plan counts the time of "
            f"attention with it in {layers} of {config['num_hidden_layers']} layers, and memory as "
            "of whole attention"
        )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keys of the text model where a config.json has those of several."""
    part = config.get("text_config")
    if isinstance(part, Mapping):
        return {"model_type": f"{config.get('model_type')}_text", **part}
    return config


Numbers = Callable[[str], int]


def _routed(
    count: str, hidden: str, **shape: Any
) -> Callable[[Mapping[str, Any], Numbers], dict[str, Any]]:
    """Returns the reader of a family whose config.json calls the number of experts, and the
    features within one, so; `shape` is what its attention has."""

    def read(said: Mapping[str, Any], number: Numbers) -> dict[str, Any]:
        shared = said.get("shared_expert_intermediate_size")
        experts = Experts(
            count=number(count),
            per_token=number("num_experts_per_tok"),
            hidden=number(hidden),
            shared_hidden=number("shared_expert_intermediate_size") if shared else 0,
            shared_gate=bool(shared),
        )
        return {"experts": experts, **shape}

    return read


def _deepseek(said: Mapping[str, Any], number: Numbers) -> dict[str, Any]:
    each = number("moe_intermediate_size")
    groups = said.get("topk_group")
    experts = Experts(
        count=number("n_routed_experts"),
        per_token=number("num_experts_per_tok"),
        hidden=each,
        shared_hidden=each * int(said.get("n_shared_experts") or 0),
        router_bias=said.get("topk_method", "noaux_tc") == "noaux_tc"
        and said.get("model_type") != "deepseek_v2",
        dense_layers=int(said.get("first_k_dense_replace") or 0),
        most_groups=int(groups) if groups and int(said.get("n_group") or 1) > 1 else None,
    )
    latent = LatentAttention(
        query_rank=None if said.get("q_lora_rank") is None else number("q_lora_rank"),
        key_value_rank=number("kv_lora_rank"),
        turned=number("qk_rope_head_dim"),
        plain=number("qk_nope_head_dim"),
        value=number("v_head_dim"),
    )
    return {"experts": experts, "latent": latent}


def _gemma(said: Mapping[str, Any], number: Numbers) -> dict[str, Any]:
    kind = str(said.get("model_type"))
    norms = 2 if kind == "gemma" else 4
    return {
        "feed_forward": "geglu",
        "block_norms": norms,
        "qk_norm": kind == "gemma3_text",
        "lacks_module": _GEMMA if norms == 4 else "Gemma's scaled embeddings and GeGLU",
    }


# by `model_type`
PLANNED_FAMILIES: dict[str, Callable[[Mapping[str, Any], Numbers], dict[str, Any]]] = {
    "mixtral": _routed("num_local_experts", "intermediate_size"),
    "qwen2_moe": _routed("num_experts", "moe_intermediate_size", qkv_biases=True),
    "qwen3_moe": _routed("num_experts", "moe_intermediate_size", qk_norm=True),
    "olmoe": _routed("num_experts", "intermediate_size", qk_norm_whole=True),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
}
