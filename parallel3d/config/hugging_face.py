"""Models from and to the `config.json` of transformers, as version 4 has it and as version 5 does.
No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from parallel3d.config.ranges import any_of, divisors_near
from parallel3d.config.recipe import ModelConfig, RopeScaling
from parallel3d.config.rules_layout import SCALING_KEYS
from parallel3d.config.schema import range_errors
from parallel3d.config.yaml_text import read_short, shown
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
_COUNTS = (
    "max_position_embeddings",
    "sliding_window",
    "max_window_layers",
    "sliding_window_pattern",
)
_OPTIONAL = ("n_inner", "num_key_value_heads", "head_dim")
# by `model_type`: the keys, and the class of transformers
_FAMILIES = {
    "gpt2": (_GPT2, "GPT2LMHeadModel"),
    "llama": (_LLAMA, "LlamaForCausalLM"),
    "mistral": (_LLAMA, "MistralForCausalLM"),
    "qwen2": (_LLAMA, "Qwen2ForCausalLM"),
    "qwen3": (_LLAMA, "Qwen3ForCausalLM"),
}
_ORIGINAL = "original_max_position_embeddings"
# as Mixtral, Qwen and DeepSeek call them
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def read_config_json(path: Path) -> dict[str, Any]:
    """Returns the keys of a `config.json`. Raises ConfigError for a file that cannot be read as
    one."""
    try:
        config = json.loads(read_short(path, "a config.json is a short JSON file"))
    except OSError as problem:
        raise ConfigError(
            f"{path}: cannot be read ({problem.strerror}); try the path of a config.json"
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise ConfigError(
            f"{path}: cannot be read as JSON ({problem}); copy the whole file anew"
        ) from problem
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path}: must hold keys and values, as a transformers model's config.json does"
        )
    for key in _COUNTS:
        if config.get(key) is not None:
            whole_number(config, key, path)
    return config


def from_hugging_face(path: Path) -> ModelConfig:
    """Returns the model of a `config.json`, without a name. Raises ConfigError where it is of
    another family or its numbers do not agree."""
    return model_of(read_config_json(path), path)


def model_of(config: dict[str, Any], path: Path, *, others: Iterable[str] = ()) -> ModelConfig:
    """Returns the model of the keys of a `config.json`, as `from_hugging_face` does. `others`:
    families that the caller takes beside these, for an error to name."""
    kind = str(config.get("model_type", "(not given)"))
    experts = [key for key in _EXPERTS if config.get(key)]
    if kind not in _FAMILIES or experts:
        known = ", ".join((*_FAMILIES, *others))
        said = f"{path}: model_type = {kind}: "
        for key in experts:
            said += f"{key} = {shown(config[key])}, and this project trains dense models only: "
        raise ConfigError(f"{said}must be one of {known}, without experts")
    if kind == "qwen3":
        config.setdefault("head_dim", 128)  # transformers' own default
    numbers: dict[str, Any] = {}
    for ours, theirs in _FAMILIES[kind][0].items():
        is_open = theirs in _OPTIONAL and config.get(theirs) is None
        numbers[ours] = None if is_open else whole_number(config, theirs, path)
    is_gpt, rope = kind == "gpt2", _rope(config, path)
    if is_gpt:
        numbers["ffn_hidden"] = numbers["ffn_hidden"] or 4 * numbers["hidden"]
    elif (numbers["head_dim"] or 0) * numbers["heads"] == numbers["hidden"]:
        numbers["head_dim"] = None
    eps, usual_eps = ("layer_norm_epsilon", 1e-5) if is_gpt else ("rms_norm_eps", 1e-6)
    given = {eps: usual_eps, "initializer_range": 0.02, "rope_theta": 10_000.0, **config, **rope}
    model = ModelConfig(
        architecture="gpt" if is_gpt else "llama",
        tied_embeddings=bool(config.get("tie_word_embeddings", is_gpt)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        window=sliding_window(config) if windowed_layers(config) else None,
        norm_eps=_number(given, eps, path),
        init_std=_number(given, "initializer_range", path),
        rope_theta=_number(given, "rope_theta", path),
        rope_scaling=None if is_gpt else _rope_scaling(rope, path),
        **numbers,
    )
    check_model(model, str(path))
    return model


def left_out(config: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yields what a config.json says of the model's computation and a recipe cannot say: with it
    the same weights would compute something else here."""
    fixed = {"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
    fixed |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    for key, value in fixed.items():
        if config.get(key, value) not in (value, None):
            yield f"{key} of config.json is left out: a recipe has no key for it"
    is_gpt = config.get("model_type") == "gpt2"
    key, ours = "hidden_act", ("silu", "swish")
    if is_gpt:
        key, ours = "activation_function", ("gelu_new", "gelu_pytorch_tanh")
    if (activation := config.get(key, ours[0])) not in ours:
        yield f"{key} {activation} of config.json is taken as {ours[0]}, the only one here"
    rope = _rope(config, path)
    kind = _rope_type(rope)
    known = (
        "rope_type",
        "type",
        "rope_theta",
        _ORIGINAL,
        *(key.name for key in fields(RopeScaling)),
    )
    unknown = [key for key in rope if key not in known]
    if kind not in ("default", "llama3", "yarn"):
        yield (
            f"rope_scaling ({kind}) of config.json is left out: recipes have llama3 and yarn, and "
            "no other"
        )
    elif unknown:
        yield (
            f"rope_scaling's {', '.join(unknown)} of config.json is left out: recipes have no key "
            "for it"
        )
    if 0 < windowed_layers(config) < config.get("num_hidden_layers", 0):
        yield (
            "sliding_window of config.json is taken for all layers: a recipe's model.window is one "
            "for all"
        )


def notes_on(config: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yields what a config.json says and a plan does not count."""
    yield from left_out(config, path)
    yield from window_notes(config)


def window_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields how a plan counts a window."""
    if layers := windowed_layers(config):
        yield (
            f"sliding_window {sliding_window(config)} of config.json: the plan counts the time of "
            f"attention with it in {layers} of {config['num_hidden_layers']} layers, and memory as "
            "of whole attention"
        )


def check_numbers(model: ModelConfig, where: str) -> None:
    """Raises ConfigError for the first number of a model that is out of its range."""
    for line in range_errors(model):
        raise ConfigError(f"{where}: {line}")


def check_model(model: ModelConfig, where: str) -> None:
    """Raises ConfigError where the numbers of a model contradict each other."""
    check_numbers(model, where)
    parts = {"kv_heads": (model.key_value_heads, "heads", model.heads)}
    if model.head_dim is None:
        parts = {"heads": (model.heads, "hidden", model.hidden), **parts}
    for part, (number, of, whole) in parts.items():
        if whole % number:
            tries = any_of(divisors_near(whole, number))
            raise ConfigError(
                f"{where}: {part} = {number}: must divide {of} = {whole}; try {tries}"
            )


def family_of(model: ModelConfig) -> str:
    """Returns the `model_type` of the family of transformers that has a model. Raises ConfigError,
    which names the key, where none has it."""
    fault = None
    if model.is_custom:
        fault = (
            f"model.architecture = {model.architecture}: is a class of your own, which no family "
            "of transformers has; only llama and gpt can be exported"
        )
    elif model.qkv_bias and model.qk_norm:
        fault = (
            "model.qk_norm = true: Qwen 3 of transformers has it without model.qkv_bias, and Qwen "
            "2 that without this; only model.qkv_bias=false can be exported with it"
        )
    elif model.architecture == "gpt" and model.key_value_heads != model.heads:
        fault = (
            f"model.kv_heads = {model.kv_heads}: GPT-2 of transformers has as many as "
            f"model.heads = {model.heads}; only model.kv_heads={model.heads} can be exported"
        )
    elif model.architecture == "gpt" and model.query_hidden != model.hidden:
        fault = (
            f"model.head_dim = {model.head_dim}: GPT-2 of transformers has model.hidden / "
            f"model.heads; only model.head_dim={model.hidden // model.heads} can be exported"
        )
    if fault is not None:
        raise ConfigError(fault)
    if model.architecture == "gpt":
        return "gpt2"
    if model.qkv_bias or model.qk_norm:
        return "qwen2" if model.qkv_bias else "qwen3"
    return "llama" if model.window is None else "mistral"


def to_hugging_face(
    model: ModelConfig, *, seq_len: int, dtype: str, end_of_text: int | None
) -> dict[str, Any]:
    """Returns the config.json of a model that was trained on sequences of `seq_len`. `dtype` is
    torch's name of its weights' type, and `end_of_text` the id that ends a text. Of rotary
    positions it has the form of transformers 5 and that of 4, because older readers take a base of
    10,000 for one that they do not find. Raises ConfigError where no family has the model."""
    family = family_of(model)
    keys, class_name = _FAMILIES[family]
    numbers = {theirs: getattr(model, ours) for ours, theirs in keys.items()}
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": family,
        **numbers,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,  # the key of transformers 4
        "use_cache": True,
    }
    if family == "gpt2":
        return config | {
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu_new",
            "attn_pdrop": model.attention_dropout,
            **dict.fromkeys(("embd_pdrop", "resid_pdrop"), model.dropout),
        }
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    longest = seq_len
    if scaling is not None:
        rope |= {"rope_type": scaling.type, "factor": scaling.factor}
        rope[_ORIGINAL] = scaling.original_max_positions
        own = {key: getattr(scaling, key) for key in SCALING_KEYS[scaling.type]}
        rope |= {key: value for key, value in own.items() if value is not None}
        longest = round(scaling.original_max_positions * scaling.factor)
        # From a yarn's longest sequence, versions of transformers 4 compute its factor, whatever
        # else the config says.
        if scaling.type != "yarn":
            longest = max(seq_len, longest)
    config |= {
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": longest,
        "attention_dropout": model.attention_dropout,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "sliding_window": model.window,
    }
    if family.startswith("qwen"):
        config |= {"use_sliding_window": model.window is not None, "max_window_layers": 0}
    return config


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Keys that a query sees at most; None: all. Qwens name a window and use it only where they say
    so."""
    is_used = config.get("use_sliding_window", config.get("model_type") not in ("qwen2", "qwen3"))
    window = config.get("sliding_window")
    return int(window) if window and is_used else None


def windowed_layers(config: Mapping[str, Any]) -> int:
    """Returns in how many layers `sliding_window` holds: as `layer_types` lists them, or by the
    family's own rule."""
    layers, kind = config.get("num_hidden_layers"), str(config.get("model_type"))
    if sliding_window(config) is None or not isinstance(layers, int):
        return 0
    if types := config.get("layer_types"):
        return list(types).count("sliding_attention")
    if kind in ("qwen2", "qwen3"):  # the layers from this one on
        return max(0, layers - int(config.get("max_window_layers", 28)))
    if kind == "gemma2":  # every other layer, the first among them
        return (layers + 1) // 2
    if kind.startswith("gemma3"):  # all but each so-many-th
        return layers - layers // int(config.get("sliding_window_pattern", 6))
    return layers


def whole_number(config: Mapping[str, Any], key: str, path: Path) -> int:
    """Returns the number of a key. Raises ConfigError where it is missing or no whole number."""
    if key not in config:
        raise ConfigError(
            f"{path}: {key}: required and not given; set it to the model's whole number"
        )
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 or value < 0:
        said = f"{path}: {key} = {shown(json.dumps(value))}"
        raise ConfigError(f"{said}: must be a whole number from 0")
    return int(value)


def _rope(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns what is said of rotary positions: by transformers 5 in `rope_parameters`, by 4 in
    `rope_theta` and `rope_scaling`. A model that gives no context before has its own."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, dict):
        words = f"rope_scaling = {shown(json.dumps(said))}"
        raise ConfigError(f"{path}: {words}: must hold keys and values, or be null")
    given = {key: value for key, value in said.items() if value is not None}
    if "rope_theta" in config:
        given.setdefault("rope_theta", config["rope_theta"])
    if _rope_type(given) != "default" and "max_position_embeddings" in config:
        given.setdefault(_ORIGINAL, config["max_position_embeddings"])
    return given


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope_scaling(rope: Mapping[str, Any], path: Path) -> RopeScaling | None:
    """Returns the scaling of a config.json; None for a type that no recipe can say, which
    `notes_on` tells."""
    kind = _rope_type(rope)
    if kind not in SCALING_KEYS:
        return None
    keys = ("factor", *(key for key in SCALING_KEYS[kind] if key in rope))
    numbers: dict[str, Any] = {key: _number(rope, key, path) for key in keys}
    numbers["original_max_positions"] = int(_number(rope, _ORIGINAL, path))
    return RopeScaling(type="llama3" if kind == "llama3" else "yarn", **numbers)


def _number(config: Mapping[str, Any], key: str, path: Path) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path}: {key} = {shown(json.dumps(value))}: must be a number")
    return float(value)
