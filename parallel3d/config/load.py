"""From a YAML file to a checked recipe, and back.

`load_recipe` reads a file, lays `key=value` overrides over it, and checks the whole before any process starts. The keys
are read off the recipe's dataclasses. This is the one file that imports OmegaConf, which checks each value against its
field's type and builds the recipe. Nothing here imports torch.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from parallel3d.config.named_class import BESIDE_RECIPES
from parallel3d.config.ranges import any_of, is_within
from parallel3d.config.recipe import Recipe
from parallel3d.config.rules import refuse, validate
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

# Values that people try and this version does not support -> the reason, and a value that would do.
_UNSUPPORTED = {
    ("train.precision", "fp8"): (
        "float8 is not offered: only GPUs multiply in it (H100 and newer), and this version is tested on CPUs alone; "
        "try bf16"
    ),
    ("optimizer.name", "adamw8bit"): (
        "8-bit states are not offered: their blocks depend on the layout, and another could not resume them; "
        "try adamw with optimizer.state_dtype=bf16, or adafactor"
    ),
}
_MOST_UNKNOWN = 5  # unknown keys of a file that are each told with the nearest that is known
_ALIASES = {"float8": "fp8", "adam8bit": "adamw8bit", "adamw_8bit": "adamw8bit"}

# A key as other programs call it, or an axis that this version lacks -> the hint.
_TWO_WAYS = "the data ranks are parallel.dp_shard (sharded) x parallel.dp_replicate (copies); try parallel.dp_shard=2"
_ELSEWHERE = {
    "dp": _TWO_WAYS,
    "data_parallel_size": _TWO_WAYS,
    "cp": "context parallelism is not there yet; try parallel.tp=2 with parallel.sequence_parallel=true",
    "ep": "expert parallelism is not there yet, nor are models with experts; try parallel.dp_shard=2",
    "context_parallel": "context parallelism is not there yet; try parallel.tp=2 with parallel.sequence_parallel=true",
    "offload": "CPU offload is not offered: it is for GPUs, and this version is tested on CPUs alone; split more over "
    "parallel.dp_shard, or try parallel.recompute=full",
    "gradient_accumulation_steps": "it follows from train.global_batch_size and parallel.microbatch_size; set those",
}
# A key of this version -> what other programs call it.
_OTHER_NAMES = {
    "parallel.tp": "tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size",
    "parallel.pp": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size",
    "parallel.microbatch_size": "micro_batch_size mbs local_batch_size per_device_train_batch_size",
    "parallel.recompute": "activation_checkpoint activation_checkpointing gradient_checkpointing recompute_granularity",
    "train.global_batch_size": "batch_size train_batch_size gbs",
    "train.steps": "max_steps num_steps total_steps max_iters train_iters training_steps",
    "train.seq_len": "seq_length sequence_length max_seq_len max_seq_length block_size context_length",
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
_ELSEWHERE |= {other: f"did you mean {key}?" for key, others in _OTHER_NAMES.items() for other in others.split()}
_WORDS: dict[Any, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"},
    **{Any: "a value", dict[str, Any]: "keys with values below it"},
}


@dataclass(frozen=True)
class Key:
    """A key of a recipe: the type of its value, and its default (MISSING: it is required)."""

    hint: Any
    default: Any

    @property
    def choices(self) -> tuple[Any, ...]:
        """The alternatives of the type: (int, NoneType) for `int | None`, and the type itself for any other."""
        return get_args(self.hint) if get_origin(self.hint) in (Union, types.UnionType) else (self.hint,)

    @property
    def section(self) -> Any:
        """The dataclass of the value where that is a section, else None."""
        return next((choice for choice in self.choices if is_dataclass(choice)), None)

    @property
    def entry(self) -> Any:
        """The dataclass of the entries where the value is a list of entries, else None."""
        kinds = [get_args(choice)[0] for choice in self.choices if get_origin(choice) is tuple]
        return next((kind for kind in kinds if is_dataclass(kind)), None)

    @property
    def wanted(self) -> str:
        """The type in words, with a value that would do."""
        words = []
        for choice in self.choices:
            if get_origin(choice) is Literal:
                words.append("one of " + ", ".join(get_args(choice)))
            elif self.entry is not None:
                words.append(f"a list of entries {{{', '.join(name.name for name in fields(self.entry))}}}")
            elif get_origin(choice) is tuple:
                of, is_open = get_args(choice)[0], ... in get_args(choice)
                names = get_args(of) if get_origin(of) is Literal else ()
                plain = {int: "whole numbers", str: "text"}.get(of, "numbers")
                many = f"some of {', '.join(names)}, such as [{names[0]}]" if names else plain
                words.append(f"a list of {many if is_open else f'{len(get_args(choice))} numbers'}")
            else:
                words.append(_WORDS[choice])
        is_listed = any(get_origin(choice) is Literal or choice is bool for choice in self.choices)
        example = "" if is_listed or self.default in (MISSING, None, ()) else f", such as {shown(self.default)}"
        return " or ".join(words) + example

    def yaml_trap(self, value: object) -> str:
        """Returns the reason why YAML read a value other than its writer meant; empty where there is no such reason."""
        if isinstance(value, bool) and self.hint is not bool:
            words = "yes or on as true" if value else "no or off as false"
            return f" (YAML reads a bare {words}: quote it if you mean the word)"
        if isinstance(value, float) and value.is_integer() and self.hint is int:
            return f"; write {int(value)}"
        if not isinstance(value, str | list | None) and str in self.choices:
            return f"; quote it: '{shown(value)}'"
        return ""


def _keys_of(owner: Any) -> dict[str, Key]:
    hints = get_type_hints(owner)
    return {leaf.name: Key(hints[leaf.name], leaf.default) for leaf in fields(owner)}


def _schema(owner: Any, under: str = "") -> Iterator[tuple[str, Key]]:
    """Yields the dotted name of each key of a dataclass and of the sections in it, and the key."""
    for name, key in _keys_of(owner).items():
        yield f"{under}{name}", key
        if key.section is not None:
            yield from _schema(key.section, f"{under}{name}.")


SECTIONS: dict[str, Key] = {name: key for name, key in _schema(Recipe) if key.section is not None}
KEYS: dict[str, Key] = {name: key for name, key in _schema(Recipe) if key.section is None}


_OPTIONS, _OPTION = "model.options.", Key(Any, MISSING)  # free keys, which the class of model.architecture knows


def load_recipe(path: Path, overrides: Iterable[str] = (), *, cards: Mapping[str, Path]) -> Recipe:
    """Returns the validated recipe of a YAML file: defaults <- shape card <- the file <- `key=value` overrides.

    `cards` are the shape cards that `model.name` may pick. A card picked by an override wins over the file's own
    numbers, since the file gave them for another model. Raises `ConfigError` with a line for each problem. No module
    that the recipe names is imported."""
    said = read_settings(path)
    # A section whose keys are all commented out is read as a key without a value.
    unknown = [each for each in said if not _key(each.key) and not (each.key in SECTIONS and each.value is None)]
    if len(unknown) > _MOST_UNKNOWN:  # that is another kind of file
        some = ", ".join(each.key for each in unknown[:_MOST_UNKNOWN])
        raise ConfigError(f"{path}: {len(unknown)} keys are unknown, such as {some}; is it a recipe of this project?")
    refuse([_unknown_key(setting) for setting in unknown])
    asked = [_parse_override(text) for text in overrides]
    settings: dict[str, Setting] = {}
    for setting in _with_card(said, asked, cards):
        if _key(setting.key) is not None:
            settings[setting.key] = setting
        else:  # a section that is null, such as the card's model.rope_scaling
            settings = {key: each for key, each in settings.items() if not key.startswith(f"{setting.key}.")}

    config = OmegaConf.structured(Recipe)
    assert isinstance(config, DictConfig)
    OmegaConf.set_readonly(config, None)  # the dataclasses are frozen
    sections = [
        section
        for section, key in SECTIONS.items()
        if key.default is not None or any(name.startswith(f"{section}.") for name in settings)
    ]
    for section in sections:
        OmegaConf.update(config, section, {})
        OmegaConf.set_readonly(OmegaConf.select(config, section), None)
    refuse(
        [
            error
            for setting in settings.values()
            if (key := _key(setting.key)) is not None
            for error in _assign(config, setting.key, key, setting)
        ]
    )
    errors = []
    for section in sections:
        values = OmegaConf.select(config, section)
        missing = [f"{section}.{name}" for name in values if OmegaConf.is_missing(values, name)]
        if missing:
            some = " or ".join(sorted(cards, key=len)[:3])
            card = f", or pick a shape card, such as model.name = {some}" if section == "model" else ""
            them = "them" if missing[1:] else "it"
            errors.append(f"{', '.join(missing)}: required and not given; set {them}{card}")
    refuse(errors)

    recipe: Recipe = OmegaConf.to_object(config)  # type: ignore[assignment]
    if recipe.run_dir is None:
        recipe = replace(recipe, run_dir=f"runs/{path.stem}")
    validate(recipe)
    folder = str(path.parent.resolve())
    if recipe.model.is_custom or recipe.train.callbacks:
        BESIDE_RECIPES[:] = dict.fromkeys([folder, *BESIDE_RECIPES])
    return recipe


def read_options(owner: type[Any], options: Mapping[str, Any]) -> object:
    """Returns `model.options` as the dataclass of a class of the user's, whose fields say the names, types, ranges
    (`ranges.within`) and defaults. Raises `ConfigError` with a line for each option that does not fit it."""
    config, said = OmegaConf.structured(owner), Setting(key="model.options", value=dict(options), origin="recipe")
    if options and not fields(owner):
        raise ConfigError(f"{said}: the class has none; drop them, or give it a dataclass Options")
    refuse([*_fill(config, _keys_of(owner), said)])
    built: object = OmegaConf.to_object(config)
    outside = [
        f"model.options.{leaf.name} = {shown(value)}: must be {words}; try {leaf.metadata['example']}"
        for leaf in fields(owner)
        if (words := leaf.metadata.get("range")) and (value := getattr(built, leaf.name)) is not None
        if not is_within(words, value)
    ]
    refuse(outside)
    return built


def to_yaml(recipe: Recipe) -> str:
    """Returns the whole recipe as YAML, which `load_recipe` reads back to an equal recipe."""
    return dump_yaml(asdict(recipe))


def _with_card(said: list[Setting], asked: list[Setting], cards: Mapping[str, Path]) -> Iterator[Setting]:
    """Yields all settings, of which a later one wins: the shape card comes just before the layer that names it."""
    for layer, overruled in ((said, asked), (asked, [])):
        named = next((s for s in reversed(layer) if s.key == "model.name" and s.value is not None), None)
        if named is not None and not any(setting.key == "model.name" for setting in overruled):
            card = cards.get(str(named.value))
            if card is None:
                near = get_close_matches(str(named.value), cards, 1) or sorted(cards, key=len)[:3]
                raise ConfigError(f"{named}: no such shape card; try {any_of(near)}; parallel3d-plan models lists all")
            yield from read_settings(card, under="model")
        yield from layer


def _parse_override(text: str) -> Setting:
    """Reads a `key=value` of the command line. Raises ConfigError for another form, or a key not in the schema."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f"{shown(text)}: not an override; write key=value, such as optimizer.lr=1e-4")
    if name in SECTIONS and SECTIONS[name].default is None and value == "null":
        return Setting(key=name, value=None, origin=COMMAND_LINE)
    key = _key(name)
    if key is None:
        raise ConfigError(_unknown_key(Setting(key=name, value=value, origin=COMMAND_LINE)))
    # Text is taken as it stands (a pattern such as *.py means something else in YAML), unless it is quoted or null.
    is_verbatim = str in key.choices and not value.startswith(("'", '"')) and value != "null"
    return Setting(key=name, value=value if is_verbatim else parse_value(value, name), origin=COMMAND_LINE)


def _key(name: str) -> Key | None:
    """Returns a key of the schema, or any key of `model.options`; None for another name."""
    is_option = name.startswith(_OPTIONS) and name.removeprefix(_OPTIONS).isidentifier()
    return _OPTION if is_option else KEYS.get(name)


def _unknown_key(setting: Setting) -> str:
    """Returns the error line of a key that is not in the schema, with the nearest key that is."""
    if setting.key in SECTIONS:
        example = next(key for key in KEYS if key.startswith(setting.key + "."))
        return f"{setting}: a section, not a value; set its keys, such as {example}"
    whole = next(
        (name for name, key in KEYS.items() if key.entry and setting.key.startswith((f"{name}.", f"{name}["))), None
    )
    if whole is not None:
        names = [name for name, key in _keys_of(KEYS[whole].entry).items() if key.default is MISSING]
        example = ", ".join(f"{name}: ..." for name in names)
        return f"{setting.key} ({setting.origin}): a list is given as a whole; write {whole}='[{{{example}}}, ...]'"
    section, _, leaf = setting.key.rpartition(".")
    by_leaf = {name.rpartition(".")[2]: name for name in KEYS}
    own = [name for name in KEYS if name.startswith(section + ".")] if section in SECTIONS else []
    near = (
        get_close_matches(setting.key, own, 1, cutoff=0.8)
        or [by_leaf[name] for name in get_close_matches(leaf, by_leaf, 1, cutoff=0.7)]
        or get_close_matches(setting.key, KEYS, 1, cutoff=0.6)
    )
    known = own or [*(f"{name}.*" for name in SECTIONS if "." not in name), *(name for name in KEYS if "." not in name)]
    advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    foreign = leaf.lower().replace("-", "_")
    advice = _ELSEWHERE.get("offload" if "offload" in leaf else foreign, advice)
    return f"{setting.key} ({setting.origin}): unknown key; {advice}"


def _assign(config: DictConfig, name: str, key: Key, setting: Setting) -> Iterator[str]:
    """Sets the key at `name` of a part of the recipe under construction. Yields the error lines of a value that its
    type forbids."""
    value = setting.value
    if isinstance(value, str) and ("${" in value or value == "???"):
        yield f"{setting}: a recipe does not read variables; write the value itself"
        return
    numbers = value if isinstance(value, list) else [value]
    if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
        yield f"{setting}: must be {key.wanted}, and finite"
        return
    if not all(is_text(each) for each in numbers if isinstance(each, str)):
        yield f"{setting}: must be text in UTF-8; try plain letters"
        return
    # OmegaConf would convert anything to text, and a number to true or false: their writer has mistaken the key.
    is_mistaken = (str in key.choices and not isinstance(value, str | None)) or (
        bool in key.choices and not isinstance(value, key.choices)
    )
    if key.entry is not None and isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        entries = [OmegaConf.structured(key.entry) for _ in value]
        errors = [
            error
            for index, (part, said) in enumerate(zip(entries, value, strict=True))
            for error in _fill(part, _keys_of(key.entry), replace(setting, key=f"{setting.key}[{index}]", value=said))
        ]
        if errors:
            yield from errors
            return
        value = entries
    try:
        if not is_mistaken:
            OmegaConf.update(config, name, value, merge=False)
            return
    except (OmegaConfBaseException, ValueError, TypeError, OverflowError, AttributeError):
        pass  # AttributeError: omegaconf 2.4's own, in making the message of a ValidationError
    word = str(value).lower()
    hint = _UNSUPPORTED.get((setting.key, _ALIASES.get(word, word)))
    yield f"{setting}: {hint or f'must be {key.wanted}{key.yaml_trap(value)}'}"


def _fill(entry: DictConfig, keys: Mapping[str, Key], setting: Setting) -> Iterator[str]:
    """Sets all keys of an entry of a list. Yields a line for each that is unknown, missing or mistyped."""
    assert isinstance(setting.value, dict)
    OmegaConf.set_readonly(entry, None)  # its dataclass is frozen
    for name, value in setting.value.items():
        own = replace(setting, key=f"{setting.key}.{name}", value=value)
        if name in keys:
            yield from _assign(entry, name, keys[name], own)
        else:
            near = get_close_matches(name, keys, 1)
            yield f"{own}: unknown key; {f'did you mean {near[0]}?' if near else 'known are ' + ', '.join(keys)}"
    for name in keys:
        if name not in setting.value and OmegaConf.is_missing(entry, name):
            yield f"{setting.key}.{name} ({setting.origin}): required and not given; set it"
