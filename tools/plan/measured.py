"""`--measured`: runs that were made on a cluster, from their folders or in words, and the cluster
that they correct."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallel3d.config.recipe import ParallelConfig
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.cluster import with_scales
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.rank_memory import MemoryKind
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.parameters import model_flops_per_token
from parallel3d.planner.published.anchor import MeasuredRun, scales_of
from parallel3d.planner.published.programs import in_precision, named_program
from parallel3d.planner.report.text import si
from parallel3d.planner.search.question import Question
from parallel3d.planner.search.space import layout_errors
from parallel3d.planner.time.step import step_cost
from parallel3d.tools.aliases.layout import read_parallel
from parallel3d.tools.aliases.lookup import known_name
from parallel3d.tools.plan.compare import compare

# A step that takes so many times as long as predicted, or as short, is of another run or in another
# unit. What the file of an uncalibrated CPU predicts is an order of magnitude.
_MOST_OFF = 5.0
_MOST_OFF_OF_A_CPU = 50.0
_TIMES = ("tokens_per_s", "tokens_per_s_per_gpu", "step_s", "mfu")
_MEMORIES: dict[str, MemoryKind] = {
    "memory_gib": "device",
    "reserved_gib": "reserved",
    "allocated_gib": "allocated",
}
_ALIASES = {
    "tokens_per_s_per_device": "tokens_per_s_per_gpu",
    "step_time_s": "step_s",
    "peak_allocated_gib": "allocated_gib",
}
_OF_THE_RUN = ("gpus", "seq_len", "global_batch", "engine")  # where they differ from what is asked
_EXAMPLE = "--measured tokens_per_s=4.1e5 memory_gib=61 at tp=8 pp=2"


def anchored(question: Question, options: argparse.Namespace) -> tuple[Question, list[str]]:
    """Returns the question on its cluster as the runs of --measured correct it, and a note on each
    run. Raises ConfigError for a measurement that cannot be of this cluster."""
    runs = {text: _read(text, question) for text in map(" ".join, options.measured)}
    if not runs:
        return question, []
    for text, each in runs.items():
        _check(f"--measured {text}", each)
    cluster = with_scales(question.cluster, scales_of([*runs.values()]))
    return replace(question, cluster=cluster), [_note(each) for each in runs.values()]


def _note(measured: MeasuredRun) -> str:
    """Returns what was measured, beside what had been predicted of it."""
    run = measured.run
    found = []
    if measured.step_time_s is not None:
        predicted_s = step_cost(run).step_time_s
        found.append(f"{measured.step_time_s:.3g} s a step ({predicted_s:.3g} predicted)")
    if measured.memory_bytes is not None:
        counted = worst_rank(run).of_kind(measured.memory_kind) / GIB
        found.append(f"{measured.memory_bytes / GIB:.3g} GiB ({counted:.3g} predicted)")
    where = f"{run.program.name} on {run.layout.world_size} devices"
    return f"measured: {where}: {', '.join(found)}"


def _read(text: str, question: Question) -> MeasuredRun:
    if "=" in text.partition(" at ")[0]:
        return _in_words(text, question)
    found = compare(Path(text), question.cluster)
    if found.other_device is not None:
        rule = f"the run was not on {question.cluster.device.name} ({found.other_device})"
        raise ConfigError(f"--measured {text}: {rule}; plan for its own device, or try {_EXAMPLE}")
    return found.measured_run


def _in_words(text: str, question: Question) -> MeasuredRun:
    """Reads `tokens_per_s=4.1e5, memory_gib=61 at tp=8 pp=2`."""
    figures_text, _, layout = text.partition(" at ")
    figures: dict[str, float] = {}
    for part in re.split(r"[\s,]+", figures_text.strip(" ,")):
        key, _, value = part.partition("=")
        key = _ALIASES.get(key.strip().lower(), key.strip().lower())
        if key not in (*_TIMES, *_MEMORIES):
            keys = ", ".join((*_TIMES, *_MEMORIES))
            rule = f"not a figure that a run has; figures are {keys}"
            raise ConfigError(f"--measured {part}: {rule}; try {_EXAMPLE}")
        figures[key] = _number(key, value)
    times = [key for key in figures if key in _TIMES]
    if len(times) > 1 or len(figures) - len(times) > 1:
        rule = "several figures of one thing; keep one of speed and one of memory"
        raise ConfigError(f"--measured {text}: {rule}")
    asked, parallel = _run_of(layout, question, f"--measured {text}")
    measured = MeasuredRun(run=asked.planned_run(parallel))
    for key, value in figures.items():
        if key in _TIMES:
            measured = replace(measured, step_time_s=_step_s(key, value, asked, parallel))
        else:
            kind = _MEMORIES[key]
            measured = replace(measured, memory_bytes=value * GIB, memory_kind=kind)
    return measured


def _number(key: str, value: str) -> float:
    units = {"%": 0.01} if key == "mfu" else {}
    if key.startswith("tokens"):
        units = {"k": 1e3, "m": 1e6}
    factor = units.get(value[-1:].lower(), 1.0)
    try:
        number = factor * float(value if factor == 1.0 else value[:-1])
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"--measured {key}={value}: must be a number above 0; try {_EXAMPLE}")
    return number


def _run_of(words: str, question: Question, name: str) -> tuple[Question, ParallelConfig]:
    """Returns the question and the layout of a run that is told in words: as is asked now, but for
    what is said. The data ranks are those that the rest leaves."""
    parts = [part for part in re.split(r"[\s,]+", words) if part]
    own = dict(part.split("=", 1) for part in parts if part.partition("=")[0] in _OF_THE_RUN)
    engine = own.pop("engine", None)
    program = question.program
    numbers: dict[str, Any] = {}
    if engine is not None:
        program = in_precision(named_program(known_name("engine", engine)), question.precision)
    for key, value in own.items():
        if not (value.isascii() and value.isdigit() and int(value) > 0):
            raise ConfigError(f"--measured ... at {key}={value}: must be a whole number from 1 on")
        numbers["global_batch_size" if key == "global_batch" else key] = int(value)
    asked = replace(question, program=program, **numbers)
    said = [part for part in parts if part.partition("=")[0] not in _OF_THE_RUN]
    parallel = read_parallel(said, "--measured ... at")
    beside = parallel.world_size // parallel.dp_shard
    is_said = any(part.partition("=")[0] in ("dp_shard", "shard") for part in said)
    if not is_said and asked.gpus % beside == 0:
        parallel = replace(parallel, dp_shard=asked.gpus // beside)
    if parallel.world_size != asked.gpus:
        need = f"a layout of {parallel.world_size} devices, and {asked.gpus} are asked about"
        tries = f"add the run's own number behind 'at', such as gpus={parallel.world_size}"
        raise ConfigError(f"{name}: {need}; {tries}")
    if parallel.sharding is None and program.splits_optimizer_alone and parallel.dp_shard > 1:
        parallel = replace(parallel, sharding="SHARD_OPTIMIZER")
    if (error := next(layout_errors(asked, parallel), None)) is not None:
        raise ConfigError(f"{name}: a layout that does not run: {error}")
    return asked, parallel


def _step_s(key: str, value: float, question: Question, parallel: ParallelConfig) -> float:
    tokens = question.global_batch_size * question.seq_len
    if key == "step_s":
        return value
    if key == "mfu":
        flops = model_flops_per_token(question.shape, question.seq_len)
        value *= question.cluster.device.peak(question.precision) / flops
    return tokens / value / (1 if key == "tokens_per_s" else parallel.world_size)


def _check(name: str, measured: MeasuredRun) -> None:
    """Raises ConfigError for what no run of this layout on this cluster can have taken."""
    run = measured.run
    device = measured.run.cluster.device
    cost = step_cost(measured.run)
    if measured.step_time_s is not None:
        off = measured.step_time_s / cost.step_time_s
        is_guess = device.is_cpu and run.cluster.measured is None
        most = _MOST_OFF_OF_A_CPU if is_guess else _MOST_OFF
        if not 1 / most <= off <= most or cost.mfu / off >= 1:
            predicted = f"{si(run.tokens_per_step / cost.step_time_s)} is predicted"
            unit = f"tokens_per_s is of all {run.layout.world_size} devices, and {predicted}"
            rule = f"{off:.3g} times as long as predicted, which is not believed"
            raise ConfigError(f"{name}: {measured.step_time_s:.3g} s a step: {rule}; {unit}")
    if measured.memory_bytes is not None:
        counted = worst_rank(run)
        states = counted.total - counted.beside_states
        if not states < measured.memory_bytes <= device.memory_bytes:
            between = f"between {states / GIB:.3g} GiB, the layout's states,"
            rule = f"must be {between} and the {device.memory_bytes / GIB:.3g} of {device.name}"
            raise ConfigError(f"{name}: {measured.memory_bytes / GIB:.3g} GiB of memory: {rule}")
