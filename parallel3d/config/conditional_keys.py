"""Keys that are read only with some values of another key. To set one that is not read is an error,
so that no option is silently ignored."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from parallel3d.config.ranges import any_of
from parallel3d.config.recipe import OPTIMIZER_KEYS, Recipe
from parallel3d.config.schema import KEYS
from parallel3d.config.yaml_text import shown


class Condition(NamedTuple):
    """The key `other` must have one of `values` for a key to be read. Without `values`, it must not
    have its default; `example` is a value for it then."""

    other: str
    values: tuple[Any, ...] = ()
    example: object = 100


_EARLY_STOP = Condition("train.early_stop_patience", example=3)
_SAMPLING = Condition("train.sample_top_k", example=40)
_EVALUATION = Condition("train.eval_every")
_WSD = Condition("optimizer.schedule", ("wsd",))
_WARMUP = Condition("train.batch_warmup_start", example=8)
_LLAMA = Condition("model.architecture", ("llama",))
_LLAMA3 = Condition("model.rope_scaling.type", ("llama3",))
_YARN = Condition("model.rope_scaling.type", ("yarn",))
_LOCAL_SGD = Condition("local_sgd.sync_every", example=20)

_CONDITIONS: dict[str, Condition] = {
    "model.rope_theta": _LLAMA,
    "model.qkv_bias": _LLAMA,
    "model.qk_norm": _LLAMA,
    "model.window": _LLAMA,
    "model.rope_scaling": _LLAMA,
    "model.max_positions": Condition("model.architecture", ("gpt",)),
    "model.rope_scaling.low_freq_factor": _LLAMA3,
    "model.rope_scaling.high_freq_factor": _LLAMA3,
    "model.rope_scaling.beta_slow": _YARN,
    "model.rope_scaling.beta_fast": _YARN,
    "model.rope_scaling.attention_factor": _YARN,
    "train.batch_warmup_steps": _WARMUP,
    "train.batch_warmup_increment": _WARMUP,
    "train.nonfinite_in_a_row": Condition("train.on_nonfinite", ("skip",)),
    "train.spike_steps": Condition("train.on_spike", ("rollback",)),
    "train.spikes_in_a_row": Condition("train.on_spike", ("skip", "rollback")),
    "train.early_stop_patience": _EVALUATION,
    "train.early_stop_min_delta": _EARLY_STOP,
    "train.early_stop_set": _EARLY_STOP,
    "train.sample_top_p": _SAMPLING,
    "train.sample_temperature": _SAMPLING,
    "train.sample_seed": _SAMPLING,
    "optimizer.decay_start": _WSD,
    "optimizer.decay_shape": _WSD,
    "data.evaluation": _EVALUATION,
    "checkpoint.export": Condition("checkpoint.every"),
    "checkpoint.keep_best": _EVALUATION,
}
for _name in KEYS:
    _section, _, _key = _name.partition(".")
    if _section == "local_sgd" and _key != "sync_every":
        _CONDITIONS[_name] = _LOCAL_SGD
    _readers = tuple(name for name, keys in OPTIMIZER_KEYS.items() if _key in keys)
    if _section == "optimizer" and _readers:
        _CONDITIONS[_name] = Condition("optimizer.name", _readers)


def unread_errors(recipe: Recipe) -> Iterator[str]:
    """Yields a line for each key that is set and would not be read."""
    for name, condition in _CONDITIONS.items():
        if recipe.model.rope_scaling is None and name.startswith("model.rope_scaling."):
            continue
        if recipe.model.is_custom and condition.other == "model.architecture":
            continue  # `models.custom` sees what the class reads
        value, default = attrgetter(name)(recipe), KEYS[name].default if name in KEYS else None
        found = attrgetter(condition.other)(recipe)
        is_read = found in condition.values
        if not condition.values:
            is_read = found != KEYS[condition.other].default
        if value == default or is_read:
            continue
        wanted, example = condition.other, condition.example
        if condition.values:
            wanted, example = f"{wanted} = {any_of(condition.values)}", condition.values[0]
        said = f"{name} = {shown(value)}" if isinstance(value, str | int | float) else name
        yield (
            f"{said}: needs {wanted}, and that is {shown(found)}; try "
            f"{condition.other}={example}, or drop {name}"
        )
