"""Translates a DeepSpeed configuration to recipe keys (`parallel3d-train --from-deepspeed
ds.json`). `deepspeed.toml` has the table of keys."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel3d.config.hugging_face import read_config_json
from parallel3d.config.yaml_text import dump_yaml, shown

_OFF = (False, None, 0, "none", "null", "")
_AUTO = "auto"  # value that the Hugging Face Trainer fills in
_BATCH, _MICROBATCH = "train_batch_size", "train_micro_batch_size_per_gpu"
_NEEDED = ("model.name", "train.seq_len", "train.steps", "train.global_batch_size")


@dataclass
class Translation:
    """Recipe keys with their values, and report lines on the DeepSpeed keys."""

    keys: dict[str, Any] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)  # recipe keys that still need a value
    refused: list[str] = field(default_factory=list)  # keys without a counterpart here

    def to_yaml(self) -> str:
        """Returns the recipe keys as YAML, with a comment for each missing value."""
        tree: dict[str, Any] = {}
        for name, value in self.keys.items():
            section, _, key = name.partition(".")
            tree.setdefault(section, {})[key] = value
        return "".join(f"# missing: {line}\n" for line in self.open) + dump_yaml(tree)

    def lines(self) -> Iterator[str]:
        """Yields the report, grouped under headings."""
        headings = {
            "translated": self.taken,
            "ignored": self.ignored,
            "missing": self.open,
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
    """Adds the translation and the report line of one DeepSpeed key."""
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
            reason = f"{name} does not support this value"
            (found.ignored if is_off else found.refused).append(f"{said}: {reason}")
            return
        if name == "logging.sinks":
            ours = [*found.keys.get(name, []), *ours]
        found.keys[name] = ours
        found.taken.append(f"{said} -> {name}={shown(ours)}")


def _set_ranks(config: Mapping[str, Any], found: Translation) -> None:
    """Sets the data-parallel size that follows from batch size, microbatch size and accumulation
    steps."""
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
    """Yields (dotted name, value) for each leaf. An empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{under}{key}.")
        else:
            yield f"{under}{key}", value


def _switch(key: str, config: Mapping[str, Any]) -> Any:
    """Returns the value of `enabled` or `device` in the innermost section of a key that has one,
    otherwise the value of the key."""
    section = key
    while section := section.rpartition(".")[0]:
        for name in ("enabled", "device"):
            if f"{section}.{name}" in config:
                return config[f"{section}.{name}"]
    return config[key]


def _find(table: Mapping[str, str], key: str) -> str | None:
    """Returns the entry for a key, or for its innermost section that has an entry."""
    while key and key not in table:
        key = key.rpartition(".")[0]
    return table.get(key)
