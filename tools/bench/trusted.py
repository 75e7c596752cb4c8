"""`bench trusted`: compares published layouts (layouts.yaml) with the planner's recommendations.

Each job is planned for the framework that ran it and, if possible, for parallel3d. For the former,
recompute, sequence parallelism and sharding are those of the run, as far as known. A published
layout is missed if its tp x pp x cp is not among the first five strategies. Other rows compare
predicted step times of the first strategy and the published layout.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.framework import PARALLEL3D, FrameworkProfile
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.uncertainty import memory_spread, safe_share
from parallel3d.planner.published.cases import PublishedCase, read_cases
from parallel3d.planner.search.best_layouts import search
from parallel3d.planner.search.request import Fixed, PlanRequest
from parallel3d.planner.time.step import step_cost
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.bench.planner import CASES
from parallel3d.tools.bench.report import Options, ResultRow, announced, chosen, row_of
from parallel3d.tools.plan.accuracy import recorded_accuracy

FIRST = 5
RISK = 0.05  # default probability of running out of memory
LAYOUTS = Path(__file__).with_name("layouts.yaml")


@dataclass(frozen=True)
class Verdict:
    """Place of a published layout in a plan: 1 to `FIRST`, or None if it is missed."""

    place: int | None
    # Predicted step times in seconds of the first strategy and the published layout, if known.
    steps_s: tuple[float, float] | None


def bench_trusted(options: Options) -> list[ResultRow]:
    """Returns the rows of the selected groups of layouts."""
    if options.rounds is not None or options.steps is not None:
        raise ConfigError("bench trusted: has no timing; omit --rounds and --steps")
    groups = {entry["title"]: entry for entry in yaml.safe_load(LAYOUTS.read_text())}
    rows: list[ResultRow] = []
    for title in announced(chosen(groups, options)):
        cases = cases_of(groups[title])
        theirs = [verdict(case, case.run.framework) for case in cases]
        can_run = [c for c in cases if c.run.precision == "bf16" and c.run.layout.cp == 1]
        ours = [verdict(case, PARALLEL3D) for case in can_run]
        rows += rows_of(title, theirs)
        rows += rows_of(f"{title}, planned for parallel3d", ours)
        for case, said in zip(cases, theirs, strict=True):
            print(f"  {case.id}: place {said.place}", file=sys.stderr)
    return rows


def rows_of(title: str, verdicts: Sequence[Verdict]) -> list[ResultRow]:
    """Returns a row of the missed layouts among all, and one of predicted step times."""
    if not verdicts:
        return []
    missed = sum(each.place is None for each in verdicts)
    rows = [row_of(title, "missed_layouts", [(missed, len(verdicts))])]
    steps = [each.steps_s for each in verdicts if each.steps_s is not None]
    if steps:
        rows.append(row_of(title, "predicted_step_s", steps))
    return rows


def cases_of(entry: dict[str, Any]) -> list[PublishedCase]:
    """Returns the runs that an entry of layouts.yaml names, and the fastest of `best_of` groups."""
    cases = read_cases(CASES.with_name(entry["file"]), [HARDWARE]).cases
    by_id = {case.id: case for case in cases}
    named = [by_id[name] for name in entry.get("runs", ())]
    return named + list(_fastest([c for c in cases if c.source in entry.get("best_of", ())]))


def _fastest(cases: Sequence[PublishedCase]) -> Iterator[PublishedCase]:
    groups: dict[object, list[PublishedCase]] = defaultdict(list)
    for case in cases:
        run = case.run
        if case.speed and not case.apart and "duplicate" not in case.tags:
            job = (run.cluster.name, run.layout.world_size, run.global_batch_size, run.seq_len)
            groups[case.source, run.shape, run.precision, job].append(case)
    for group in groups.values():
        if len({(case.run.layout.tp, case.run.layout.pp) for case in group}) > 1:
            yield max(group, key=_speed)


def _speed(case: PublishedCase) -> float:
    assert case.speed is not None
    metric, value = case.speed
    return -value if metric == "step_time_s" else value


def question_of(case: PublishedCase, framework: FrameworkProfile) -> PlanRequest:
    """Returns a plan request for the job and devices of a published run, with this framework."""
    run = case.run
    layout = case.run.layout
    if layout.cp > 1 and "cp" not in framework.axes:  # The published run used this axis.
        framework = replace(framework, axes=(*framework.axes, "cp"))
    fixed = Fixed()
    if not framework.is_parallel3d:
        dp_shard = None
        if framework.splits_optimizer_alone and layout.optimizer_shards < layout.dp * layout.cp:
            dp_shard = max(1, layout.optimizer_shards // layout.cp)
        is_plain_tp = layout.tp > 1 and not layout.sequence_parallel
        fixed = Fixed(
            recompute=layout.recompute if _states_recompute(case) else None,
            sequence_parallel=False if is_plain_tp else None,
            dp_shard=dp_shard,
        )
    spread = memory_spread(framework)
    return PlanRequest(
        shape=run.shape,
        cluster=run.cluster,
        gpus=layout.world_size,
        seq_len=run.seq_len,
        global_batch_size=run.global_batch_size,
        precision=run.precision,
        framework=framework,
        fixed=fixed,
        memory_fraction=min(1.0, round(safe_share(spread, RISK), 3)),
        recorded=recorded_accuracy(),
    )


def _states_recompute(case: PublishedCase) -> bool:
    """Returns True if the plan must use the recompute setting of the run.

    It must if the source states it, the planner supports it, and the run nearly fits with it.
    """
    run = case.run
    is_open = any("activation_recompute" in field for field in case.filled)
    fits = worst_rank(run).total <= 1.1 * run.cluster.device.memory_bytes
    return not is_open and fits and run.layout.recompute in ("none", "selective", "full")


def verdict(case: PublishedCase, framework: FrameworkProfile) -> Verdict:
    """Plans the job of a run and looks for the run's layout in the plan."""
    layout = case.run.layout
    strategies = search(question_of(case, framework), top=FIRST).strategies
    found = [(s.parallel.tp, s.parallel.pp, s.parallel.cp) for s in strategies]
    published = (layout.tp, layout.pp, layout.cp)
    place = found.index(published) + 1 if published in found else None
    took_s = strategies[place - 1].cost.step_time_s if place else None
    if not framework.is_parallel3d and _states_recompute(case):
        took_s = step_cost(case.run).step_time_s
    if took_s is None or not strategies:
        return Verdict(place, None)
    return Verdict(place, (strategies[0].cost.step_time_s, took_s))
