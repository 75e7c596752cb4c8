"""The programs that were measured, from the table programs.yaml."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.program import PARALLEL3D, TrainingProgram
from parallel3d.planner.published.fields import meaning


@cache
def programs() -> dict[str, TrainingProgram]:
    """Returns every program by its name, this project's own among them."""
    found = {PARALLEL3D.name: PARALLEL3D}
    for name, fields in yaml.safe_load(Path(__file__).with_name("programs.yaml").read_text()).items():
        base = found[fields.pop("like")] if "like" in fields else TrainingProgram(name=name)
        found[name] = replace(base, **{"name": name, **fields})
    return found


def named_program(name: str) -> TrainingProgram:
    """Raises ConfigError with the nearest names, or all."""
    if name == PARALLEL3D.name:
        return PARALLEL3D  # without reading the table
    if name not in programs():
        near = get_close_matches(name, programs(), n=3)
        advice = f"did you mean {', '.join(near)}?" if near else f"known are {', '.join(sorted(programs()))}"
        raise ConfigError(f"--engine {name}: unknown; {advice}")
    return programs()[name]


def program_of(framework: str, *, compiled: bool, early: bool, year: int, fsdp: bool) -> TrainingProgram:
    """Returns the program of a case. Megatron-LM is two programs; `early`: before Megatron-Core (2023). `year`: of the
    run, as far as its source says, else 0. `fsdp`: it shards parameters, and has no pipeline."""
    name = meaning("program", framework)
    if name == "torchtitan" and compiled:
        name = "torchtitan-compiled-2025" if year >= 2025 else "torchtitan-compiled"
    elif name == "internevo" and fsdp:
        name = "internevo-fsdp"
    elif name == "megatron":
        name = "megatron-2021" if early else "megatron-core"
    elif name is None:  # PyTorch's FSDP, hence likely its operators too; what has a pipeline is likely Megatron's kin
        likely = programs()["torchtitan" if fsdp else "megatron-core"]
        return replace(likely, name="unknown-fsdp" if fsdp else "unknown")
    return programs()[name]


def in_precision(program: TrainingProgram, precision: str) -> TrainingProgram:
    """The program with what it does otherwise in fp16."""
    in_fp16 = {"gradient_bytes": program.fp16_gradient_bytes, "reduce_bytes": program.fp16_reduce_bytes}
    changes: dict[str, Any] = {key: bytes_ for key, bytes_ in in_fp16.items() if bytes_ is not None}
    return replace(program, **changes) if precision == "fp16" else program
