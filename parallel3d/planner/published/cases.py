"""Published runs: reading them, and what kind of figure each one measured.

The format is that of tools/cases/published.json (docs/planner.md). A field that is null is taken
from `inferred`, then from the defaults in `case_run`; `filled` says which were.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from parallel3d.config.yaml_text import read_short
from parallel3d.errors import ConfigError
from parallel3d.planner.memory.rank_memory import MemoryKind
from parallel3d.planner.model.parameters import FlopsDefinition
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.published.case_run import run_of_case
from parallel3d.planner.published.fields import Fields, meaning
from parallel3d.planner.published.knowledge import Knowledge

MeasuredRank = Literal["worst", "first", "last"]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured, as the source states it. `metric`: which of the figures the throughput is
    compared by."""

    status: str
    metric: str | None
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu: float | None
    memory_gib: float | None
    memory_kind: MemoryKind | None


@dataclass(frozen=True, kw_only=True)
class PublishedCase:
    """A published run. `apart`: why it is reported apart, or empty."""

    id: str
    source: str
    run: PlannedRun
    measured: Measurement
    tags: tuple[str, ...]
    apart: str
    definition: FlopsDefinition  # what its TFLOP/s and MFU count
    memory_rank: MeasuredRank  # the pipeline rank whose memory was measured
    filled: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CaseFile:
    """The cases of a file, and those that could not be read: (id, why)."""

    cases: tuple[PublishedCase, ...]
    skipped: tuple[tuple[str, str], ...]


def read_cases(
    path: Path,
    hardware: list[Path],
    *,
    leave_out_source: bool = False,
    framework: str | None = None,
) -> CaseFile:
    """Reads the cases of a file: a list, or one object a line. Raises ConfigError where it is
    neither. A case that misses what no default can fill, or says what cannot be, is skipped, and
    said so. `leave_out_source`: each case is read without what was set while its own source's runs
    were looked at. `framework`: the framework of all cases, whatever they name."""
    known: dict[str, Knowledge] = {}
    cases: list[PublishedCase] = []
    skipped: list[tuple[str, str]] = []
    for number, tree in enumerate(_trees(path), start=1):
        name = None
        if isinstance(tree, dict):
            name = tree.get("id")
        name = f"row {number}" if name is None else str(name)
        try:
            fields = Fields(tree)
            source = fields.text("source_key") if leave_out_source else ""
            if source not in known:
                known[source] = Knowledge(hardware, frozenset({source} - {""}), framework)
            cases.append(_case(name, fields, known[source]))
        except (
            ConfigError,
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
        ) as problem:
            skipped.append((name, str(problem)))
    return CaseFile(cases=tuple(cases), skipped=tuple(skipped))


_LARGEST_BYTES = 16 << 20


def _trees(path: Path) -> list[Any]:
    try:
        text = read_short(path, "a file of cases has some kB for each", _LARGEST_BYTES).decode()
        is_lines = text.lstrip().startswith("{")
        trees = [json.loads(line) for line in text.splitlines()] if is_lines else json.loads(text)
    except OSError as problem:
        raise ConfigError(
            f"{path}: cannot be read ({problem.strerror}); try the path of a file of cases"
        ) from problem
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{path}: cannot be read as JSON ({problem})") from problem
    if not isinstance(trees, list) or not trees:
        raise ConfigError(f"{path}: must be a list of cases, or a case a line")
    return trees


def _case(name: str, fields: Fields, knowledge: Knowledge) -> PublishedCase:
    run = run_of_case(fields, knowledge)
    tags = tuple(str(tag) for tag in fields.tree.get("tags") or ())
    reasons = {
        "mixture of experts": run.shape.experts is not None,
        "float8": run.precision == "fp8",
        "context parallel": run.layout.cp > 1,
        "one layer": run.shape.layers == 1,
    }
    apart = next((why for why, is_so in reasons.items() if is_so), "")
    tokens = fields.figure("tokens_per_s_per_gpu")
    samples = fields.figure("samples_per_s_per_gpu")
    mfu_pct = fields.figure("mfu_pct")
    memory = fields.figure("peak_memory_gib")
    if tokens is None and samples is not None:
        tokens = samples * run.seq_len
    figures = {
        "step_time_s": fields.figure("step_time_s"),
        "tokens_per_s_per_gpu": tokens,
        "tflops_per_gpu": fields.figure("tflops_per_gpu"),
        "mfu": None if mfu_pct is None else mfu_pct / 100,
    }
    # A status is "ok" where a figure stands without one.
    has_figure = any(value is not None for value in (memory, *figures.values()))
    status = str(fields.stated("measured", "status") or ("ok" if has_figure else "")).lower()
    metric = next((name for name, value in figures.items() if value is not None), None)
    kind: MemoryKind = (
        meaning("memory_kind", str(fields.stated("measured", "memory_note"))) or "reserved"
    )
    measurement = Measurement(
        status=status,
        metric=metric if status == "ok" and "toy" not in tags and run.shape.layers > 1 else None,
        memory_gib=memory if status == "ok" else None,
        memory_kind=None if memory is None else kind,
        **figures,
    )
    return PublishedCase(
        id=name,
        source=fields.text("source_key") or "unknown",
        run=run,
        measured=measurement,
        tags=tags,
        memory_rank=meaning("memory_rank", str(fields.stated("measured", "memory_note")))
        or "worst",
        definition=meaning("flops", str(fields.stated("measured", "tflops_definition"))) or "model",
        apart=apart,
        filled=tuple(dict.fromkeys(fields.filled)),
    )
