"""Reads the folder of a run into one tree of numbers and texts, which all forms of the report show.

Only metrics.jsonl is required. A file that is missing or damaged leaves its part out.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.checkpoint.store import list_checkpoints, step_of
from parallel3d.config.yaml_text import read_settings, shown
from parallel3d.errors import ConfigError
from parallel3d.launch.run_lock import is_locked
from parallel3d.reporting.read_metrics import COUNTS, Metrics, read_metrics, short
from parallel3d.timeline.trace import slowest_and_simulated
from parallel3d.tools.report.charts import Tree, curves, numbers

_MOST_EVENTS = 500  # Newest events of each kind.
_MOST_KEYS = 6  # Changed keys that an event names.
_NOT_COMPARED = ("run_dir", "checkpoint.resume")


def read_run(folder: Path) -> Tree:
    """Returns the tree of a run. Raises ConfigError if it has no metrics that can be read."""
    path = folder / "metrics.jsonl"
    try:
        metrics = read_metrics(path)
    except OSError as error:
        why = f"{path} cannot be read ({error.strerror})"
        rule = "give the folder of a run, such as runs/quickstart"
        raise ConfigError(f"{folder}: {why}; {rule}") from error
    if not len(metrics.offsets):
        raise ConfigError(f"{path}: has no metrics; give a run that has completed a step")
    starts: list[Tree] = []
    with suppress(LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        starts = [_start(each) for each in _read_json(folder / "run.json")["starts"]]
    recipe: dict[str, str] = {}
    with suppress(ConfigError):
        settings = read_settings(folder / "config.yaml")
        recipe = _flat({setting.key: setting.value for setting in settings})
    kept = [step_of(path) for path in list_checkpoints(folder / "checkpoints")]
    outcome = _read_json(folder / "outcome.json")
    if "status" not in outcome:
        outcome["status"] = "running" if is_locked(folder) else "unfinished"
    resume = None
    if kept and outcome["status"] != "done":
        resume = _resume_command(folder, starts)
    return {
        "name": folder.resolve().name,
        "folder": str(folder),
        "status": str(outcome["status"]),
        "reason": str(outcome.get("reason") or ""),
        "resume": resume,
        "damaged_lines": metrics.damaged,
        **numbers(metrics, [0, *(start["step"] for start in starts)]),
        "events": sorted(_events(metrics, starts, kept), key=lambda event: event["step"]),
        "timelines": _timelines(folder),
        "recipe": recipe,
        "starts": starts,
        "curves": curves(metrics),
    }


def differences(recipes: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Returns the keys of recipes that differ, with the value in each recipe ("": not set)."""
    found = {}
    for key in dict.fromkeys(key for recipe in recipes for key in recipe):
        values = [recipe.get(key, "") for recipe in recipes]
        if len(set(values)) > 1 and key not in _NOT_COMPARED:
            found[key] = values
    return found


def _read_json(path: Path) -> Tree:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def _start(said: Tree) -> Tree:
    recipe = _flat(said.pop("recipe"))
    command = [str(word) for word in said.pop("command")]
    saved = [int(step) for step in said.pop("saved")]
    step = int(said["step"])
    facts = {"command": shlex.join(command), **_flat(said)}
    return {
        "step": step,
        "command": command,
        "saved": saved,
        "recipe": recipe,
        "facts": facts,
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns the values of nested dicts as text by dotted key."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: shown(value)}
    return found


def _resume_command(folder: Path, starts: Sequence[Tree]) -> str:
    words = ["parallel3d-train", str(folder / "config.yaml")]
    for start in starts[-1:]:
        words = start["command"]
    kept = [word for word in words if not word.startswith("checkpoint.resume=")]
    return shlex.join([*kept, "checkpoint.resume=auto"])


def _events(metrics: Metrics, starts: Sequence[Tree], kept: Sequence[int]) -> Iterator[Tree]:
    for before, start in pairwise(starts):
        changed = differences([before["recipe"], start["recipe"]])
        keys = sorted(changed, key=lambda key: not key.startswith("parallel."))
        parts = [f"{key} {' → '.join(changed[key])}" for key in keys[:_MOST_KEYS]]
        end = before["facts"]["status"].replace("null", "killed")
        text = "; ".join([f"resumed from step {start['step']}, before: {end}", *parts])
        yield _event(start["step"], "resume", text)
    steps = [0, *metrics.columns["step"].astype(int).tolist()]
    for kind in COUNTS:
        more = np.diff(metrics.columns[kind], prepend=0.0)
        for line in np.flatnonzero(more > 0)[-_MOST_EVENTS:].tolist():
            first, last = steps[line] + 1, steps[line + 1]
            where = f"step {last}" if first == last else f"steps {first} to {last}"
            yield _event(last, kind, f"{counted(more[line], kind)} in {where}")
    saved = {step for start in starts for step in start["saved"]}
    for step in sorted(saved.union(kept))[-_MOST_EVENTS:]:
        text = f"checkpoint, {'kept' if step in kept else 'since deleted'}"
        yield _event(step, "checkpoint", text)


def _event(step: int, kind: str, text: str) -> Tree:
    return {"step": step, "kind": kind, "text": text}


def counted(number: float, kind: str) -> str:
    """Returns a number of events, such as `2 skipped steps`."""
    words = kind.replace("_", " ")
    return f"{number:.0f} {words if number > 1 else words[:-1]}"


def _timelines(folder: Path) -> Tree | None:
    for path in sorted(folder.glob("timeline_step_*.json"))[-1:]:
        with suppress(OSError, ValueError):
            both = slowest_and_simulated(path)
            makespans = short([timeline.makespan_s for timeline in both])
            bubbles = short([timeline.bubble_fraction for timeline in both])
            return {
                "file": str(path),
                "makespan_s": makespans,
                "bubble_fraction": bubbles,
            }
    return None
