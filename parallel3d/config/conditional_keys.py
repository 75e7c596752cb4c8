"""Keys that are read only with some values of another key. To set one that is not read is an error,
so that no option is silently ignored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter

from parallel3d.config.ranges import any_of
from parallel3d.config.recipe import OPTIMIZER_KEYS, LocalSgdConfig, Recipe
from parallel3d.config.schema import KEYS
from parallel3d.config.yaml_text import shown

_OF_LOCAL_SGD = [key.name for key in fields(LocalSgdConfig)]
# A key and the values of which it must have one for the others to be read. If it is a number, it
# must not have its default, and the value is an example.
_READ_IF = {
    "model.architecture llama": (
        "model.rope_theta model.qkv_bias model.qk_norm model.window model.rope_scaling"
    ),
    "model.architecture gpt": "model.max_positions",
    "model.rope_scaling.type llama3": (
        "model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor"
    ),
    "model.rope_scaling.type yarn": (
        "model.rope_scaling.beta_slow model.rope_scaling.beta_fast "
        "model.rope_scaling.attention_factor"
    ),
    "train.precision fp16": (
        "loss_scale.initial loss_scale.growth loss_scale.backoff loss_scale.interval"
    ),
    "data.source text tokens": "data.path data.sources",
    "train.batch_warmup_start 8": "train.batch_warmup_steps train.batch_warmup_increment",
    "train.on_nonfinite skip": "train.nonfinite_in_a_row",
    "train.on_spike rollback": "train.spike_steps",
    "train.on_spike skip rollback": "train.spikes_in_a_row",
    "train.sample_top_k 40": "train.sample_temperature train.sample_seed",
    "train.eval_every 100": "data.evaluation checkpoint.keep_best",
    "optimizer.schedule wsd": "optimizer.decay_start optimizer.decay_shape",
    "checkpoint.every 100": "checkpoint.export",
    "local_sgd.sync_every 20": " ".join(
        f"local_sgd.{key}" for key in _OF_LOCAL_SGD if key != "sync_every"
    ),
}
_CONDITIONS = {key: condition for condition, keys in _READ_IF.items() for key in keys.split()}
for _key in {key for keys in OPTIMIZER_KEYS.values() for key in keys}:
    _readers = [name for name, keys in OPTIMIZER_KEYS.items() if _key in keys]
    _CONDITIONS[f"optimizer.{_key}"] = " ".join(["optimizer.name", *_readers])


def unread_errors(recipe: Recipe) -> Iterator[str]:
    """Yields a line for each key that is set and would not be read."""
    for name, condition in _CONDITIONS.items():
        other, *values = condition.split()
        if recipe.model.rope_scaling is None and name.startswith("model.rope_scaling."):
            continue
        if recipe.model.is_custom and other == "model.architecture":
            continue  # `models.custom` sees what the class reads
        value, found = attrgetter(name, other)(recipe)
        wanted, is_read = other, found != KEYS[other].default
        if isinstance(found, str):
            wanted, is_read = f"{other} = {any_of(values)}", found in values
        if value == KEYS[name].default or is_read:
            continue
        said = f"{name} = {shown(value)}" if isinstance(value, str | int | float) else name
        yield (
            f"{said}: needs {wanted}, and that is {shown(found)}; try {other}={values[0]}, or drop "
            f"{name}"
        )
