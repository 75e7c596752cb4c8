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
_HUGGING_FACE_LLAMAS = ("llama", "mistral", "qwen2")  # `model_type` of what is a Llama, Qwen 2 with biases


def shape_names(cards: Mapping[str, Path]) -> list[str]:
    """Every name that `named_shape` knows; `cards` are those of models/."""
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
    return _from_entry(name, table[name])


def from_hugging_face(path: Path) -> ModelShape:
    """Reads the shape of a `config.json`. Raises ConfigError where it is of another family or its numbers do not
    agree."""
    try:
        config = json.loads(path.read_text())
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read ({problem.strerror}); try the path of a config.json") from problem
    except ValueError as problem:
        raise ConfigError(f"{path}: cannot be read as JSON ({problem})") from problem
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: must hold keys and values, as a transformers model's config.json does")
    kind = config.get("model_type", "(not given)")
    try:
        if kind == "gpt2":
            shape = _from_gpt2(_name(path), config)
        elif kind in _HUGGING_FACE_LLAMAS:
            shape = _from_llama(_name(path), config)
        else:
            known = ", ".join(("gpt2", *_HUGGING_FACE_LLAMAS))
            raise ConfigError(f"{path}: model_type = {kind}: must be one of {known}")
    except KeyError as missing:
        raise ConfigError(f"{path}: {missing.args[0]}: required and not given") from missing
    except ValueError as problem:
        raise ConfigError(f"{path}: {problem}") from problem
    check_shape(shape, str(path))
    return shape


def _name(path: Path) -> str:
    """Names a model by where its file is: by its folder, or by the file itself."""
    return path.resolve().parent.name if path.stem == "config" else path.stem


def _whole(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Reads a whole number of a config.json. Raises KeyError where it misses, ValueError where it is something else."""
    value = config[key] if default is None else config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1:
        raise ValueError(f"{key} = {json.dumps(value)}: must be a whole number")
    return int(value)


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Keys that a query of a config.json's model sees at most; None: all. Qwen 2 names a window that it does not use
    unless it says so."""
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
    counts = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab")
    for name in counts:
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


def _from_entry(name: str, entry: Mapping[str, Any]) -> ModelShape:
    assert entry["kind"] == "relu2"
    return ModelShape(
        name=name,
        layers=entry["layers"],
        hidden=entry["hidden"],
        heads=entry["heads"],
        kv_heads=entry.get("kv_heads", entry["heads"]),
        ffn_hidden=entry["ffn_hidden"],
        vocab=entry["vocab"],
        feed_forward="relu2",
        layer_norm=True,
    )


def _from_gpt2(name: str, config: Mapping[str, Any]) -> ModelShape:
    hidden = _whole(config, "n_embd")
    return ModelShape(
        name=name,
        layers=_whole(config, "n_layer"),
        hidden=hidden,
        heads=_whole(config, "n_head"),
        kv_heads=_whole(config, "n_head"),
        ffn_hidden=_whole(config, "n_inner", 4 * hidden),
        vocab=_whole(config, "vocab_size"),
        feed_forward="gelu",
        positions="learned",
        position_rows=_whole(config, "n_positions"),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        biases=True,
        layer_norm=True,
    )


def _from_llama(name: str, config: Mapping[str, Any]) -> ModelShape:
    heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is not None and heads > 0 and head_dim * heads != hidden:
        raise ValueError(f"head_dim = {head_dim}: must be hidden_size / num_attention_heads = {hidden // heads}")
    return ModelShape(
        name=name,
        layers=_whole(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", heads),
        ffn_hidden=_whole(config, "intermediate_size"),
        vocab=_whole(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_biases=config["model_type"] == "qwen2",
    )
