"""Keys that are read only with some values of another key. To set one that is not read is an error,
so that no option is silently ignored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple

from parallel3d.config.ranges import any_of
from parallel3d.config.recipe import OPTIMIZER_KEYS, LocalSgdConfig, Recipe
from parallel3d.config.schema import KEYS
from parallel3d.config.yaml_text import shown


class Condition(NamedTuple):
    """The key `other` must have one of `values` for a key to be read. Without `values`, it must not
    have its default; `example` is a value for it then."""

    other: str
    values: tuple[Any, ...] = ()
    example: object = 100


_OF_LOCAL_SGD = [key.name for key in fields(LocalSgdConfig)]
_READ_IF = {
    Condition("model.architecture", ("llama",)): (
        "model.rope_theta model.qkv_bias model.qk_norm model.window model.rope_scaling"
    ),
    Condition("model.architecture", ("gpt",)): "model.max_positions",
    Condition("model.rope_scaling.type", ("llama3",)): (
        "model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor"
    ),
    Condition("model.rope_scaling.type", ("yarn",)): (
        "model.rope_scaling.beta_slow model.rope_scaling.beta_fast "
        "model.rope_scaling.attention_factor"
    ),
    Condition("train.precision", ("fp16",)): (
        "loss_scale.initial loss_scale.growth loss_scale.backoff loss_scale.interval"
    ),
    Condition("data.source", ("text", "tokens")): "data.path data.sources",
    Condition("train.batch_warmup_start", example=8): (
        "train.batch_warmup_steps train.batch_warmup_increment"
    ),
    Condition("train.on_nonfinite", ("skip",)): "train.nonfinite_in_a_row",
    Condition("train.on_spike", ("rollback",)): "train.spike_steps",
    Condition("train.on_spike", ("skip", "rollback")): "train.spikes_in_a_row",
    Condition("train.sample_top_k", example=40): "train.sample_temperature train.sample_seed",
    Condition("train.eval_every"): "data.evaluation checkpoint.keep_best",
    Condition("optimizer.schedule", ("wsd",)): "optimizer.decay_start optimizer.decay_shape",
    Condition("checkpoint.every"): "checkpoint.export",
    Condition("local_sgd.sync_every", example=20): " ".join(
        f"local_sgd.{key}" for key in _OF_LOCAL_SGD if key != "sync_every"
    ),
}
_CONDITIONS = {key: condition for condition, keys in _READ_IF.items() for key in keys.split()}
for _key in {key for keys in OPTIMIZER_KEYS.values() for key in keys}:
    _readers = tuple(name for name, keys in OPTIMIZER_KEYS.items() if _key in keys)
    _CONDITIONS[f"optimizer.{_key}"] = Condition("optimizer.name", _readers)


def unread_errors(recipe: Recipe) -> Iterator[str]:
    """Yields a line for each key that is set and would not be read."""
    for name, (other, values, example) in _CONDITIONS.items():
        if recipe.model.rope_scaling is None and name.startswith("model.rope_scaling."):
            continue
        if recipe.model.is_custom and other == "model.architecture":
            continue  # `models.custom` sees what the class reads
        value, found = attrgetter(name, other)(recipe)
        is_read = found in values if values else found != KEYS[other].default
        if value == KEYS[name].default or is_read:
            continue
        wanted = other
        if values:
            wanted, example = f"{other} = {any_of(values)}", values[0]
        said = f"{name} = {shown(value)}" if isinstance(value, str | int | float) else name
        yield (
            f"{said}: needs {wanted}, and that is {shown(found)}; try {other}={example}, or drop "
            f"{name}"
        )
