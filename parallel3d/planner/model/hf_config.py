"""Shapes from the `config.json` of model families that the trainer cannot build: MoE models and
Gemma. Dense layers between MoE layers raise an error, and omitted parts of a model yield a note."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from parallel3d.config.hugging_face import (
    check_model,
    first_dense_layers,
    from_hugging_face,
    sizes_of,
    sliding_window,
    whole_number,
    windowed_layers,
)
from parallel3d.config.recipe import ModelConfig
from parallel3d.config.saved_tensors import saved_tensors
from parallel3d.planner.model.experts import Experts, LatentAttention
from parallel3d.planner.model.shapes import ModelShape, from_config

_LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
# Fields of a shape by `model_type`.
PLANNED_FAMILIES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("hf_families.yaml").read_text()
)


class _Keys(NamedTuple):
    """Reads integers from a config.json. Other values raise ConfigError."""

    said: Mapping[str, Any]
    path: Path

    def number(self, key: str) -> int:
        return whole_number(self.said, key, self.path)

    def optional(self, key: str) -> int | None:
        if self.said.get(key) is None:
            return None
        return self.number(key)


def shape_of_json(config: Mapping[str, Any], path: Path) -> ModelShape:
    """Returns the shape of the config.json at `path`. Raises ConfigError for other families."""
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    shape = hf_config_shape(config, name, path)
    if shape is None:
        plain = from_hugging_face(config, path, others=PLANNED_FAMILIES)
        shape = replace(from_config(plain), name=name, windowed_layers=windowed_layers(config))
    return replace(shape, saved=saved_tensors(str(config["model_type"])))


def hf_config_shape(config: Mapping[str, Any], name: str, path: Path) -> ModelShape | None:
    """Returns the shape of a config.json, or None if its family is not in `PLANNED_FAMILIES`.

    Raises:
        ConfigError: A size is not valid, or a dense layer follows an MoE layer.
    """
    said = text_part(config)
    kind = str(said.get("model_type"))
    if kind not in PLANNED_FAMILIES:
        return None
    own = dict(PLANNED_FAMILIES[kind])
    said = {**own.pop("defaults", {}), **said}
    keys = _Keys(said, path)
    dense = first_dense_layers(*keys)
    is_tied = said.get("tie_word_embeddings", own.pop("tied_embeddings", False))
    plain = ModelConfig(
        **sizes_of(said, path),
        name=name,
        tied_embeddings=bool(is_tied),
        experts=_experts(keys, dense),
    )
    check_model(plain, str(path))
    if own.get("positions") == "learned":
        own["position_rows"] = keys.number("max_position_embeddings") + 2  # as OPT counts them
    if kind in _LATENT_FAMILIES:
        latent = LatentAttention(
            query_rank=keys.optional("q_lora_rank"),
            key_value_rank=keys.number("kv_lora_rank"),
            turned=keys.number("qk_rope_head_dim"),
            plain=keys.number("qk_nope_head_dim"),
            value=keys.number("v_head_dim"),
        )
        own |= {
            "latent": latent,
            "head_dim": latent.plain + latent.turned,
            "kv_heads": plain.heads,
        }
    layers = windowed_layers(said)
    window = sliding_window(said) if layers else None
    return replace(from_config(plain), window=window, windowed_layers=layers, **own)


def _experts(keys: _Keys, dense: int) -> Experts | None:
    """Returns the experts of a config that uses the key names of Mixtral, Qwen or DeepSeek, or None
    for a dense model.
    """
    count = None
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        count = count or keys.optional(key)
    if count is None:
        return None
    hidden = keys.optional("moe_intermediate_size") or keys.number("intermediate_size")
    gated = keys.optional("shared_expert_intermediate_size") or 0
    groups = keys.optional("topk_group")
    if groups == keys.optional("n_group"):  # Routing is not limited.
        groups = None
    return Experts(
        count=count,
        per_token=keys.number("num_experts_per_tok"),
        hidden=hidden,
        shared_hidden=gated + hidden * (keys.optional("n_shared_experts") or 0),
        shared_gate=gated > 0,
        router_bias=keys.said["model_type"] in ("deepseek_v3", "kimi_k2"),
        dense_layers=keys.optional("first_k_dense_replace") or dense,
        most_groups=groups,
    )


def hf_config_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a note on other modalities and on multi-token prediction, which are omitted."""
    said = text_part(config)
    if said is not config:
        yield "only the text model of config.json is planned, without other parts such as images"
    if said.get("num_nextn_predict_layers"):
        yield (
            "num_nextn_predict_layers of config.json is ignored: modules that predict further "
            "tokens are not counted"
        )


def window_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a note on how the plan treats a sliding window, if there is one."""
    if layers := windowed_layers(config):
        yield (
            f"sliding_window {sliding_window(config)} of config.json: attention is windowed in the "
            f"time of {layers} of {config['num_hidden_layers']} layers, but memory counts full "
            "attention"
        )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `text_config` of a multimodal model, else the config."""
    part = config.get("text_config")
    if isinstance(part, Mapping):
        return {"model_type": f"{config.get('model_type')}_text", **part}
    return config
