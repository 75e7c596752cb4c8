"""The programs that were measured, from the table programs.yaml: by name, by how a published case
calls them, and what stands for one of them where the runs that its figures were set on are left
out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.program import PARALLEL3D, TrainingProgram
from parallel3d.planner.published.fields import read_table

TYPICAL = "unknown"  # the program that stands for one without an entry
# What a program does where a run does not say stands in its code and is no figure of a run.
_CONVENTIONS = ("default_schedule", "default_recompute", "default_sequence_parallel")
# the year of a typical program whose run has no date, where its device is not newer
_UNDATED = 2023
# "NeMo 24.07 / Megatron-Core" and "llm-foundry (FSDP1)" are NeMo and llm-foundry: the name ends at
# the first of these.
_NAME_ENDS = re.compile(r"[(\[/+,;:]|\bwith\b|\bon\b")
_VERSION = re.compile(r"[\s-]+v?\d+(?:\.\d+)*$")


@dataclass(frozen=True, kw_only=True)
class RunTraits:
    """What a case says of its program beside the name. `sharded`: parameters are, without a
    pipeline. `gpt`: it trains GPT-3's blocks, with learned positions and GELU, and speaks of no
    tiled attention. The year is a guess by the device where it is not `dated`."""

    year: int
    dated: bool = True
    compiled: bool = False
    sharded: bool = False
    gpt: bool = False


@dataclass(frozen=True, kw_only=True)
class ProgramEntry:
    """A program of programs.yaml, whose head says what each of these means."""

    program: TrainingProgram
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

    def of_run(self, traits: RunTraits) -> TrainingProgram:
        if traits.sharded:
            return replace(self.program, **self.sharded)
        return self.program


_NO_PARENT = ProgramEntry(program=TrainingProgram(name=""))


@cache
def entries() -> dict[str, ProgramEntry]:
    """Returns every program of the table by its name, in the table's order."""
    found: dict[str, ProgramEntry] = {}
    for name, said in read_table("programs.yaml").items():
        fields = dict(said)
        parent = found.get(fields.pop("like", ""), _NO_PARENT)
        years = range(fields.pop("from", 0), fields.pop("until", 9998) + 1)
        entry = ProgramEntry(
            program=parent.program,
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
        found[name] = replace(entry, program=replace(entry.program, **own))
    return found


@cache
def programs() -> dict[str, TrainingProgram]:
    """Returns every program by its name, this project's own among them."""
    return {
        PARALLEL3D.name: PARALLEL3D,
        **{name: entry.program for name, entry in entries().items()},
    }


def named_program(name: str) -> TrainingProgram:
    """Raises ConfigError with the nearest names, or all."""
    if name == PARALLEL3D.name:
        return PARALLEL3D  # without reading the table
    if name not in programs():
        advice = f"known are {', '.join(sorted(programs()))}"
        near = get_close_matches(name, programs(), n=3)
        if near:
            advice = f"did you mean {', '.join(near)}?"
        raise ConfigError(f"--engine {name}: unknown; {advice}, or unknown for a typical program")
    return programs()[name]


def name_of(framework: str) -> str:
    """Returns a program's name as the table writes it, without its version and what stands beside
    it."""
    name = _NAME_ENDS.split(framework.strip().lower(), maxsplit=1)[0].strip()
    return re.sub(r"[\s_]+", "-", _VERSION.sub("", name))


def program_of(
    framework: str, traits: RunTraits, *, left_out: Iterable[str] = ()
) -> TrainingProgram:
    """Returns the program that a case names, or the typical one of its kind where the table has no
    such name, or where a source that is `left_out` was looked at while the entry was made."""
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
        usual = {key: getattr(found.program, key) for key in _CONVENTIONS}
    return replace(like.of_run(traits), **usual)


def _entry(name: str, traits: RunTraits) -> ProgramEntry | None:
    """Returns the last entry of the table that has this name and suits what the case says of its
    program."""
    return next(
        (entry for entry in reversed(entries().values()) if entry.suits(name, traits)), None
    )


def in_precision(program: TrainingProgram, precision: str) -> TrainingProgram:
    """The program with what it does otherwise in fp16."""
    if precision != "fp16":
        return program
    return replace(
        program,
        gradient_bytes=program.fp16_gradient_bytes or program.gradient_bytes,
        reduce_bytes=program.fp16_reduce_bytes or program.reduce_bytes,
    )


def with_options(program: TrainingProgram, said: Callable[[str], bool | None]) -> TrainingProgram:
    """Returns the program as a run had it: by what is said of each of these options, true, false or
    nothing."""
    changes: dict[str, Any] = {}
    if said("deterministic"):
        changes |= {
            "attention_speed": 0.6 * program.attention_speed,
            "fused_weight_gradient": False,
        }
    if (writes_scores := said("softmax_attention")) is not None:
        changes["attention"] = "softmax" if writes_scores else "flash"
    if (dropout := said("dropout")) is not None:
        changes["dropout"] = dropout
    if said("async_tp"):  # as NeMo's userbuffers
        changes["tp_hidden"] = max(program.tp_hidden, programs()["nemo"].tp_hidden)
    if said("framework_norms"):
        changes |= {"norm_passes": 8.0, "norm_extra_bytes": 8.0}
    return replace(program, **changes)


def with_float32_sum(program: TrainingProgram) -> TrainingProgram:
    """Returns the program with a float32 sum of its 16-bit gradients beside them."""
    if program.weight_bytes != 2.0:
        return program
    return replace(program, gradient_bytes=max(6.0, program.gradient_bytes))


def with_states(
    program: TrainingProgram, states: float | None, *, pure_bf16: bool
) -> TrainingProgram:
    """Returns the program with so many bytes of the optimizer's states for a parameter (None: its
    own), or with these, weights and gradients in bf16 and no float32 copy of them."""
    if states is None:
        states = program.state_bytes
    if pure_bf16:
        # bytes of states are float32's, except those of 8 bits
        if states != 2.0:
            states /= 2
        return replace(
            program,
            weight_bytes=2.0,
            gradient_bytes=2.0,
            reduce_bytes=2.0,
            state_bytes=states,
            optimizer_bytes=states,
        )
    masters = program.optimizer_bytes - program.state_bytes
    return replace(program, state_bytes=states, optimizer_bytes=masters + states)
