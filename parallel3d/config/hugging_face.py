"""Models from the `config.json` of transformers, as version 4 wrote it and as version 5 does. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parallel3d.config.ranges import any_of, divisors_near
from parallel3d.config.recipe import ModelConfig, RopeScaling
from parallel3d.errors import ConfigError

_GPT2 = {  # the keys of a config.json, by those of a recipe's `model:`
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "ffn_hidden": "n_inner",
    "vocab": "vocab_size",
    "max_positions": "n_positions",
}
_LLAMA = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_hidden": "intermediate_size",
    "vocab": "vocab_size",
}
_OPTIONAL = ("n_inner", "num_key_value_heads", "head_dim")
_KEYS = {"gpt2": _GPT2, "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "qwen3": _LLAMA}  # by `model_type`
_SCALING = {  # the keys of its rope_scaling, by those of a recipe's
    "original_max_positions": "original_max_position_embeddings",
    **{key: key for key in ("factor", "low_freq_factor", "high_freq_factor")},
    **{key: key for key in ("beta_fast", "beta_slow", "attention_factor")},
}


def read_config_json(path: Path) -> dict[str, Any]:
    """Returns the keys of a `config.json`. Raises ConfigError for a file that cannot be read as one."""
    try:
        config = json.loads(path.read_text())
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read ({problem.strerror}); try the path of a config.json") from problem
    except ValueError as problem:
        raise ConfigError(f"{path}: cannot be read as JSON ({problem})") from problem
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must hold keys and values, as a transformers model's config.json does")
    return config


def from_hugging_face(path: Path) -> ModelConfig:
    """Returns the model of a `config.json`, without a name. Raises ConfigError where it is of another family or its
    numbers do not agree."""
    config = read_config_json(path)
    kind = config.get("model_type", "(not given)")
    if kind not in _KEYS:
        raise ConfigError(f"{path}: model_type = {kind}: must be one of {', '.join(_KEYS)}")
    if kind == "qwen3":
        config.setdefault("head_dim", 128)  # transformers' own default
    numbers: dict[str, Any] = {}
    for ours, theirs in _KEYS[kind].items():
        value = config.get(theirs)
        if theirs not in config and theirs not in _OPTIONAL:
            raise ConfigError(f"{path}: {theirs}: required and not given")
        is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
        if not is_whole and not (value is None and theirs in _OPTIONAL):
            raise ConfigError(f"{path}: {theirs} = {json.dumps(value)}: must be a whole number")
        numbers[ours] = value if value is None else int(value)
    is_gpt, head_dim, rope = kind == "gpt2", numbers.get("head_dim"), _rope(config, path)
    if is_gpt and numbers["ffn_hidden"] is None:
        numbers["ffn_hidden"] = 4 * numbers["hidden"]
    if head_dim is not None and head_dim * numbers["heads"] == numbers["hidden"]:
        numbers["head_dim"] = None
    eps, usual_eps = ("layer_norm_epsilon", 1e-5) if is_gpt else ("rms_norm_eps", 1e-6)
    model = ModelConfig(
        architecture="gpt" if is_gpt else "llama",
        tied_embeddings=bool(config.get("tie_word_embeddings", is_gpt)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        window=_sliding_window(config),
        norm_eps=_number({eps: usual_eps, **config}, eps, path),
        init_std=_number({"initializer_range": 0.02, **config}, "initializer_range", path),
        rope_theta=_number({"rope_theta": 10_000.0, **rope}, "rope_theta", path),
        rope_scaling=None if is_gpt else _rope_scaling(rope, path),
        **numbers,
    )
    check_model(model, str(path))
    return model


def notes_on(config: Mapping[str, Any], path: Path) -> Iterator[str]:
    """What a config.json says and a plan does not count."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            yield f"{key} of config.json is left out: a Llama of this project has no such biases"
    act = config.get("hidden_act", "silu")
    if config.get("model_type") != "gpt2" and act not in ("silu", "swish"):
        yield f"hidden_act {act} of config.json is taken as silu, which a Llama of this project has"
    rope = _rope(config, path)
    kind = _rope_type(rope)
    if kind not in ("default", "llama3", "yarn"):
        yield f"rope_scaling ({kind}) of config.json is left out: recipes have llama3 and yarn, and no other"
    elif unknown := [key for key in rope if key not in ("rope_type", "type", "rope_theta", *_SCALING.values())]:
        yield f"rope_scaling's {', '.join(unknown)} of config.json is left out: recipes have no key for it"
    window = _sliding_window(config)
    if window:
        yield (
            f"sliding_window {window} of config.json is model.window of the recipe; times and memory are of whole "
            "attention: a longer seq_len needs a mask, which saves nothing and costs the fastest kernel"
        )


def check_model(model: ModelConfig, where: str) -> None:
    """Raises ConfigError where the numbers of a model contradict each other."""
    numbers = {name: getattr(model, name) for name in ("layers", "hidden", "heads", "head_dim", "ffn_hidden", "vocab")}
    for name, number in {**numbers, "kv_heads": model.key_value_heads}.items():
        if number is not None and number < 1:
            raise ConfigError(f"{where}: {name} = {number}: must be at least 1")
    parts = [("kv_heads", model.key_value_heads, "heads", model.heads)]
    if model.head_dim is None:
        parts.insert(0, ("heads", model.heads, "hidden", model.hidden))
    for part, number, of, whole in parts:
        if whole % number:
            tries = any_of(divisors_near(whole, number))
            raise ConfigError(f"{where}: {part} = {number}: must divide {of} = {whole}; try {tries}")


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """Keys that a query sees at most; None: all. Qwens name a window and use it only where they say so."""
    is_used = config.get("use_sliding_window", config.get("model_type") not in ("qwen2", "qwen3"))
    window = config.get("sliding_window")
    return int(window) if window and is_used else None


def _rope(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns what is said of rotary positions: by transformers 5 in `rope_parameters`, by 4 in `rope_theta` and
    `rope_scaling`. A model that gives no context before has its own."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, dict):
        raise ConfigError(f"{path}: rope_scaling = {json.dumps(said)}: must hold keys and values, or be null")
    given = {key: value for key, value in said.items() if value is not None}
    if "rope_theta" in config:
        given.setdefault("rope_theta", config["rope_theta"])
    if _rope_type(given) != "default" and "max_position_embeddings" in config:
        given.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return given


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope_scaling(rope: Mapping[str, Any], path: Path) -> RopeScaling | None:
    """Returns the scaling of a config.json; None for a type that no recipe can say, which `notes_on` tells."""
    kind = _rope_type(rope)
    if kind not in ("llama3", "yarn"):
        return None
    required = ("factor", "original_max_position_embeddings")
    numbers: dict[str, Any] = {
        ours: _number(rope, theirs, path) for ours, theirs in _SCALING.items() if theirs in rope or theirs in required
    }
    numbers["original_max_positions"] = int(numbers["original_max_positions"])
    return RopeScaling(type="llama3" if kind == "llama3" else "yarn", **numbers)


def _number(config: Mapping[str, Any], key: str, path: Path) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path}: {key} = {json.dumps(value)}: must be a number")
    return float(value)
