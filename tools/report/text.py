"""The results of a run as text, and the report in 80 columns."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from parallel3d.config.yaml_text import shown
from parallel3d.errors import printable
from parallel3d.reporting.read_metrics import COUNTS
from parallel3d.tools.report.charts import EVALUATED, Tree
from parallel3d.tools.report.run import counted
from parallel3d.watch.step_clock import CAUSES

_UNICODE = "▁▂▃▄▅▆▇█"
_ASCII = "_.-~=+*#"
_BAR = 30  # Columns of the longest bar.
_MOST_EVENTS = 10
_FIGURES: dict[str, tuple[str, str]] = {  # Key of a figure -> its label and unit.
    "loss": ("loss", ""),
    "tokens": ("tokens", ""),
    "step_time_s": ("step time", "s"),
    "tokens_per_s": ("tokens/s", ""),
    "tokens_per_s_per_device": ("tokens/s per device", ""),
    "mfu": ("MFU", "share"),
    "peak_memory_bytes": ("peak memory", "bytes"),
    **{cause: (cause, "s") for cause in CAUSES},
}


class Figure(NamedTuple):
    """A figure of a run. `predicted` is None without a prediction."""

    label: str
    unit: str
    measured: float | None
    predicted: float | None


def figures(run: Tree) -> list[Figure]:
    """Returns the figures that were measured or predicted, except times of 0."""
    known = run | run["time_s"]
    found = []
    for key, (label, unit) in _FIGURES.items():
        each = Figure(label, unit, known.get(key), run["predicted"].get(key))
        if each.measured or each.predicted:
            found.append(each)
    for name, curve in run["curves"].items():
        if name.startswith(EVALUATED):
            label = f"loss, {shown(name.removeprefix(EVALUATED))}"
            found.insert(1, Figure(label, "", curve["y"]["loss"][-1], None))
    return found


def quantity(value: float | None, unit: str = "") -> str:
    """Formats a number with four digits. `unit` is "", "s", "share" or "bytes"."""
    if value is None:
        return "-"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "bytes":
        value, unit = value / 2**20, "MiB"
    if unit == "MiB" and value >= 1000:
        value, unit = value / 2**10, "GiB"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".rstrip()


def steps_text(run: Tree) -> str:
    return f"step {run['step']:,.0f} of {run['recipe'].get('train.steps', 'unknown')}"


def problems(run: Tree) -> str:
    found = [counted(run[kind], kind) for kind in COUNTS if run[kind]]
    return ", ".join(found) or "no skipped steps or spikes"


def short_lines(run: Tree) -> list[str]:
    """Returns three lines for the end of a run."""
    times = sorted(run["time_s"].items(), key=lambda item: -item[1])
    total = sum(run["time_s"].values()) or 1.0
    shares = [f"{cause} {time / total:.0%}" for cause, time in times[:3]]
    step_time = quantity(run["step_time_s"], "s")
    speed = f"{step_time} a step, {quantity(run['tokens_per_s'])} tokens/s"
    return [
        f"loss: {_loss(run, 28)}; {problems(run)}",
        f"time: {', '.join([speed, *shares])}",
        f"report: {shown(run['folder'])}/report.html",
    ]


def lines(tree: Tree) -> Iterator[str]:
    """Yields the report in 80 columns."""
    for run in tree["runs"]:
        for line in _run_lines(run):
            whole = printable(line)
            yield from textwrap.wrap(whole, 80, subsequent_indent="  ", break_on_hyphens=False)
        yield ""
    for key, values in tree["differences"].items():
        yield from textwrap.wrap(f"{key}: {' | '.join(values)}", 80, subsequent_indent="  ")


def _run_lines(run: Tree) -> Iterator[str]:
    yield f"{shown(run['folder'])}: {run['status']}, {steps_text(run)}, {problems(run)}"
    if run["reason"]:
        yield run["reason"]
    if run["resume"]:
        yield f"resume with: {run['resume']}"
    yield f"loss: {_loss(run, 50)}"
    for each in figures(run):
        bar = ""
        if each.label in CAUSES and each.measured:
            bar = "#" * round(_BAR * each.measured / sum(run["time_s"].values()))
        measured = quantity(each.measured, each.unit)
        predicted = ""
        if run["predicted"]:
            predicted = quantity(each.predicted, each.unit)
        yield f"{each.label:<20} {measured:>12} {predicted:>12}  {bar}".rstrip()
    yield run["note"]
    for kind, values in run["curves"].get("memory_bytes", {"y": {}})["y"].items():
        yield f"{kind:<20} {quantity(values[-1], 'bytes'):>12}"
    told = [event for event in run["events"] if event["kind"] != "checkpoint"]
    for event in told[-_MOST_EVENTS:]:
        yield f"step {event['step']:,}: {event['text']}"


def _loss(run: Tree, width: int) -> str:
    """Returns the first loss, a sparkline of at most `width` columns, and the last loss."""
    if "loss" not in run["curves"]:
        return "not finite"
    values = [loss for loss in run["curves"]["loss"]["y"]["loss"] if loss is not None]
    levels = _UNICODE if "utf" in (sys.stdout.encoding or "").lower() else _ASCII
    low, wide = min(values), (max(values) - min(values)) or 1.0
    columns = min(width, len(values))
    picked = [values[column * len(values) // columns] for column in range(columns)]
    bars = "".join(levels[int(7 * (value - low) / wide)] for value in picked)
    return f"{quantity(values[0])} {bars} {quantity(values[-1])}"
