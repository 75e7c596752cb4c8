"""From a YAML file to a checked recipe, and back.

`load_recipe` reads a file, lays `key=value` overrides over it, and checks everything before any
process starts. PyYAML reads values with their lines, OmegaConf merges the layers, and pydantic
checks types and ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields, make_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from parallel3d.config.import_class import BESIDE_RECIPES
from parallel3d.config.ranges import any_of
from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import check_rules, refuse
from parallel3d.config.schema import KEYS, SECTIONS, Key, keys_of, read
from parallel3d.config.yaml_text import (
    COMMAND_LINE,
    Setting,
    dump_yaml,
    is_text,
    parse_value,
    read_settings,
    shown,
)
from parallel3d.errors import ConfigError

_FP8 = (
    "float8 is not offered: only GPUs multiply in it (H100 and newer), and this version is tested "
    "on CPUs alone; try bf16"
)
_ADAM8 = (
    "8-bit states are not offered: their blocks depend on the layout, and another could not resume "
    "them; try adamw with optimizer.state_dtype=bf16"
)
# Values that people try and this version does not support -> the reason, and a value that works.
_UNSUPPORTED = {
    ("train.precision", "fp8"): _FP8,
    ("train.precision", "float8"): _FP8,
    ("optimizer.name", "adamw8bit"): _ADAM8,
    ("optimizer.name", "adam8bit"): _ADAM8,
    ("optimizer.name", "adamw_8bit"): _ADAM8,
    ("optimizer.name", "adafactor"): (
        "Adafactor was removed; try muon, or adamw with optimizer.state_dtype=bf16"
    ),
}
# Keys of earlier versions -> the default, which files that a run wrote still have, and the advice.
_REMOVED: dict[str, tuple[object, str]] = {
    "optimizer.stochastic_rounding": (False, "try train.precision=bf16, whose weights are float32"),
    "optimizer.beta2_decay": (None, "it was a key of Adafactor; try optimizer.name=adamw"),
    "optimizer.update_clip": (None, "it was a key of Adafactor; try optimizer.name=adamw"),
    "optimizer.step_in_backward": (
        False,
        "to hold fewer gradients try parallel.sharding=FULL_SHARD, or parallel.reduce=microbatch",
    ),
}
_MOST_UNKNOWN = 5  # a file with more unknown keys is of another kind

# A key as other programs call it, or an axis that this version lacks -> the hint.
_TWO_WAYS = (
    "the data ranks are parallel.dp_shard (sharded) x parallel.dp_replicate (copies); try "
    "parallel.dp_shard=2"
)
_ELSEWHERE = {
    "dp": _TWO_WAYS,
    "data_parallel_size": _TWO_WAYS,
    "cp": (
        "context parallelism is not there yet; try parallel.tp=2 with "
        "parallel.sequence_parallel=true"
    ),
    "ep": (
        "expert parallelism is not there yet, nor are models with experts; try parallel.dp_shard=2"
    ),
    "context_parallel": (
        "context parallelism is not there yet; try parallel.tp=2 with "
        "parallel.sequence_parallel=true"
    ),
    "offload": (
        "CPU offload is not offered: it is for GPUs, and this version is tested on CPUs alone; "
        "split more over parallel.dp_shard, or try parallel.recompute=full"
    ),
    "gradient_accumulation_steps": (
        "it follows from train.global_batch_size and parallel.microbatch_size; set those"
    ),
}
# A key of this version -> its names in other frameworks.
_OTHER_NAMES = {
    "parallel.tp": (
        "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size "
        "tp_size"
    ),
    "parallel.pp": (
        "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size"
    ),
    "parallel.microbatch_size": "micro_batch_size mbs local_batch_size per_device_train_batch_size",
    "parallel.recompute": (
        "activation_checkpoint activation_checkpointing gradient_checkpointing "
        "recompute_granularity"
    ),
    "train.global_batch_size": "batch_size train_batch_size gbs",
    "train.steps": "max_steps num_steps total_steps max_iters train_iters training_steps",
    "train.seq_len": (
        "seq_length sequence_length max_seq_len max_seq_length block_size context_length"
    ),
    "train.grad_clip": "clip_grad max_grad_norm max_norm gradient_clipping gradient_clip_val",
    "train.precision": "dtype mixed_precision mixed_precision_param",
    "train.eval_every": "eval_interval eval_steps eval_freq",
    "optimizer.lr": "learning_rate max_lr peak_lr",
    "optimizer.min_lr_ratio": "min_lr min_lr_factor",
    "optimizer.warmup_steps": "warmup num_warmup_steps lr_warmup_iters warmup_iters",
    "optimizer.decay_steps": "lr_decay_iters lr_decay_steps",
    "optimizer.schedule": "scheduler lr_scheduler lr_scheduler_type lr_decay_style",
    "model.layers": "num_layers n_layer n_layers num_hidden_layers",
    "model.hidden": "hidden_size d_model n_embd dim",
    "model.heads": "num_heads n_head n_heads num_attention_heads",
    "model.kv_heads": "n_kv_heads num_kv_heads num_key_value_heads num_query_groups",
    "model.ffn_hidden": "ffn_hidden_size intermediate_size d_ff",
    "model.vocab": "vocab_size",
    "data.path": "data_path dataset dataset_path",
    "checkpoint.every": "save_interval save_steps save_every",
    "checkpoint.keep": "save_total_limit keep_last",
    "checkpoint.keep_best": "save_top_k",
    "checkpoint.in_background": "async_save async_mode",
    "checkpoint.resume": "load resume_from_checkpoint",
    "checkpoint.start_from": "init_from pretrained_checkpoint initial_load_path finetune",
    "logging.every": "log_interval logging_steps log_freq log_every",
    "run_dir": "output_dir save_dir out_dir dump_folder",
}
_ELSEWHERE |= {
    other: f"did you mean {key}?"
    for key, others in _OTHER_NAMES.items()
    for other in others.split()
}
_OPTIONS = "model.options"  # its keys are those of the class that model.architecture names


def load_recipe(path: Path, overrides: Iterable[str] = (), *, cards: Mapping[str, Path]) -> Recipe:
    """Returns the validated recipe of a YAML file: defaults <- shape card <- the file <-
    `key=value` overrides.

    `cards` are the shape cards that `model.name` may pick. A card picked by an override wins over
    the numbers of the file, which gave them for another model. Raises `ConfigError` with a line for
    each problem. No module that the recipe names is imported."""
    said = [setting for setting in read_settings(path) if not _is_unused(setting)]
    unknown = [setting for setting in said if not _is_known(setting)]
    if len(unknown) > _MOST_UNKNOWN:
        some = ", ".join(shown(setting.key) for setting in unknown[:_MOST_UNKNOWN])
        raise ConfigError(
            f"{path}: {len(unknown)} keys are unknown, such as {some}; is it a recipe of this "
            "project?"
        )
    refuse([_unknown_key(setting) for setting in unknown])
    asked = [_parse_override(text) for text in overrides]
    settings: dict[str, Setting] = {}
    for setting in _with_card(said, asked, cards):
        if setting.key in SECTIONS:  # it is null, and drops what an earlier layer has set
            below = f"{setting.key}."
            settings = {key: each for key, each in settings.items() if not key.startswith(below)}
        settings[setting.key] = setting
    refuse([*_unreadable(settings.values())])
    recipe, errors = read(Recipe, _merge(settings.values()), settings)
    refuse(errors)
    if recipe.run_dir is None:
        recipe = replace(recipe, run_dir=f"runs/{path.stem}")
    check_rules(recipe)
    if recipe.model.is_custom or recipe.train.callbacks:
        BESIDE_RECIPES[:] = dict.fromkeys([str(path.parent.resolve()), *BESIDE_RECIPES])
    return recipe


def read_options(owner: type[Any], options: Mapping[str, Any]) -> object:
    """Returns `model.options` as the dataclass of your own class. Its fields say the names, types,
    ranges (`in_range`) and defaults. Raises `ConfigError` with a line for each option that does not
    fit it."""
    if options and not fields(owner):
        words = "the class has none; drop them, or give it a dataclass Options"
        raise ConfigError(f"{_OPTIONS} = {shown(dict(options))}: {words}")
    model = make_dataclass("model", [("options", owner)])
    recipe = make_dataclass("recipe", [("model", model)])
    recipe.__pydantic_config__ = Recipe.__pydantic_config__  # type: ignore[attr-defined]
    built, errors = read(recipe, {"model": {"options": dict(options)}})
    refuse(errors)
    return built.model.options


def to_yaml(recipe: Recipe) -> str:
    """Returns the whole recipe as YAML, which `load_recipe` reads back to an equal recipe."""
    return dump_yaml(asdict(recipe))


def _merge(settings: Iterable[Setting]) -> dict[str, Any]:
    """Returns settings as nested dicts; a later setting wins."""
    from omegaconf import OmegaConf  # --help needs none

    # pydantic refuses the objects that YAML makes of some texts, such as dates.
    tree = OmegaConf.create({"model": {}, "train": {}}, flags={"allow_objects": True})
    for setting in settings:
        if setting.key in SECTIONS and not SECTIONS[setting.key].is_optional:
            continue  # a section whose keys are all commented out
        OmegaConf.update(tree, setting.key, setting.value, merge=False, force_add=True)
    merged: dict[str, Any] = OmegaConf.to_container(tree)  # type: ignore[assignment]
    return merged


def _with_card(
    said: list[Setting], asked: list[Setting], cards: Mapping[str, Path]
) -> Iterator[Setting]:
    """Yields all settings; a later one wins. The shape card comes just before the layer that names
    it, and only that of the last such layer."""
    has_asked = any(setting.key == "model.name" for setting in asked)
    for layer, is_overruled in ((said, has_asked), (asked, False)):
        names = [each for each in layer if each.key == "model.name" and each.value is not None]
        if names and not is_overruled:
            name = str(names[-1].value)
            if name not in cards:
                near = get_close_matches(name, cards, 1) or sorted(cards, key=len)[:3]
                raise ConfigError(
                    f"{names[-1]}: no such shape card; try {any_of(near)}; parallel3d-plan models "
                    "lists all"
                )
            yield from read_settings(cards[name], under="model")
        yield from layer


def _parse_override(text: str) -> Setting:
    """Reads a `key=value` of the command line. Raises ConfigError for another form or an unknown
    key."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        words = "not an override; write key=value, such as optimizer.lr=1e-4"
        raise ConfigError(f"{shown(text)}: {words}")
    setting = Setting(key=name, value=value, origin=COMMAND_LINE)
    if name in SECTIONS and SECTIONS[name].is_optional and value == "null":
        return replace(setting, value=None)
    if _key(name) is None:
        raise ConfigError(_unknown_key(setting))
    # Text is taken as it stands, unless it is quoted or null: *.py means something else in YAML.
    is_text_key = name in KEYS and KEYS[name].hint is str
    if is_text_key and not value.startswith(("'", '"')) and value != "null":
        return setting
    return replace(setting, value=parse_value(value, name))


def _key(name: str) -> Key | None:
    """Returns a key of a recipe, or that of all `model.options`; None for another name."""
    option = name.removeprefix(f"{_OPTIONS}.")
    return KEYS.get(_OPTIONS if option != name and option.isidentifier() else name)


def _is_known(setting: Setting) -> bool:
    # A section whose keys are all commented out is read as a key without a value.
    is_empty_section = setting.key in SECTIONS and setting.value is None
    return is_empty_section or _key(setting.key) is not None


def _is_unused(setting: Setting) -> bool:
    """True for a key of an earlier version at the default that it had."""
    return setting.key in _REMOVED and setting.value == _REMOVED[setting.key][0]


def _unknown_key(setting: Setting) -> str:
    """Returns the error line of a key that is not in the schema, with the nearest key that is."""
    if setting.key in _REMOVED:
        return f"{setting}: removed; {_REMOVED[setting.key][1]}"
    if setting.key in SECTIONS:
        example = next(key for key in KEYS if key.startswith(setting.key + "."))
        return f"{setting}: a section, not a value; set its keys, such as {example}"
    said = f"{shown(setting.key)} ({setting.origin})"
    for name, key in KEYS.items():
        if key.entry and setting.key.startswith((f"{name}.", f"{name}[")):
            example = ", ".join(f"{each}: ..." for each in keys_of(key.entry))
            return f"{said}: a list is given as a whole; write {name}='[{{{example}}}, ...]'"
    return f"{said}: unknown key; {_advice(setting.key)}"


def _advice(key: str) -> str:
    """Returns what to write in the place of an unknown key."""
    section, _, leaf = key.rpartition(".")
    leaf = leaf.lower().replace("-", "_")
    if "offload" in leaf or leaf in _ELSEWHERE:
        return _ELSEWHERE["offload" if "offload" in leaf else leaf]
    by_leaf = {name.rpartition(".")[2]: name for name in KEYS}
    own = [name for name in KEYS if name.startswith(f"{section}.")] if section in SECTIONS else []
    near = (
        get_close_matches(key, own, 1, cutoff=0.8)
        or [by_leaf[name] for name in get_close_matches(leaf, by_leaf, 1, cutoff=0.7)]
        or get_close_matches(key, KEYS, 1, cutoff=0.6)
    )
    if near:
        return f"did you mean {near[0]}?"
    top = [f"{name}.*" for name in SECTIONS if "." not in name]
    return f"known are {', '.join(own or top)}"


def _unreadable(settings: Iterable[Setting]) -> Iterator[str]:
    """Yields a line for each value that is no value of any key."""
    for setting in settings:
        text = str(setting.value)
        if "${" in text:
            yield f"{setting}: a recipe does not read variables; write the value itself"
        elif not is_text(text):
            yield f"{setting}: must be text in UTF-8; try plain letters"
        elif (setting.key, text.lower()) in _UNSUPPORTED:
            yield f"{setting}: {_UNSUPPORTED[setting.key, text.lower()]}"
