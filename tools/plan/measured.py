"""`--measured`: runs that were made on a cluster, from their folders or in words, and the cluster that they correct."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, replace
from pathlib import Path

from parallel3d.config.recipe import ParallelConfig
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.cluster import with_scales
from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.memory.rank_memory import MemoryKind
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.parameters import model_flops_per_token
from parallel3d.planner.published.anchor import MeasuredRun, scales_of
from parallel3d.planner.published.programs import in_precision, named_program
from parallel3d.planner.report.text import layout_text, si
from parallel3d.planner.search.question import Question
from parallel3d.planner.search.space import layout_errors
from parallel3d.planner.time.step import step_cost
from parallel3d.tools.names.layout import read_parallel
from parallel3d.tools.names.lookup import find_name, unknown_name
from parallel3d.tools.plan.compare import compare

# A figure that is further from its prediction than this is of another run, or of another unit. What the file of an
# uncalibrated CPU predicts is an order of magnitude.
_MOST_OFF, _MOST_OFF_OF_A_CPU = 5.0, 50.0
_TIMES = ("tokens_per_s", "tokens_per_s_per_gpu", "step_s", "mfu")
_MEMORIES: dict[str, MemoryKind] = {"memory_gib": "device", "reserved_gib": "reserved", "allocated_gib": "allocated"}
_ALIASES = {
    "tokens_per_s_per_device": "tokens_per_s_per_gpu",
    "step_time_s": "step_s",
    "peak_allocated_gib": "allocated_gib",
}
_OF_THE_RUN = ("gpus", "seq_len", "global_batch", "engine")  # where they differ from what is asked
_EXAMPLE = "--measured tokens_per_s=4.1e5 memory_gib=61 at tp=8 pp=2"


@dataclass(frozen=True, kw_only=True)
class Told:
    """A measurement: what the user calls it, the run, and where its figures are from."""

    name: str
    parallel: ParallelConfig
    measured: MeasuredRun
    source: str = ""

    def note(self) -> str:
        """Returns what was measured, beside what had been predicted of it."""
        run, found = self.measured.run, []
        if (step_s := self.measured.step_time_s) is not None:
            found.append(f"{step_s:.3g} s a step ({step_cost(run).step_time_s:.3g} predicted)")
        if (bytes_ := self.measured.memory_bytes) is not None:
            kind = self.measured.memory_kind
            counted = worst_rank(run).of_kind(kind)
            found.append(
                f"{bytes_ / GIB:.3g} GiB {'in use' if kind == 'device' else kind} ({counted / GIB:.3g} predicted)"
            )
        where = f"{run.program.name} on {run.layout.world_size} devices, {layout_text(self.parallel)}"
        return f"measured: {where}: {', '.join(found)}{self.source}"


def anchored(question: Question, options: argparse.Namespace) -> tuple[Question, list[str]]:
    """Returns the question on its cluster as the runs of --measured correct it, and a note on each run. Raises
    ConfigError for a measurement that cannot be of this cluster."""
    told = [_read(" ".join(words), question) for words in options.measured]
    for each in told:
        _refuse_absurd(each)
    if not told:
        return question, []
    scales = scales_of([each.measured for each in told])
    return replace(question, cluster=with_scales(question.cluster, scales)), [each.note() for each in told]


def _read(text: str, question: Question) -> Told:
    if "=" in text.partition(" at ")[0]:
        return _in_words(text, question)
    found = compare(Path(text), question.cluster)
    if found.other_device is not None:
        rule = f"the run was not on {question.cluster.device.name} ({found.other_device})"
        raise ConfigError(f"--measured {text}: {rule}; plan for its own device, or try {_EXAMPLE}")
    of = found.measured
    steps = f"; the median of {of.lines} lines of {text}, steps {of.first_step} to {of.last_step}"
    return Told(name=f"--measured {text}", parallel=found.recipe.parallel, measured=found.measured_run, source=steps)


def _in_words(text: str, question: Question) -> Told:
    """Reads `tokens_per_s=4.1e5, memory_gib=61 at tp=8 pp=2`."""
    name = f"--measured {text}"
    figures_text, _, layout = text.partition(" at ")
    figures: dict[str, float] = {}
    for part in re.split(r"[\s,]+", figures_text.strip(" ,")):
        key, _, value = part.partition("=")
        key = _ALIASES.get(key.strip().lower(), key.strip().lower())
        if key not in (*_TIMES, *_MEMORIES):
            keys = ", ".join((*_TIMES, *_MEMORIES))
            raise ConfigError(f"--measured {part}: not a figure that a run has; figures are {keys}; try {_EXAMPLE}")
        figures[key] = _number(key, value)
    if len(times := [key for key in figures if key in _TIMES]) > 1 or len(figures) - len(times) > 1:
        raise ConfigError(f"{name}: several figures of one thing; keep one of speed and one of memory")
    run_question, parallel = _run_of(layout, question, name)
    measured = MeasuredRun(run=run_question.planned_run(parallel))
    if times:
        step_s = _step_s(times[0], figures[times[0]], run_question, parallel)
        measured = replace(measured, step_time_s=step_s)
    for key, kind in _MEMORIES.items():
        if key in figures:
            measured = replace(measured, memory_bytes=figures[key] * GIB, memory_kind=kind)
    return Told(name=name, parallel=parallel, measured=measured)


def _number(key: str, value: str) -> float:
    percent = key == "mfu" and value.endswith("%")
    units = {"k": 1e3, "m": 1e6} if key.startswith("tokens") else {}
    bare, factor = value.removesuffix("%") if percent else value, 0.01 if percent else 1.0
    if units and bare[-1:].lower() in units:
        bare, factor = bare[:-1], units[bare[-1].lower()]
    try:
        number = factor * float(bare)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(f"--measured {key}={value}: must be a number above 0; try {_EXAMPLE}")
    return number


def _run_of(words: str, question: Question, name: str) -> tuple[Question, ParallelConfig]:
    """Returns the question and the layout of a run that is told in words: as is asked now, but for what is said. The
    data ranks are those that the rest leaves."""
    parts = [part for part in re.split(r"[\s,]+", words) if part]
    own = dict(part.split("=", 1) for part in parts if part.partition("=")[0] in _OF_THE_RUN)
    numbers = {key: value for key, value in own.items() if key != "engine"}
    for key, value in numbers.items():
        if not (value.isascii() and value.isdigit() and int(value) > 0):
            raise ConfigError(f"--measured ... at {key}={value}: must be a whole number from 1 on")
    engine = find_name("engine", own["engine"]) if "engine" in own else question.program.name
    if engine is None:
        raise unknown_name("engine", own["engine"])
    program = (
        question.program if engine == question.program.name else in_precision(named_program(engine), question.precision)
    )
    asked = replace(
        question,
        program=program,
        gpus=int(numbers.get("gpus", question.gpus)),
        seq_len=int(numbers.get("seq_len", question.seq_len)),
        global_batch_size=int(numbers.get("global_batch", question.global_batch_size)),
    )
    said = [part for part in parts if part.partition("=")[0] not in own]
    parallel = read_parallel(said, "--measured ... at")
    beside = parallel.world_size // parallel.dp_shard
    is_said = any(part.partition("=")[0] in ("dp_shard", "shard") for part in said)
    if not is_said and asked.gpus % beside == 0:
        parallel = replace(parallel, dp_shard=asked.gpus // beside)
    if parallel.world_size != asked.gpus:
        need = f"a layout of {parallel.world_size} devices, or a multiple, and {asked.gpus} are asked about"
        raise ConfigError(f"{name}: {need}; add the run's own number behind 'at', such as gpus={parallel.world_size}")
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


def _refuse_absurd(told: Told) -> None:
    """Raises ConfigError for what no run of this layout on this cluster can have taken."""
    measured, run = told.measured, told.measured.run
    device, devices = run.cluster.device, run.layout.world_size
    where = f"{devices} x {device.name} in {layout_text(told.parallel)}"
    if (step_s := measured.step_time_s) is not None:
        cost = step_cost(run)
        mfu, off = cost.mfu * cost.step_time_s / step_s, step_s / cost.step_time_s
        most = _MOST_OFF_OF_A_CPU if device.is_cpu and run.cluster.measured is None else _MOST_OFF
        said = f"{told.name}: {step_s:.3g} s a step on {where}"
        tokens = (
            f"tokens_per_s is of all {devices} devices, and {si(run.tokens_per_step / cost.step_time_s)} is predicted"
        )
        if mfu >= 1:
            raise ConfigError(f"{said}: {mfu:.3g} times the peak of {device.name}, which no run exceeds; {tokens}")
        if not 1 / most <= off <= most:
            told_off = f"{off:.3g} times as long as" if off > 1 else f"{1 / off:.3g} times as fast as"
            raise ConfigError(f"{said}: {told_off} predicted, and {most:g} times is believed; {tokens}")
    if (bytes_ := measured.memory_bytes) is not None:
        counted = worst_rank(run)
        states = counted.total - counted.beside_states
        said = f"{told.name}: {bytes_ / GIB:.3g} GiB of memory"
        if bytes_ > device.memory_bytes:
            raise ConfigError(
                f"{said}: more than the {device.memory_bytes / GIB:.3g} of {device.name}; try its peak of one device"
            )
        kept = f"{states / GIB:.3g} GiB of parameters, gradients and optimizer states"
        if bytes_ <= states:
            raise ConfigError(f"{said}: {where} keeps {kept} alone; it was another layout, or not the fullest rank")
        beside = (bytes_ - states) / max(counted.of_kind(measured.memory_kind) - states, 1.0)
        if not 1 / _MOST_OFF <= beside <= _MOST_OFF:
            what = f"beside {kept} {beside:.2g} times what is predicted"
            raise ConfigError(f"{said}: {what}, and {_MOST_OFF:g} times is believed; allocated_gib= is the allocator's")
