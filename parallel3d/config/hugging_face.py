"""Models from and to the `config.json` of transformers, as version 4 has it and as version 5 does.
No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel3d.config.recipe import ModelConfig, Recipe, RopeScaling, TrainConfig
from parallel3d.config.rules_layout import SCALING_KEYS, model_errors
from parallel3d.config.schema import range_errors, read
from parallel3d.config.yaml_text import read_short, shown
from parallel3d.errors import ConfigError

_GPT2 = {  # the keys of a config.json, by those of a recipe's `model:`
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "ffn_hidden": "n_inner",
    "vocab": "vocab_size",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
    "tied_embeddings": "tie_word_embeddings",
}
_LLAMA = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_hidden": "intermediate_size",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "tied_embeddings": "tie_word_embeddings",
}
# What transformers takes if a file leaves a key out.
_DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10_000.0,
}
# `model_type` -> the class of transformers
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LONGEST = "max_position_embeddings"
_ORIGINAL = f"original_{_LONGEST}"
# as Mixtral, Qwen and DeepSeek call them
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# The values of a key with which a model computes what it computes here.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
}


def read_config_json(path: Path) -> dict[str, Any]:
    """Returns the keys of a `config.json`. Raises ConfigError for a file that cannot be read as
    one."""
    try:
        config = json.loads(read_short(path, "a config.json is a short JSON file"))
        if not isinstance(config, dict):
            raise ValueError("it must hold keys and values")
    except (OSError, ValueError, RecursionError) as problem:
        why = getattr(problem, "strerror", problem)
        raise ConfigError(
            f"{path}: cannot be read as JSON ({why}); try the path of a whole config.json"
        ) from problem
    for key in (_LONGEST, "sliding_window", "max_window_layers", "sliding_window_pattern"):
        if config.get(key) is not None:
            whole_number(config, key, path)
    return config


def from_hugging_face(
    config: Mapping[str, Any], path: Path, *, others: Iterable[str] = ()
) -> ModelConfig:
    """Returns the model of the keys of the `config.json` at `path`, without a name. Raises
    ConfigError if it is of another family or its numbers do not agree. `others`: families that the
    caller takes in addition to these, for an error to name."""
    kind = str(config.get("model_type", "(not given)"))
    experts = [f" with {key} = {shown(config[key])}" for key in _EXPERTS if config.get(key)]
    if kind not in _CLASSES or experts:
        known = ", ".join((*_CLASSES, *others))
        raise ConfigError(
            f"{path}: model_type = {kind}{''.join(experts)}: must be one of {known}, without "
            "experts"
        )
    said = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    is_gpt = kind == "gpt2"
    said.setdefault("tie_word_embeddings", is_gpt)
    said.setdefault("n_inner", 4 * said.get("n_embd", 0))
    if kind == "qwen3":
        said.setdefault("head_dim", 128)
    rope = _rope(said, path)
    keys = _GPT2 if is_gpt else _LLAMA
    tree = {ours: said.get(theirs) for ours, theirs in keys.items()}
    tree |= {
        "architecture": "gpt" if is_gpt else "llama",
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "window": sliding_window(config) if windowed_layers(config) else None,
        "rope_theta": rope["rope_theta"],
    }
    scaling = rope["rope_type"]
    if scaling in SCALING_KEYS and not is_gpt:
        scaled = {key: rope[key] for key in ("factor", *SCALING_KEYS[scaling]) if key in rope}
        original = rope.get(_ORIGINAL)
        tree["rope_scaling"] = {"type": scaling, "original_max_positions": original, **scaled}
    model, errors = read(ModelConfig, tree)
    if errors:
        ours, _, fault = errors[0].partition(" = ")
        raise ConfigError(f"{path}: {keys.get(ours, ours)} = {fault}")
    check_model(model, str(path))
    return replace(model, head_dim=None) if model.query_hidden == model.hidden else model


def left_out(config: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yields what a config.json says of the model's computation and a recipe cannot say: with it
    the same weights would compute something else here."""
    rope = _rope(config, path)
    kind = rope["rope_type"]
    known = ["rope_type", "rope_theta", _ORIGINAL, *RopeScaling.__dataclass_fields__]
    unknown = {f"rope_scaling's {key}": rope[key] for key in rope if key not in known}
    if kind not in ("default", *SCALING_KEYS):
        unknown = {"rope_scaling": kind}
    for key, ours in _FIXED.items():
        if config.get(key) not in (None, *ours):
            unknown[key] = config[key]
    if 0 < windowed_layers(config) < config.get("num_hidden_layers", 0):
        unknown["sliding_window of some layers only"] = config["sliding_window"]
    for key, value in unknown.items():
        yield f"{key} = {shown(value)} of config.json is left out: a recipe has no key for it"


def check_numbers(model: ModelConfig, where: str) -> None:
    """Raises ConfigError for the first number of a model that is out of its range."""
    for line in range_errors(model):
        raise ConfigError(f"{where}: {line}")


def check_model(model: ModelConfig, where: str) -> None:
    """Raises ConfigError if the numbers of a model are out of range or contradict each other."""
    check_numbers(model, where)
    train = TrainConfig(steps=1, global_batch_size=1, seq_len=1)
    for line in model_errors(Recipe(model=model, train=train)):
        raise ConfigError(f"{where}: {line}")


def family_of(model: ModelConfig) -> str:
    """Returns the `model_type` of the family of transformers that has a model. Raises ConfigError,
    which names the key, if none has it."""
    is_gpt = model.architecture == "gpt"
    faults = {
        "architecture": (model.is_custom, "llama or gpt"),
        "qk_norm": (model.qk_norm and model.qkv_bias, "false beside model.qkv_bias"),
        "kv_heads": (is_gpt and model.key_value_heads != model.heads, model.heads),
        "head_dim": (is_gpt and model.query_hidden != model.hidden, model.hidden // model.heads),
    }
    for key, (is_wrong, only) in faults.items():
        if is_wrong:
            said = f"model.{key} = {shown(getattr(model, key))}"
            raise ConfigError(
                f"{said}: no family of transformers has it; only {only} can be exported"
            )
    if is_gpt:
        return "gpt2"
    if model.qkv_bias:
        return "qwen2"
    if model.qk_norm:
        return "qwen3"
    return "llama" if model.window is None else "mistral"


def to_hugging_face(
    model: ModelConfig, *, seq_len: int, dtype: str, end_of_text: int | None
) -> dict[str, Any]:
    """Returns the config.json of a model that was trained on sequences of `seq_len`. `dtype` is
    torch's name of its weights' type, and `end_of_text` the id that ends a text. Of rotary
    positions it has the form of transformers 5 and that of 4, because older readers take a base of
    10,000 for one that they do not find. Raises ConfigError if no family has the model."""
    family = family_of(model)
    keys = _GPT2 if family == "gpt2" else _LLAMA
    config: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        **{theirs: getattr(model, ours) for ours, theirs in keys.items()},
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,  # the key of transformers 4
        "use_cache": True,
    }
    if family == "gpt2":
        return config | {
            "activation_function": "gelu_new",
            "attn_pdrop": model.attention_dropout,
            "embd_pdrop": model.dropout,
            "resid_pdrop": model.dropout,
        }
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    longest = seq_len
    if scaling is not None:
        rope = {"rope_type": scaling.type, _ORIGINAL: scaling.original_max_positions}
        for key in ("factor", *SCALING_KEYS[scaling.type]):
            if (value := getattr(scaling, key)) is not None:
                rope[key] = value
        longest = round(scaling.original_max_positions * scaling.factor)
        # From a yarn's longest sequence, versions of transformers 4 compute its factor, whatever
        # else the config says.
        if scaling.type != "yarn":
            longest = max(seq_len, longest)
    return config | {
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        _LONGEST: longest,
        "attention_dropout": model.attention_dropout,
        "rope_parameters": {**rope, "rope_theta": model.rope_theta},
        "rope_theta": model.rope_theta,
        "rope_scaling": None if scaling is None else rope,
        "sliding_window": model.window,
        # these two are Qwen's
        "use_sliding_window": model.window is not None,
        "max_window_layers": 0,
    }


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Keys that a query sees at most; None: all. Qwens name a window and use it only where they say
    so."""
    is_used = config.get("use_sliding_window", config.get("model_type") not in ("qwen2", "qwen3"))
    window = config.get("sliding_window")
    return int(window) if window and is_used else None


def windowed_layers(config: Mapping[str, Any]) -> int:
    """Returns in how many layers `sliding_window` holds: as `layer_types` lists them, or by the
    family's own rule."""
    layers = config.get("num_hidden_layers")
    kind = str(config.get("model_type"))
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
    """Returns the number of a key. Raises ConfigError if it is missing or no whole number."""
    value = config.get(key)
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
    given.setdefault("rope_theta", config.get("rope_theta", _DEFAULTS["rope_theta"]))
    given.setdefault(_ORIGINAL, config.get(_LONGEST))
    given["rope_type"] = str(given.get("rope_type", given.get("type", "default")))
    return given
