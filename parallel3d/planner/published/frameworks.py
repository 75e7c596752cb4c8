"""The frameworks that were measured, from the table frameworks.yaml: by name, by how a published
case calls them, and what stands for one of them where the runs that its figures were set on are
left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.framework import PARALLEL3D, FrameworkProfile
from parallel3d.planner.published.fields import read_table

TYPICAL = "unknown"  # the framework that stands for one without an entry
# What a framework does where a run does not say stands in its code and is no figure of a run.
_CONVENTIONS = ("default_schedule", "default_recompute", "default_sequence_parallel")
# the year of a typical framework whose run has no date, where its device is not newer
_UNDATED = 2023
# "NeMo 24.07 / Megatron-Core" and "llm-foundry (FSDP1)" are NeMo and llm-foundry: the name ends at
# the first of these.
_NAME_ENDS = re.compile(r"[(\[/+,;:]|\bwith\b|\bon\b")
_VERSION = re.compile(r"[\s-]+v?\d+(?:\.\d+)*$")


@dataclass(frozen=True, kw_only=True)
class RunTraits:
    """What a case says of its framework beside the name. `sharded`: parameters are, without a
    pipeline. `gpt`: it trains GPT-3's blocks, with learned positions and GELU, and speaks of no
    tiled attention. The year is a guess by the device where it is not `dated`."""

    year: int
    dated: bool = True
    compiled: bool = False
    sharded: bool = False
    gpt: bool = False


@dataclass(frozen=True, kw_only=True)
class FrameworkEntry:
    """A framework of frameworks.yaml, whose head says what each of these means."""

    framework: FrameworkProfile
    names: tuple[str, ...] = ()
    years: range = range(9999)
    compiled: bool = False
    gpt: bool = False
    sharded: Mapping[str, Any] = field(default_factory=dict)
    seen: frozenset[str] = frozenset()
    family: str = TYPICAL

    def suits(self, name: str, traits: RunTraits) -> bool:
        is_so = (traits.compiled or not self.compiled) and (traits.gpt or not self.gpt)
        return is_so and name in self.names and traits.year in self.years

    def of_run(self, traits: RunTraits) -> FrameworkProfile:
        if traits.sharded:
            return replace(self.framework, **self.sharded)
        return self.framework


_NO_PARENT = FrameworkEntry(framework=FrameworkProfile(name=""))


@cache
def entries() -> dict[str, FrameworkEntry]:
    """Returns every framework of the table by its name, in the table's order."""
    found: dict[str, FrameworkEntry] = {}
    for name, said in read_table("frameworks.yaml").items():
        fields = dict(said)
        parent = found.get(fields.pop("like", ""), _NO_PARENT)
        years = range(fields.pop("from", 0), fields.pop("until", 9998) + 1)
        entry = FrameworkEntry(
            framework=parent.framework,
            names=tuple(fields.pop("names", ())),
            years=years,
            compiled=fields.pop("compiled", False),
            gpt=fields.pop("gpt", False),
            sharded=fields.pop("sharded", parent.sharded),
            seen=parent.seen.union(fields.pop("seen", ())),
            family=fields.pop("family", parent.family),
        )
        own = {"name": name, "is_measured": bool(entry.seen), **fields}
        if "axes" in own:
            own["axes"] = tuple(own["axes"])
        found[name] = replace(entry, framework=replace(entry.framework, **own))
    return found


@cache
def frameworks() -> dict[str, FrameworkProfile]:
    """Returns every framework by its name, this project's own among them."""
    return {
        PARALLEL3D.name: PARALLEL3D,
        **{name: entry.framework for name, entry in entries().items()},
    }


def named_framework(name: str) -> FrameworkProfile:
    """Raises ConfigError with the nearest names, or all."""
    if name == PARALLEL3D.name:
        return PARALLEL3D  # without reading the table
    if name not in frameworks():
        advice = f"known are {', '.join(sorted(frameworks()))}"
        near = get_close_matches(name, frameworks(), n=3)
        if near:
            advice = f"did you mean {', '.join(near)}?"
        raise ConfigError(
            f"--framework {name}: unknown; {advice}, or unknown for a typical framework"
        )
    return frameworks()[name]


def name_of(framework: str) -> str:
    """Returns a framework's name as the table writes it, without its version and what stands beside
    it."""
    name = _NAME_ENDS.split(framework.strip().lower(), maxsplit=1)[0].strip()
    return re.sub(r"[\s_]+", "-", _VERSION.sub("", name))


def framework_of(
    framework: str, traits: RunTraits, *, left_out: Iterable[str] = ()
) -> FrameworkProfile:
    """Returns the framework that a case names, or the typical one of its kind where the table has
    no such name, or where a source that is `left_out` was looked at while the entry was made."""
    name = name_of(framework)
    if name == PARALLEL3D.name:
        return PARALLEL3D
    recent = traits
    if not traits.dated:
        recent = replace(traits, year=max(traits.year, _UNDATED))
    found = _entry(name, recent if name.startswith(TYPICAL) else traits)
    if found is not None and found.seen.isdisjoint(left_out):
        return found.of_run(traits)
    family = TYPICAL if found is None else found.family
    like = _entry(family, recent) or entries()[family]
    usual = {}
    if found is not None:
        usual = {key: getattr(found.framework, key) for key in _CONVENTIONS}
    return replace(like.of_run(traits), **usual)


def _entry(name: str, traits: RunTraits) -> FrameworkEntry | None:
    """Returns the last entry of the table that has this name and suits what the case says of its
    framework."""
    return next(
        (entry for entry in reversed(entries().values()) if entry.suits(name, traits)), None
    )


def in_precision(framework: FrameworkProfile, precision: str) -> FrameworkProfile:
    """The framework with what it does otherwise in fp16."""
    if precision != "fp16":
        return framework
    return replace(
        framework,
        gradient_bytes=framework.fp16_gradient_bytes or framework.gradient_bytes,
        reduce_bytes=framework.fp16_reduce_bytes or framework.reduce_bytes,
    )


def with_options(
    framework: FrameworkProfile, said: Callable[[str], bool | None]
) -> FrameworkProfile:
    """Returns the framework as a run had it: by what is said of each of these options, true, false
    or nothing."""
    changes: dict[str, Any] = {}
    if said("deterministic"):
        changes |= {
            "attention_speed": 0.6 * framework.attention_speed,
            "fused_weight_gradient": False,
        }
    if (writes_scores := said("softmax_attention")) is not None:
        changes["attention"] = "softmax" if writes_scores else "flash"
    if (dropout := said("dropout")) is not None:
        changes["dropout"] = dropout
    if said("async_tp"):  # as NeMo's userbuffers
        changes["tp_hidden"] = max(framework.tp_hidden, frameworks()["nemo"].tp_hidden)
    if said("framework_norms"):
        changes |= {"norm_passes": 8.0, "norm_extra_bytes": 8.0}
    return replace(framework, **changes)


def with_float32_sum(framework: FrameworkProfile) -> FrameworkProfile:
    """Returns the framework with a float32 sum of its 16-bit gradients beside them."""
    if framework.weight_bytes != 2.0:
        return framework
    return replace(framework, gradient_bytes=max(6.0, framework.gradient_bytes))


def with_states(
    framework: FrameworkProfile, states: float | None, *, pure_bf16: bool
) -> FrameworkProfile:
    """Returns the framework with so many bytes of the optimizer's states for a parameter (None: its
    own), or with these, weights and gradients in bf16 and no float32 copy of them."""
    if states is None:
        states = framework.state_bytes
    if pure_bf16:
        # bytes of states are float32's, except those of 8 bits
        if states != 2.0:
            states /= 2
        return replace(
            framework,
            weight_bytes=2.0,
            gradient_bytes=2.0,
            reduce_bytes=2.0,
            state_bytes=states,
            optimizer_bytes=states,
        )
    masters = framework.optimizer_bytes - framework.state_bytes
    return replace(framework, state_bytes=states, optimizer_bytes=masters + states)
