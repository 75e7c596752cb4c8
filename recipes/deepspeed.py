"""`parallel3d-train --from-deepspeed ds.json`: the keys of a recipe that a DeepSpeed configuration
stands for. `deepspeed.toml` says what becomes of each of its keys."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel3d.config.hugging_face import read_config_json
from parallel3d.config.yaml_text import dump_yaml, shown

_OFF = (False, None, 0, "none", "null", "")
_AUTO = "auto"  # transformers' Trainer fills it in
_BATCH, _MICROBATCH = "train_batch_size", "train_micro_batch_size_per_gpu"
_NEEDED = ("model.name", "train.seq_len", "train.steps", "train.global_batch_size")


@dataclass
class Translation:
    """The keys of a recipe with their values, and a line on each key of DeepSpeed."""

    keys: dict[str, Any] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)  # keys whose value must still be given
    refused: list[str] = field(default_factory=list)  # the training would be another

    def to_yaml(self) -> str:
        """Returns the keys as the YAML of a recipe, below comments on what is still to be given."""
        tree: dict[str, Any] = {}
        for name, value in self.keys.items():
            section, _, key = name.partition(".")
            tree.setdefault(section, {})[key] = value
        return "".join(f"# to be given: {line}\n" for line in self.open) + dump_yaml(tree)

    def lines(self) -> Iterator[str]:
        """Yields the lists for people, each under its heading."""
        headings = {
            "taken": self.taken,
            "without a meaning here": self.ignored,
            "to be given": self.open,
            "refused": self.refused,
        }
        for heading, lines in headings.items():
            if lines:
                yield f"{heading}:"
                yield from (f"  {line}" for line in lines)


def from_deepspeed(path: Path) -> Translation:
    """Translates a DeepSpeed configuration. Raises ConfigError if the file is not JSON."""
    table = tomllib.loads(Path(__file__).with_name("deepspeed.toml").read_text())
    config = {}
    for key, value in _flat(read_config_json(path)):
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) >= 1
        config[key] = int(value) if is_whole else value
    found = Translation({"train.precision": "fp32", "train.grad_clip": None})
    found.keys["parallel.zero_stage"] = 0
    for key in sorted(config):
        _translate(key, config, table, found)
    for name in (found.keys.get("optimizer.name"), found.keys.get("optimizer.schedule")):
        for key, value in table["defaults"].get(name, {}).items():
            if not any(line.startswith(f"{key} ") for line in found.open):
                found.keys.setdefault(key, value)
    _set_ranks(config, found)
    if found.keys.get("train.grad_clip") == 0:
        found.keys["train.grad_clip"] = None
    found.open += [key for key in _NEEDED if key not in found.keys]
    if found.keys.get("checkpoint.export") == "last":
        found.open.append("checkpoint.every, the steps between checkpoints")
    return found


def _translate(
    key: str, config: Mapping[str, Any], table: Mapping[str, Any], found: Translation
) -> None:
    """Adds what becomes of one key."""
    value, switch = config[key], _switch(key, config)
    usual = key.replace("bfloat16", "bf16").replace("stage3_", "")
    name, said = table["keys"].get(usual), f"{key} = {shown(value)}"
    missing, ignored = _find(table["missing"], usual), _find(table["ignored"], usual)
    is_off = switch in _OFF or table["as_here"].get(usual) == value
    if name is None and missing:
        (found.ignored if is_off else found.refused).append(f"{said}: {missing}")
    elif name is None or (switch in (False, "none") and not key.endswith(".enabled")):
        (found.ignored if ignored else found.refused).append(f"{said}: {ignored or 'unknown key'}")
    elif value == _AUTO:
        found.keys.pop(name, None)
        found.open.append(f"{name} ({key} = auto)")
    else:
        values = table["values"].get(usual)
        ours = values.get(shown(value)) if values else value
        is_nested = isinstance(value, list) and any(isinstance(x, list | dict) for x in value)
        if ours is None or is_nested:
            reason = f"{name} has nothing like it"
            (found.ignored if is_off else found.refused).append(f"{said}: {reason}")
            return
        if name == "logging.sinks":
            ours = [*found.keys.get(name, []), *ours]
        found.keys[name] = ours
        found.taken.append(f"{said} -> {name}={shown(ours)}")


def _set_ranks(config: Mapping[str, Any], found: Translation) -> None:
    """Sets the data-parallel ranks that the batch, the microbatch and their number stand for."""
    batch: Any = config.get(_BATCH)
    micro: Any = config.get(_MICROBATCH)
    times: Any = config.get("gradient_accumulation_steps")
    is_number = all(isinstance(number, int) and number for number in (batch, micro, times))
    if not is_number or batch % (micro * times):
        found.open.append("parallel.dp_shard, the data-parallel ranks")
        return
    ranks = batch // (micro * times)
    found.keys["parallel.dp_shard"] = ranks
    found.taken.append(f"{_BATCH} = {batch} of {micro} x {times} -> {ranks} data-parallel ranks")


def _flat(tree: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings by their dotted names; an empty section is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{under}{key}.")
        else:
            yield f"{under}{key}", value


def _switch(key: str, config: Mapping[str, Any]) -> Any:
    """Returns what turns the innermost section of a key on or off, or the value of the key."""
    section = key
    while section := section.rpartition(".")[0]:
        for name in ("enabled", "device"):
            if f"{section}.{name}" in config:
                return config[f"{section}.{name}"]
    return config[key]


def _find(table: Mapping[str, str], key: str) -> str | None:
    """Returns the words for a key, or for the innermost section that has words."""
    while key and key not in table:
        key = key.rpartition(".")[0]
    return table.get(key)
