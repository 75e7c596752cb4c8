"""Predicts published runs and computes the errors of the predictions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log, log1p
from statistics import mean, median
from typing import Any

from parallel3d.planner.hardware.framework import STACKS
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.memory.ranks import memory_by_rank, needed_bytes
from parallel3d.planner.model.parameters import reported_flops_per_token, total_parameters
from parallel3d.planner.model.uncertainty import FIGURES, ErrorModel, Figure
from parallel3d.planner.published.cases import CaseFile, PublishedCase
from parallel3d.planner.time.step import step_cost

_PRIOR_SOURCES = 10  # weight of the prior (a quality of 1), as a number of sources


@dataclass(frozen=True)
class Prediction:
    """Predicted values of a case. TFLOP/s and MFU follow the FLOP definition of the measurement,
    and memory its kind and rank."""

    parameters: int
    fits: bool
    memory_gib: float
    step_time_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float


@dataclass(frozen=True)
class ScoredCase:
    """A case with its errors. `error_pct` is for throughput if measured, else for memory.

    Positive errors mean that the prediction is higher than the measurement.
    """

    id: str
    source: str
    stack: str  # Stack that the prediction used.
    predicted: Prediction
    measured: Mapping[str, Any]  # Measured values, as the source states them.
    error_pct: float | None
    errors_pct: dict[str, float]  # Errors in percent, keyed by "throughput" and "memory".
    spread: ErrorModel | None  # error model of the prediction, for its range
    apart: str  # reason to exclude it from the totals, or ""
    filled: tuple[str, ...]  # fields that the source omits, with the origin of the value


@dataclass(frozen=True)
class Errors:
    """Absolute errors of a group of cases in percent, and the median signed error."""

    cases: int
    median: float | None = None
    p90: float | None = None
    # Median signed error. Positive if predictions are higher than measurements.
    bias: float | None = None
    # Percentage of measurements within the range of their prediction.
    covered: float | None = None


@dataclass(frozen=True)
class Fit:
    """Percentage of cases that were correctly predicted to fit or to run out of memory."""

    cases: int
    accuracy: float | None = None
    balanced_accuracy: float | None = None


@dataclass(frozen=True)
class Score:
    """All cases, and totals. Totals of FP8, MoE, context-parallel and single-layer runs are in
    `apart` only."""

    cases: tuple[ScoredCase, ...]
    skipped: tuple[tuple[str, str], ...]  # (id, reason) of cases that cannot be read or predicted
    median_abs_error_pct: float | None
    worst_abs_error_pct: float | None
    throughput: Errors
    memory: Errors
    fit: Fit
    by_source: dict[str, dict[str, Errors]]
    apart: dict[str, dict[str, Errors]]

    def to_json(self) -> Any:
        """Returns a JSON tree with rounded floats and the ranges of each prediction."""
        tree = asdict(self)
        for case, row in zip(self.cases, tree["cases"], strict=True):
            row["ranges"] = _ranges(case.predicted, case.spread) if case.spread else None
            del row["spread"]
        return rounded(tree)


def _ranges(of: Prediction, spread: ErrorModel) -> dict[str, Any]:
    ranges = {"memory_gib": asdict(spread.around("memory", of.memory_gib))}
    for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"):
        ranges[name] = asdict(spread.around("throughput", getattr(of, name)))
    return ranges


def predict_case(case: PublishedCase) -> Prediction:
    """Predicts a case with this planner."""
    run = case.run
    ranks = memory_by_rank(run)
    worst = max(ranks, key=lambda memory: memory.total)
    memory_bytes = worst.total
    if case.measured.peak_memory_gib:
        by_name = {"worst": worst, "first": ranks[0], "last": ranks[-1]}
        memory_bytes = by_name[case.measured.memory_rank].of_kind(case.measured.memory_kind)
    return prediction(
        case,
        parameters=total_parameters(run.shape),
        fits=needed_bytes(run, ranks) <= run.cluster.device.memory_bytes,
        memory_gib=memory_bytes / GIB,
        step_time_s=step_cost(run).step_time_s,
    )


def prediction(
    case: PublishedCase,
    *,
    parameters: int,
    fits: bool,
    memory_gib: float,
    step_time_s: float,
) -> Prediction:
    """Completes a prediction with speeds that follow from the step time."""
    run = case.run
    tokens_per_s_per_gpu = run.tokens_per_step / (step_time_s * run.layout.world_size)
    flops = tokens_per_s_per_gpu * reported_flops_per_token(
        run.shape, run.seq_len, case.measured.flops
    )
    return Prediction(
        parameters=parameters,
        fits=fits,
        memory_gib=memory_gib,
        step_time_s=step_time_s,
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        tflops_per_gpu=flops / 1e12,
        mfu=flops / run.cluster.device.peak(run.precision),
    )


def score(
    file: CaseFile,
    predict: Callable[[PublishedCase], Prediction] = predict_case,
    *,
    spread_of_case: Callable[[PublishedCase], ErrorModel] | None = None,
) -> Score:
    """Scores predictions for all cases of a file.

    Totals exclude duplicates and cases with a reason in `apart`. Cases that cannot be predicted are
    skipped with a reason.

    Args:
        file: Cases to predict.
        predict: Predictor to score. Default: this planner.
        spread_of_case: Error model of a case's prediction. Without it predictions have no range.
    """
    scored = []
    skipped = list(file.skipped)
    of_source = defaultdict(list)
    of_reason = defaultdict(list)
    for case in file.cases:
        try:
            spread = spread_of_case(case) if spread_of_case else None
            one = _score_case(case, predict(case), spread)
        except (ArithmeticError, LookupError, ValueError) as problem:
            skipped.append((case.id, f"cannot be predicted ({problem})"))
            continue
        scored.append(one)
        if one.apart:
            of_reason[one.apart].append(one)
        elif "duplicate" not in case.tags:
            of_source[one.source].append(one)
    counted = sum(of_source.values(), [])
    sizes = [abs(one.error_pct) for one in counted if one.error_pct is not None]
    return Score(
        cases=tuple(scored),
        skipped=tuple(skipped),
        median_abs_error_pct=median(sizes) if sizes else None,
        worst_abs_error_pct=max(sizes, default=None),
        **_totals(counted),
        fit=_fit(counted),
        by_source={name: _totals(group) for name, group in of_source.items()},
        apart={name: _totals(group) for name, group in of_reason.items()},
    )


def without_own_sources(file: CaseFile, plain: Score) -> CaseFile:
    """Returns the cases, each with a stack quality fitted on all sources except its own.

    `plain` is the score of the unchanged cases.
    """
    errors = defaultdict(list)
    for one in plain.cases:
        if "throughput" in one.errors_pct and not one.apart:
            error = log1p(one.errors_pct["throughput"] / 100)
            errors[one.stack, one.source].append(error + log(STACKS[one.stack].quality))
    found = []
    for case in file.cases:
        others = [
            own
            for (stack, source), own in errors.items()
            if stack == case.stack and source != case.source
        ]
        framework = replace(case.run.framework, quality=stack_quality(others))
        found.append(replace(case, run=replace(case.run, framework=framework)))
    return replace(file, cases=tuple(found))


def stack_quality(errors_by_source: Sequence[Sequence[float]]) -> float:
    """Estimates the ratio of measured to predicted step time of a stack from log errors.

    It is the median over sources of their median errors, shrunk towards 1 with the weight of ten
    sources.
    """
    count = len(errors_by_source)
    if not count:
        return 1.0
    return exp(median(map(median, errors_by_source)) * count / (count + _PRIOR_SOURCES))


def _fit(counted: Sequence[ScoredCase]) -> Fit:
    """Returns the accuracy of `Prediction.fits`, overall and balanced over both outcomes."""
    by_status = defaultdict(list)
    for one in counted:
        status = one.measured["status"]
        by_status[status].append(one.predicted.fits == (status == "ok"))
    if not counted:
        return Fit(cases=0)
    right = sum(by_status.values(), [])
    return Fit(
        cases=len(counted),
        accuracy=100 * mean(right),
        balanced_accuracy=100 * mean(map(mean, by_status.values())),
    )


def _score_case(
    case: PublishedCase, predicted: Prediction, spread: ErrorModel | None
) -> ScoredCase:
    measured = case.measured
    errors = {}
    if case.speed:
        metric, said = case.speed
        ratio = getattr(predicted, metric) / said
        if metric == "step_time_s":
            ratio = 1 / ratio
        errors["throughput"] = 100 * (ratio - 1)
    if measured.peak_memory_gib:
        errors["memory"] = 100 * (predicted.memory_gib / measured.peak_memory_gib - 1)
    return ScoredCase(
        id=case.id,
        source=case.source,
        stack=case.stack,
        predicted=predicted,
        measured=measured.model_dump(),
        error_pct=errors.get("throughput", errors.get("memory")),
        errors_pct=errors,
        spread=spread,
        apart=case.apart,
        filled=case.filled,
    )


def _totals(group: Sequence[ScoredCase]) -> dict[str, Errors]:
    return {figure: _errors(group, figure) for figure in FIGURES}


def _errors(group: Sequence[ScoredCase], figure: Figure) -> Errors:
    signed = []
    inside = []
    for one in group:
        if figure in one.errors_pct:
            error = one.errors_pct[figure]
            signed.append(error)
            if one.spread:
                inside.append(abs(log1p(error / 100)) <= getattr(one.spread, figure))
    if not signed:
        return Errors(cases=0)
    sizes = sorted(map(abs, signed))
    return Errors(
        cases=len(sizes),
        median=median(sizes),
        p90=sizes[int(0.9 * (len(sizes) - 1) + 0.5)],
        bias=median(signed),
        covered=100 * mean(inside) if inside else None,
    )
