"""Parses layouts such as `tp=8,pp=2`. Keys are those of `parallel:` or their names in other
frameworks.
"""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_args

from parallel3d.config.recipe import ParallelConfig, Recompute
from parallel3d.config.sharding_strategies import Cadence, ShardingName
from parallel3d.errors import ConfigError
from parallel3d.planner.search.request import Fixed
from parallel3d.schedules.registry import ScheduleName

_FLAGS = {"true": True, "false": False}
_WORDS: dict[str, tuple[str, ...]] = {
    "schedule": get_args(ScheduleName),
    "recompute": get_args(Recompute),
    "sequence_parallel": tuple(_FLAGS),
    "sharding": get_args(ShardingName),
    "gather": get_args(Cadence),
    "reduce": get_args(Cadence),
    "offload": tuple(_FLAGS),
}
# Abbreviations and names of other frameworks -> keys of `parallel:`.
_ALIASES = {
    "vpp": "virtual_stages",
    "vp": "virtual_stages",
    "mb": "microbatch_size",
    "mbs": "microbatch_size",
    "micro_batch": "microbatch_size",
    "micro_batch_size": "microbatch_size",
    "microbatch": "microbatch_size",
    "ac": "recompute",
    "every": "recompute_every",
    "sp": "sequence_parallel",
    "rep": "dp_replicate",
    "shard": "dp_shard",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
}
# Keys of other frameworks that have no equivalent -> advice for the error message.
_DP = "the data-parallel size follows from tp and pp; set dp_shard, dp_replicate or both"
_ZERO = "use sharding=SHARD_OPTIMIZER for ZeRO-1, sharding=FULL_SHARD for ZeRO-2 and 3"
_ELSEWHERE = {"dp": _DP, "data_parallel_size": _DP, "zero": _ZERO, "zero_stage": _ZERO}
_FIXABLE = tuple(f.name for f in fields(Fixed) if not f.name.startswith("max_"))


def read_layout(texts: list[str], option: str) -> dict[str, Any]:
    """Parses `tp=8,pp=2` (or tp=8 pp=2) into keys of `parallel:` and their values. `option` names
    the source in errors."""
    found: dict[str, Any] = {}
    for text in (part.strip() for words in texts for part in words.split(",")):
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_").lower()
        name = _ALIASES.get(key, key)
        if name in _ELSEWHERE:
            raise ConfigError(f"{option} {text}: {_ELSEWHERE[name]}")
        if not equals and name in _FIXABLE:
            raise ConfigError(
                f"{option} {text}: has no value; try "
                f"{name}={_WORDS[name][0] if name in _WORDS else 8}"
            )
        if name not in _FIXABLE:
            near = get_close_matches(name, [*_FIXABLE, *_ALIASES], n=1)
            advice = (
                f"did you mean {_ALIASES.get(near[0], near[0])}?"
                if near
                else f"keys are {', '.join(_FIXABLE)}"
            )
            raise ConfigError(
                f"{option} {text}: not a key of the layout with its value, such as tp=8; {advice}"
            )
        if name in found:
            raise ConfigError(f"{option} {text}: {name} is set twice; keep one of the two")
        value = value.strip()
        if name in _WORDS and value not in _WORDS[name]:
            raise ConfigError(f"{option} {name}={value}: must be one of {', '.join(_WORDS[name])}")
        if name not in _WORDS and not (value.isascii() and value.isdigit() and int(value) > 0):
            raise ConfigError(f"{option} {name}={value}: must be an integer of at least 1")
        found[name] = value if name in _WORDS else int(value)
    return {key: _FLAGS.get(value, value) for key, value in found.items()}


def read_parallel(texts: list[str], option: str) -> ParallelConfig:
    """Parses a complete layout. Unless they are given, virtual_stages > 1 implies an interleaved
    schedule, recompute_every implies recompute=every_n, and tp > 1 implies sequence parallelism.
    Other keys have their defaults.
    """
    said = read_layout(texts, option)
    if said.get("virtual_stages", 1) > 1:
        said = {"schedule": "interleaved_1f1b", **said}
    if "recompute_every" in said:
        said = {"recompute": "every_n", **said}
    said = {"sequence_parallel": said.get("tp", 1) > 1, **said}
    return ParallelConfig(**said)
