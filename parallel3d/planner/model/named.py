"""Shapes by name, and from the `config.json` of a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from parallel3d.config.ranges import any_of, divisors_near
from parallel3d.config.recipe import ModelConfig
from parallel3d.errors import ConfigError
from parallel3d.planner.model.shapes import ModelShape, from_config

_TABLE = Path(__file__).with_name("named_shapes.yaml")
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
    "ffn_hidden": "intermediate_size",
    "vocab": "vocab_size",
}
_KEYS = {"gpt2": _GPT2, "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA}  # by `model_type`; Qwen 2 has biases
_OPTIONAL = ("n_inner", "num_key_value_heads")


def shape_names(cards: Mapping[str, Path]) -> list[str]:
    """Returns every name that `named_shape` knows; `cards` are those of models/."""
    return sorted({*cards, *_load(_TABLE)})


def named_shape(name: str, cards: Mapping[str, Path]) -> ModelShape:
    """Returns the shape of this name. Raises ConfigError with the nearest names."""
    if name in cards:
        return from_config(ModelConfig(name=name, **_load(cards[name])))
    table = _load(_TABLE)
    if name not in table:
        near = get_close_matches(name, [*cards, *table], n=3, cutoff=0.4)
        advice = f"did you mean {', '.join(near)}?" if near else "see parallel3d-plan models"
        raise ConfigError(f"model {name}: unknown; {advice}")
    return ModelShape(name=name, **table[name])


def from_hugging_face(path: Path) -> ModelShape:
    """Reads the shape of a `config.json`, named by its folder where it has that name. Raises ConfigError where it is of
    another family or its numbers do not agree."""
    try:
        config = json.loads(path.read_text())
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read ({problem.strerror}); try the path of a config.json") from problem
    except ValueError as problem:
        raise ConfigError(f"{path}: cannot be read as JSON ({problem})") from problem
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must hold keys and values, as a transformers model's config.json does")
    kind = config.get("model_type", "(not given)")
    if kind not in _KEYS:
        raise ConfigError(f"{path}: model_type = {kind}: must be one of {', '.join(_KEYS)}")
    numbers: dict[str, Any] = {}
    for ours, theirs in _KEYS[kind].items():
        value = config.get(theirs)
        if theirs not in config and theirs not in _OPTIONAL:
            raise ConfigError(f"{path}: {theirs}: required and not given")
        is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
        if not is_whole and not (value is None and theirs in _OPTIONAL):
            raise ConfigError(f"{path}: {theirs} = {json.dumps(value)}: must be a whole number")
        numbers[ours] = value if value is None else int(value)
    is_gpt, hidden, heads, head_dim = kind == "gpt2", numbers["hidden"], numbers["heads"], config.get("head_dim")
    if is_gpt and numbers["ffn_hidden"] is None:
        numbers["ffn_hidden"] = 4 * hidden
    if not is_gpt and head_dim is not None and heads > 0 and head_dim * heads != hidden:
        raise ConfigError(
            f"{path}: head_dim = {head_dim}: must be hidden_size / num_attention_heads = {hidden // heads}"
        )
    model = ModelConfig(
        name=path.resolve().parent.name if path.stem == "config" else path.stem,
        architecture="gpt" if is_gpt else "llama",
        tied_embeddings=bool(config.get("tie_word_embeddings", is_gpt)),
        qkv_bias=kind == "qwen2",
        **numbers,
    )
    shape = from_config(model)
    check_shape(shape, str(path))
    return shape


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Keys that a query sees at most; None: all. Qwen 2 names a window and uses it only where it says so."""
    is_used = config.get("use_sliding_window", config.get("model_type") != "qwen2")
    window = config.get("sliding_window")
    return int(window) if window and is_used else None


def notes_on(config: Mapping[str, Any]) -> Iterator[str]:
    """What a config.json says and a plan does not count."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            yield f"{key} of config.json is left out: a Llama of this project has no such biases"
    act = config.get("hidden_act", "silu")
    if config.get("model_type") != "gpt2" and act not in ("silu", "swish"):
        yield f"hidden_act {act} of config.json is taken as silu, which a Llama of this project has"
    scaling = config.get("rope_scaling")
    if scaling:
        kind = scaling.get("rope_type", scaling.get("type", "?")) if isinstance(scaling, dict) else scaling
        yield f"rope_scaling ({kind}) of config.json is left out: recipes have no key for it, and rotate by rope_theta"
    window = sliding_window(config)
    if window:
        yield (
            f"sliding_window {window} of config.json is model.window of the recipe; times and memory are of whole "
            "attention: a longer seq_len needs a mask, which saves nothing and costs the fastest kernel"
        )


def check_shape(shape: ModelShape, where: str) -> None:
    """Raises ConfigError where the numbers of a shape contradict each other."""
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab"):
        if getattr(shape, name) < 1:
            raise ConfigError(f"{where}: {name} = {getattr(shape, name)}: must be at least 1")
    for part, of in (("heads", "hidden"), ("kv_heads", "heads")):
        number, whole = getattr(shape, part), getattr(shape, of)
        if whole % number:
            tries = any_of(divisors_near(whole, number))
            raise ConfigError(f"{where}: {part} = {number}: must divide {of} = {whole}; try {tries}")


def _load(path: Path) -> dict[str, Any]:
    loaded = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert isinstance(loaded, dict)
    return loaded
