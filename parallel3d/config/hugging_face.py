"""Conversion between a recipe's model section and the `config.json` of Hugging Face transformers 4
and 5. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from parallel3d.config.experts import ExpertsConfig
from parallel3d.config.recipe import ModelConfig, Recipe, RopeScaling, TrainConfig
from parallel3d.config.rules_layout import SCALING_KEYS, expert_errors, model_errors
from parallel3d.config.schema import range_errors, read
from parallel3d.config.yaml_text import read_short, shown
from parallel3d.errors import ConfigError

_GPT2 = {  # key of `model:` in a recipe -> key of config.json
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
_QWEN_EXPERTS = {
    "experts.count": "num_experts",
    "experts.per_token": "num_experts_per_tok",
    "experts.hidden": "moe_intermediate_size",
    "experts.normalize": "norm_topk_prob",
}
# Keys of each family with experts. The name in a recipe -> key of config.json.
_MIXTURES = {
    "mixtral": {
        "experts.count": "num_local_experts",
        "experts.per_token": "num_experts_per_tok",
        "experts.hidden": "intermediate_size",
    },
    "qwen2_moe": _QWEN_EXPERTS | {"experts.shared_hidden": "shared_expert_intermediate_size"},
    "qwen3_moe": _QWEN_EXPERTS,
}
# Defaults of Hugging Face Transformers for missing keys.
_DEFAULTS = {
    "layer_norm_epsilon": 1e-5,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "rope_theta": 10_000.0,
    "norm_topk_prob": False,
}
# Class of a Hugging Face model, keyed by `model_type`.
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_LONGEST = "max_position_embeddings"
_ORIGINAL = f"original_{_LONGEST}"
# Keys that hold the number of experts in configs of Mixtral, Qwen and DeepSeek.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# Keys of config.json that hold each size, which differ between model families.
_SIZES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn_hidden": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
}
# Sizes that a config.json may omit.
_OPTIONAL = ("kv_heads", "head_dim", "ffn_hidden")
# Values of keys that the models here implement. Other values would change the computation.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "output_router_logits": (False,),
    "partial_rotary_factor": (1.0,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "router_jitter_noise": (0,),
}


def read_config_json(path: Path) -> dict[str, Any]:
    """Reads a `config.json`. Raises ConfigError if it is not a readable JSON object, or a length or
    window in it is not an integer of at least 0."""
    try:
        config = json.loads(read_short(path, "a config.json is a short JSON file"))
        if not isinstance(config, dict):
            raise ValueError("it must be an object with keys and values")
    except (OSError, ValueError, RecursionError) as problem:
        why = getattr(problem, "strerror", problem)
        raise ConfigError(
            f"{path}: cannot be read as JSON ({why}); try the path of a complete config.json"
        ) from problem
    for key in (_LONGEST, "sliding_window", "max_window_layers", "sliding_window_pattern"):
        if config.get(key) is not None:
            whole_number(config, key, path)
    return config


def config_path(model: ModelConfig) -> Path:
    """Returns the path of the config.json that `model.config` names, as a file or a folder."""
    path = Path(model.config or "")
    return path / "config.json" if path.is_dir() else path


def config_of(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of `model.config`, replaced by those in `model.options`.

    Raises ConfigError if the file cannot be read."""
    return {**read_config_json(config_path(model)), **model.options}


def sizes_of(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns the sizes of the `model` section for the config.json at `path`.

    Raises ConfigError if a size is missing."""
    sizes: dict[str, Any] = {}
    for ours, names in _SIZES.items():
        given = [name for name in names if config.get(name) is not None]
        if given:
            sizes[ours] = whole_number(config, given[0], path)
        elif ours not in _OPTIONAL:
            raise ConfigError(
                f"{path}: no key {' or '.join(names)}; write all keys of the model into the file, "
                "as save_pretrained() of its config does"
            )
    sizes.setdefault("ffn_hidden", 4 * sizes["hidden"])
    return sizes


def with_sizes(model: ModelConfig, **sizes: Any) -> ModelConfig:
    """Returns a Hugging Face model with different sizes, which are set in `model.options`.

    Lists with one entry per layer are truncated to the new number of layers."""
    config = config_of(model)
    options = dict(model.options)
    for ours, size in sizes.items():
        options |= {name: size for name in _SIZES[ours] if config.get(name) is not None}
    for key, value in config.items():
        if isinstance(value, list) and len(value) == model.layers:
            options[key] = value[: sizes["layers"]]
    return replace(model, options=options, **sizes)


def from_hugging_face(
    config: Mapping[str, Any], path: Path, *, others: Iterable[str] = ()
) -> ModelConfig:
    """Converts `config`, the content of the file at `path`, to a model section without a name.

    Raises ConfigError if the model family is not supported, or if sizes are missing, out of range
    or contradictory. `others` are further families that the caller supports, for the error."""
    kind = str(config.get("model_type", "(not given)"))
    experts = [f" with {key} = {shown(config[key])}" for key in _EXPERTS if config.get(key)]
    if kind not in CLASSES or (experts and kind not in _MIXTURES):
        known = ", ".join(dict.fromkeys((*CLASSES, *others)))
        raise ConfigError(
            f"{path}: model_type = {kind}{''.join(experts)}: must be one of {known}, and only "
            f"{', '.join(_MIXTURES)} have experts"
        )
    defaults = _DEFAULTS
    if kind == "mixtral":
        defaults = {**_DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    said = {**defaults, **{key: value for key, value in config.items() if value is not None}}
    is_gpt = kind == "gpt2"
    said.setdefault("tie_word_embeddings", is_gpt)
    said.setdefault("n_inner", 4 * said.get("n_embd", 0))
    if kind == "qwen3":
        said.setdefault("head_dim", 128)
    rope = _rope(said, path)
    keys = _GPT2 if is_gpt else _LLAMA
    tree: dict[str, Any] = {ours: said.get(theirs) for ours, theirs in keys.items()}
    if kind in _MIXTURES:
        tree["experts"] = _experts(said, path)
        keys = keys | _MIXTURES[kind]
    tree |= {
        "architecture": "gpt" if is_gpt else "llama",
        "qkv_bias": kind in ("qwen2", "qwen2_moe"),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
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


def _experts(said: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns the section `model.experts` for a config.json with its defaults filled in.

    Raises ConfigError unless all layers after the first ones have experts."""
    kind = said["model_type"]
    # transformers 5 calls the number of experts num_local_experts in all families.
    said = {"num_experts": said.get("num_local_experts"), **said}
    section = {ours.split(".")[1]: said.get(theirs) for ours, theirs in _MIXTURES[kind].items()}
    is_qwen2 = kind == "qwen2_moe"
    if said.get("qkv_bias", is_qwen2) != is_qwen2:
        raise ConfigError(
            f"{path}: qkv_bias = {shown(said['qkv_bias'])}: not supported in {kind}; try "
            f"{shown(is_qwen2)}"
        )
    return section | {"dense_layers": first_dense_layers(said, path), "shared_gate": is_qwen2}


def first_dense_layers(said: Mapping[str, Any], path: Path) -> int:
    """Returns the number of layers in `mlp_only_layers`, which have no experts.

    Raises ConfigError unless all layers after these first ones have experts."""
    dense = said.get("mlp_only_layers")
    count = len(dense) if isinstance(dense, list) else 0
    usual = {
        "mlp_only_layers": [*range(count)],
        "decoder_sparse_step": 1,
        "moe_layer_freq": 1,
    }
    for key, value in usual.items():
        if (said.get(key) or value) != value:
            raise ConfigError(
                f"{path}: {key} = {shown(said[key])}: all layers after the first ones must have "
                f"experts; try {shown(value)}"
            )
    return count


def ignored_keys(config: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yields a warning for each key of a config.json that changes the computation but has no
    equivalent in a recipe."""
    rope = _rope(config, path)
    kind = rope["rope_type"]
    known = ["rope_type", "rope_theta", _ORIGINAL, *RopeScaling.__dataclass_fields__]
    unknown = {f"rope_scaling.{key}": rope[key] for key in rope if key not in known}
    if kind not in ("default", *SCALING_KEYS):
        unknown = {"rope_scaling": kind}
    for key, ours in _FIXED.items():
        if config.get(key) not in (None, *ours):
            unknown[key] = config[key]
    if 0 < windowed_layers(config) < config.get("num_hidden_layers", 0):
        unknown["sliding_window of some layers only"] = config["sliding_window"]
    for key, value in unknown.items():
        yield f"{key} = {shown(value)} of config.json is ignored: a recipe has no key for it"


def check_numbers(model: ModelConfig, where: str) -> None:
    """Raises ConfigError for the first size of a model that is out of range."""
    for line in range_errors(model):
        raise ConfigError(f"{where}: {line}")


def check_model(model: ModelConfig, where: str) -> None:
    """Raises ConfigError if the sizes of a model are out of range or contradict each other."""
    check_numbers(model, where)
    train = TrainConfig(steps=1, global_batch_size=1, seq_len=1)
    recipe = Recipe(model=model, train=train)
    for line in (*model_errors(recipe), *expert_errors(recipe)):
        raise ConfigError(f"{where}: {line}")


def family_of(model: ModelConfig) -> str:
    """Returns the `model_type` of the Hugging Face family that can represent the model. Raises
    ConfigError if no family supports the value of a key.
    """
    is_gpt = model.architecture == "gpt"
    faults: dict[str, tuple[bool, object]] = {
        "architecture": (model.is_custom, "llama or gpt"),
        "qk_norm": (model.qk_norm and model.qkv_bias, "false with model.qkv_bias"),
        "kv_heads": (is_gpt and model.key_value_heads != model.heads, model.heads),
        "head_dim": (is_gpt and model.query_hidden != model.hidden, model.hidden // model.heads),
    }
    if model.experts is not None:
        faults |= _expert_faults(model, model.experts)
    for key, (is_wrong, only) in faults.items():
        if is_wrong:
            said = f"model.{key} = {shown(attrgetter(key)(model))}"
            raise ConfigError(
                f"{said}: no model of transformers supports it; only {only} can be exported"
            )
    if is_gpt:
        return "gpt2"
    suffix = "" if model.experts is None else "_moe"
    if model.qkv_bias:
        return f"qwen2{suffix}"
    if model.qk_norm:
        return f"qwen3{suffix}"
    if model.experts is not None:
        return "mixtral"
    return "llama" if model.window is None else "mistral"


def _expert_faults(model: ModelConfig, experts: ExpertsConfig) -> dict[str, tuple[bool, object]]:
    """Returns, for each key, whether no family supports its value, and the value that one does."""
    is_mixtral = not model.qkv_bias and not model.qk_norm
    has_shared = experts.shared_hidden > 0
    need = "true" if model.qkv_bias else "false"
    size = experts.hidden if model.qkv_bias else 0
    return {
        "experts.score": (experts.score != "softmax", "softmax"),
        "experts.scale": (experts.scale != 1, 1.0),
        "experts.bias_rate": (experts.bias_rate > 0, 0),
        "experts.shared_hidden": (
            has_shared != model.qkv_bias,
            f"{size} with model.qkv_bias = {need}",
        ),
        "experts.shared_gate": (experts.shared_gate != has_shared, need),
        "experts.normalize": (is_mixtral and not experts.normalize, "true without model.qk_norm"),
        "experts.dense_layers": (
            is_mixtral and experts.dense_layers > 0,
            "0 without model.qk_norm",
        ),
        "window": (has_shared and model.window is not None, "null with a shared expert"),
    }


def to_hugging_face(
    model: ModelConfig, *, seq_len: int, dtype: str, end_of_text: int | None
) -> dict[str, Any]:
    """Returns the config.json of a model.

    `dtype` is the torch name of the weight dtype, `end_of_text` the ID of the end-of-text token,
    and `seq_len` the training sequence length. `rope_theta` is written for transformers 4 and for
    5, because each assumes 10,000 if its own key is missing. Raises ConfigError if no model family
    supports the model."""
    family = family_of(model)
    keys = _GPT2 if family == "gpt2" else _LLAMA | _MIXTURES.get(family, {})
    config: dict[str, Any] = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        **{theirs: attrgetter(ours)(model) for ours, theirs in keys.items()},
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,  # Key that version 4 of Transformers reads.
        "use_cache": True,
    }
    if family == "gpt2":
        return config | {
            "activation_function": "gelu_new",
            "attn_pdrop": model.attention_dropout,
            "embd_pdrop": model.dropout,
            "resid_pdrop": model.dropout,
        }
    if model.experts is not None:
        config["mlp_only_layers"] = [*range(model.experts.dense_layers)]
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default"}
    longest = seq_len
    if scaling is not None:
        rope = {"rope_type": scaling.type, _ORIGINAL: scaling.original_max_positions}
        for key in ("factor", *SCALING_KEYS[scaling.type]):
            if (value := getattr(scaling, key)) is not None:
                rope[key] = value
        longest = round(scaling.original_max_positions * scaling.factor)
        # Some versions of transformers 4 compute the factor of yarn from the maximum positions and
        # ignore `factor`.
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
        # These two keys are only for Qwen.
        "use_sliding_window": model.window is not None,
        "max_window_layers": 0,
    }


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Returns the sliding attention window in tokens, or None for full attention. Qwen models can
    name a window without using it."""
    is_qwen = str(config.get("model_type")).startswith(("qwen2", "qwen3"))
    is_used = config.get("use_sliding_window", not is_qwen)
    window = config.get("sliding_window")
    return int(window) if window and is_used else None


def windowed_layers(config: Mapping[str, Any]) -> int:
    """Returns the number of layers with a sliding window, from `layer_types` or by the rule of the
    model family."""
    layers = config.get("num_hidden_layers")
    kind = str(config.get("model_type"))
    if sliding_window(config) is None or not isinstance(layers, int):
        return 0
    if types := config.get("layer_types"):
        return list(types).count("sliding_attention")
    if kind in ("qwen2", "qwen3"):  # Layers from index `max_window_layers` on have a window.
        return max(0, layers - int(config.get("max_window_layers", 28)))
    if kind == "qwen2_moe":  # Every other one of the first layers has a window.
        return (min(layers, int(config.get("max_window_layers", 28))) + 1) // 2
    if kind == "gemma2":  # Every other layer has a window, beginning with the first.
        return (layers + 1) // 2
    # All layers have a window, except every `sliding_window_pattern`-th.
    if kind.startswith("gemma3"):
        return layers - layers // int(config.get("sliding_window_pattern", 6))
    return layers


def whole_number(config: Mapping[str, Any], key: str, path: Path) -> int:
    """Returns the value of a key. Raises ConfigError if it is missing or not an integer of at least
    0."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 or value < 0:
        said = f"{path}: {key} = {shown(json.dumps(value))}"
        raise ConfigError(f"{said}: must be an integer of at least 0")
    return int(value)


def _rope(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns the settings of the rotary positions in the form that version 5 of Hugging Face
    Transformers uses.

    Version 5 writes them to `rope_parameters`, version 4 to `rope_theta` and `rope_scaling`. The
    original context length defaults to the model's maximum positions."""
    said = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(said, dict):
        words = f"rope_scaling = {shown(json.dumps(said))}"
        raise ConfigError(f"{path}: {words}: must be an object with keys and values, or null")
    given = {key: value for key, value in said.items() if value is not None}
    given.setdefault("rope_theta", config.get("rope_theta", _DEFAULTS["rope_theta"]))
    given.setdefault(_ORIGINAL, config.get(_LONGEST))
    given["rope_type"] = str(given.get("rope_type", given.get("type", "default")))
    return given
