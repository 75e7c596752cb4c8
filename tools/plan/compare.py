"""`parallel3d-plan compare RUN_DIR`: compares a run with the prediction for its recipe."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from operator import sub
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError, DataError
from parallel3d.models import shape_cards
from parallel3d.planner.hardware.cluster import Cluster, Scales
from parallel3d.planner.hardware.framework import COMPILED_PARALLEL3D, PARALLEL3D
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.memory.rank_memory import RankMemory
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.parameters import model_flops_per_token
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.published.run_correction import MeasuredRun, scales_of
from parallel3d.planner.report.json import memory_tree, scales_tree
from parallel3d.planner.report.page import (
    TIME_KINDS,
    layout_text,
    scales_text,
    three_digits,
    wrapped,
)
from parallel3d.planner.time.step import Cost, step_cost
from parallel3d.tools.cli_output import Reply
from parallel3d.tools.plan.accuracy import how_sure
from parallel3d.tools.plan.hardware import asked_cluster
from parallel3d.tools.verify.command import run_of_recipe
from parallel3d.watch.step_clock import CAUSES

_SHOWN = 0.01  # Smallest share of the step time of a cause in the table.
_SAME_PEAK = 0.02  # Relative tolerance of a peak derived from MFU.
# Values that each line has.
_ALWAYS = ("step_time_s", "peak_memory_bytes", "tokens_per_s_per_device")
_LABELS = {
    "step_time_s": "step time, s",
    "tokens_per_s_per_device": "tokens/s per device",
    "mfu": "MFU",
    "peak_allocated_gib": "peak allocated, GiB",
}


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """Summary of the steady lines of a run's metrics.jsonl, as selected by `read_measured`.

    `peak_memory_bytes` is the highest peak of any rank, as counted by the CUDA allocator (on CPUs:
    of the process).
    """

    lines: int
    step_time_s: float  # Without saves of checkpoints, which no plan includes.
    least_s: float  # 10th percentile of the step time in seconds.
    most_s: float  # 90th percentile.
    peak_memory_bytes: int
    tokens_per_s: float  # Tokens per second and device, from the last line.
    mfu: float | None  # From the last line. None: unknown peak FLOP/s.
    time_s: dict[str, float]  # Medians by cause, empty for runs before time_s was logged.


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """A run and the prediction for its recipe."""

    recipe: Recipe
    run: PlannedRun
    cost: Cost
    memory: RankMemory
    measured: RunMetrics

    @property
    def other_device(self) -> str | None:
        """Returns why the run seems to have used a different device from the given one, or None.

        The trainer computes MFU from the peak in the hardware file of the CUDA device. Metrics
        therefore reveal that peak.
        """
        device = self.run.cluster.device
        mfu = self.measured.mfu
        if self.recipe.logging.peak_tflops is not None:
            return None  # The user set the peak, so MFU does not reveal the device.
        if mfu is None and not device.cuda_names:
            return None
        if not mfu:
            return "its metrics have no MFU, as on a CPU or an unknown GPU"
        flops = self.measured.tokens_per_s * model_flops_per_token(self.run.shape, self.run.seq_len)
        real = flops / mfu / 1e12
        named = device.peak(self.run.precision) / 1e12
        if abs(real / named - 1) < _SAME_PEAK:
            return None
        peak = f"its MFU refers to a peak of {real:.4g} TFLOP/s"
        return f"{peak}, but {device.name} has {named:.4g}"

    @property
    def figures(self) -> dict[str, tuple[float, float]]:
        """(predicted, measured) pairs, keyed by metric.

        For a CPU run, MFU and memory are omitted. Its measured peak would include Python and torch.
        """
        cost = self.cost
        step_s = self.measured.step_time_s
        faster = cost.step_time_s / step_s
        speed = cost.tokens_per_s_per_gpu
        figures = {
            "step_time_s": (cost.step_time_s, step_s),
            "tokens_per_s_per_device": (speed, speed * faster),
        }
        if not self.run.on_cpu:
            peak = self.measured.peak_memory_bytes / GIB
            figures["mfu"] = (cost.mfu, cost.mfu * faster)
            figures["peak_allocated_gib"] = (self.memory.allocated / GIB, peak)
        return figures

    @property
    def causes(self) -> dict[str, tuple[float, float | None]]:
        """(predicted, measured) seconds per step by cause. None: the run did not log it."""
        measured = dict(self.measured.time_s)
        if measured:
            measured["overhead"] = measured.pop("other")
            measured.pop("checkpoint")
        predicted = dict.fromkeys(measured, 0.0) | vars(self.cost.parts)
        return {cause: (seconds, measured.get(cause)) for cause, seconds in predicted.items()}

    @property
    def measured_run(self) -> MeasuredRun:
        """The measurements of the run, in the form that `--measured` uses."""
        bytes_ = None if self.run.on_cpu else self.measured.peak_memory_bytes
        return MeasuredRun(
            run=self.run,
            step_time_s=self.measured.step_time_s,
            memory_bytes=bytes_,
        )

    @cached_property
    def scales(self) -> Scales:
        """Corrections of the cluster that this run determines: ratios of measured to predicted
        values.
        """
        return scales_of([self.measured_run])


def answer(options: argparse.Namespace) -> Reply:
    found = compare(options.run_dir, asked_cluster(options))
    return Reply(page=_page(found, options.run_dir), tree=lambda: _tree(found))


def compare(run_dir: Path, cluster: Cluster) -> RunComparison:
    """Predicts a run from the recipe in its folder, and compares the prediction with its metrics.

    Raises:
        ConfigError: The folder has no config.yaml, or it is not a valid recipe.
        DataError: The metrics cannot be used.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_dir}: has no config.yaml; give the run_dir of a run")
    recipe = load_recipe(path, cards=shape_cards())
    framework = COMPILED_PARALLEL3D if recipe.train.compile else PARALLEL3D
    run = replace(run_of_recipe(recipe), cluster=cluster, framework=framework)
    measured = read_measured(run_dir / "metrics.jsonl", recipe)
    return RunComparison(
        recipe=recipe,
        run=run,
        cost=step_cost(run),
        memory=worst_rank(run),
        measured=measured,
    )


def read_measured(path: Path, recipe: Recipe) -> RunMetrics:
    """Summarizes a metrics.jsonl. Ignores the first line, the batch-size warm-up and an incomplete
    last line. Raises DataError for other damaged lines.
    """
    # Imports numpy, which plans do not need.
    from parallel3d.reporting.read_metrics import read_metrics

    try:
        metrics = read_metrics(path)
    except OSError as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"{path}: not the metrics of a run ({why})") from error
    if metrics.damaged or any(isnan(metrics.columns[key].sum()) for key in _ALWAYS):
        raise DataError(f"{path}: not the metrics of a run (a line is damaged)")
    steady = []
    for line, step in enumerate(metrics.columns["step"][:-1], 1):
        if recipe.batch_sizes.at(int(step)) == recipe.train.global_batch_size:
            steady.append(line)
    if not steady:
        why = "too few lines, because the first one includes start-up"
        raise DataError(f"{path}: {why}; train longer, or lower logging.every")
    columns = {key: values[steady].tolist() for key, values in metrics.columns.items()}
    times = columns["step_time_s"]
    logged = [cause for cause in CAUSES if not isnan(sum(columns[cause]))]
    time_s: dict[str, float] = {cause: median(columns[cause]) for cause in logged}
    if time_s:
        times = list(map(sub, times, columns["checkpoint"]))
    mfu = columns["mfu"][-1]
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return RunMetrics(
        lines=len(times),
        step_time_s=median(times),
        least_s=tenths[0],
        most_s=tenths[-1],
        peak_memory_bytes=int(max(columns["peak_memory_bytes"])),
        tokens_per_s=columns["tokens_per_s_per_device"][-1],
        mfu=None if isnan(mfu) else mfu,
        time_s=time_s,
    )


def _page(found: RunComparison, run_dir: Path) -> Iterator[str]:
    recipe = found.recipe
    measured = found.measured
    run = found.run
    yield from wrapped("run", f"{run_dir}: {run.shape.name}, {layout_text(recipe.parallel)}")
    yield from wrapped("hardware", f"{recipe.parallel.world_size} x {run.cluster.device.name}")
    if found.other_device is not None:
        yield from wrapped("CAUTION", f"the run was on another device: {found.other_device}")
    yield ""
    yield f"{'':<28}{'predicted':>12}{'measured':>12}{'error':>9}"
    for kind, (predicted, real) in found.figures.items():
        numbers = f"{three_digits(predicted):>12}{three_digits(real):>12}"
        yield f"{_LABELS[kind]:<28}{numbers}{predicted / real - 1:>+9.1%}"
    least_s = _SHOWN * found.cost.step_time_s
    for cause, (predicted, real_s) in found.causes.items():
        if max(predicted, real_s or 0.0) >= least_s:
            shown = "-" if real_s is None else three_digits(real_s)
            yield f"{f'  {cause}, s':<28}{three_digits(predicted):>12}{shown:>12}"
    yield ""
    spread = f"80% between {measured.least_s:.3g} and {measured.most_s:.3g} s per step"
    lines = f"median of {measured.lines} lines of metrics.jsonl"
    yield from wrapped("measured", f"{lines}; {spread}")
    yield from wrapped("scales", scales_text(found.scales))
    yield from wrapped("how sure", how_sure(run))


def _tree(found: RunComparison) -> object:
    measured = found.measured
    figures: dict[str, Any] = {
        kind: {"predicted": predicted, "measured": real, "error_pct": 100 * (predicted / real - 1)}
        for kind, (predicted, real) in found.figures.items()
    }
    return rounded({
        "schema": "parallel3d.compare/1",
        "layout": layout_text(found.recipe.parallel),
        "other_device": found.other_device,
        "lines": measured.lines,
        "step_time_s_p10_p90": [measured.least_s, measured.most_s],
        "figures": figures,
        "causes": {
            cause: {"predicted_s": predicted, "measured_s": real}
            for cause, (predicted, real) in found.causes.items()
        },
        "scales": scales_tree(found.scales),
        "predicted": {
            "time_s": {kind: getattr(found.cost.parts, kind) for kind in TIME_KINDS},
            "memory_gib": memory_tree(found.memory),
        },
    })  # fmt: skip
