"""Published runs: reading them, and what kind of figure each one measured.

The format is that of tools/cases/published.json (docs/planner.md). A field that is null is taken from `inferred`, then
from the defaults in `case_run`; `filled` says which were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.cluster import Cluster
from parallel3d.planner.model.flops import FlopsDefinition
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.published.case_run import run_of_case
from parallel3d.planner.published.fields import Fields
from parallel3d.planner.published.words import MeasuredMemory, flops_definition, measured_memory


@dataclass(frozen=True, kw_only=True)
class PublishedCase:
    """A published run. `apart`: why it is reported apart, or empty."""

    id: str
    source: str
    run: PlannedRun
    measured: Mapping[str, Any]
    tier: str
    tags: tuple[str, ...]
    apart: str
    definition: FlopsDefinition  # what its TFLOP/s and MFU count
    memory: MeasuredMemory  # what its memory figure is
    filled: tuple[str, ...]
    stated_parameters_b: float | None


@dataclass(frozen=True, kw_only=True)
class CaseFile:
    """The cases of a file, and those that could not be read: (id, why)."""

    cases: tuple[PublishedCase, ...]
    skipped: tuple[tuple[str, str], ...]


def read_cases(path: Path, hardware: list[Path]) -> CaseFile:
    """Reads the cases of a file: a list, or one object a line. Raises ConfigError where it is neither. A case that
    misses what no default can fill, or says what cannot be, is skipped, and said so."""
    clusters: dict[str, Cluster] = {}
    cases: list[PublishedCase] = []
    skipped: list[tuple[str, str]] = []
    for number, tree in enumerate(_trees(path), start=1):
        name = tree.get("id") if isinstance(tree, dict) else None
        name = f"row {number}" if name is None else str(name)
        try:
            cases.append(_case(name, tree, hardware, clusters))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
            skipped.append((name, str(problem)))
    return CaseFile(cases=tuple(cases), skipped=tuple(skipped))


def _trees(path: Path) -> list[Any]:
    """A line that is no JSON among lines that are becomes its own text, which no case is."""
    try:
        text = path.read_text()
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be read ({problem.strerror}); try the path of a file of cases") from problem
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path}: cannot be read as JSON, it is no text ({problem.reason})") from problem
    try:
        trees = json.loads(text)
    except ValueError as problem:
        lines = [_line(line) for line in text.splitlines() if line.strip()]
        if not any(isinstance(line, dict) for line in lines):
            raise ConfigError(f"{path}: cannot be read as JSON ({problem})") from problem
        return lines
    if isinstance(trees, dict) and "model" in trees:
        return [trees]
    if not isinstance(trees, list):
        raise ConfigError(f"{path}: must be a list of cases, or a case a line")
    return trees


def _line(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _case(name: str, tree: Mapping[str, Any], hardware: list[Path], clusters: dict[str, Cluster]) -> PublishedCase:
    fields = Fields(tree)
    run = run_of_case(fields, hardware, clusters)
    measured = fields.measured()
    return PublishedCase(
        id=name,
        source=fields.text("source_key") or "unknown",
        run=run,
        measured=measured,
        tier=fields.text("tier") or "A",
        tags=tuple(str(tag) for tag in tree.get("tags") or ()),
        memory=measured_memory(str(measured.get("memory_note") or ""), moments_at_start=run.program.moments_at_start),
        definition=flops_definition(str(measured.get("tflops_definition") or "")),
        apart=_apart(fields, run),
        filled=tuple(dict.fromkeys(fields.filled)),
        stated_parameters_b=fields.stated("model", "params_b"),
    )


def _apart(fields: Fields, run: PlannedRun) -> str:
    """Why a case is reported apart from the totals, or nothing."""
    if run.precision == "fp8":
        return "float8"
    if run.layout.cp > 1:
        return "context parallel"
    if fields.number("parallel", "ep", 1) > 1:
        return "expert parallel"
    return "one layer" if run.shape.layers == 1 else ""
