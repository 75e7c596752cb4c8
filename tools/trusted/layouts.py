"""`python -m parallel3d.tools.trusted.layouts [TITLE]`: whether a plan finds the layouts that people trust, those of
tools/cases/layouts.yaml, and how much slower than its own first choice it takes them to be.

Each is asked of its own program with the recompute and the sharding of that run, and of this project's own program
where that can run it; every other choice is the search's."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import yaml

from parallel3d.planner.hardware.program import PARALLEL3D, TrainingProgram
from parallel3d.planner.memory.ranks import worst_rank
from parallel3d.planner.model.planned_run import PlannedRun, other_axes
from parallel3d.planner.model.spread import memory_spread, safe_share
from parallel3d.planner.published.cases import PublishedCase, read_cases
from parallel3d.planner.search.fastest import search
from parallel3d.planner.search.question import Answer, Fixed, Question
from parallel3d.planner.search.ties import settle_ties
from parallel3d.planner.time.step import step_cost
from parallel3d.tools.arguments import HARDWARE
from parallel3d.tools.bench.planner import CASES
from parallel3d.tools.plan.score import recorded_accuracy

FIRST = 5
RISK = 0.05  # a plan's usual risk of not fitting


class Verdict(NamedTuple):
    """The place of a published layout among the first five of a plan, or why it has none."""

    place: int | None
    why: str
    is_memory: bool  # it has no place because it does not fit surely enough
    first: str  # the plan's own first choice
    slower: float | None  # the published layout's predicted step, over that of the first choice, less 1


class PublishedRow(NamedTuple):
    """A published layout and what plans of its own program, and of this project's where that can run it, say of it."""

    title: str
    case: PublishedCase
    said: Verdict
    own: Verdict | None


def trusted(title: str = "") -> Iterator[tuple[str, PublishedCase]]:
    """Yields the runs of layouts.yaml whose titles hold this, the best of several layouts as one."""
    for row in yaml.safe_load(CASES.with_name("layouts.yaml").read_text()):
        if title in row["title"]:
            by_id = {case.id: case for case in read_cases(CASES.with_name(row["file"]), [HARDWARE]).cases}
            yield from ((row["title"], by_id[name]) for name in row.get("runs", ()))
            yield from ((row["title"], case) for case in _best_of(by_id.values(), row.get("best_of", ())))


def _best_of(cases: Iterable[PublishedCase], sources: Sequence[str]) -> Iterator[PublishedCase]:
    groups: dict[object, list[PublishedCase]] = defaultdict(list)
    for case in cases:
        run = case.run
        if case.source in sources and case.measured.metric and not case.apart and "duplicate" not in case.tags:
            job = run.cluster.name, run.layout.world_size, run.global_batch_size, run.seq_len, run.precision
            groups[case.source, run.shape, job].append(case)
    for group in groups.values():
        if len({(case.run.layout.tp, case.run.layout.pp) for case in group}) > 1:
            yield max(group, key=_speed)


def _speed(case: PublishedCase) -> float:
    metric = case.measured.metric or ""
    value: float = getattr(case.measured, metric)
    return -value if metric == "step_time_s" else value


def question_of(case: PublishedCase, program: TrainingProgram) -> Question:
    """Returns what is asked about a run: the same job on the same devices, by this program, and of its own program
    what the source says of recompute, sequence parallelism and the sharing of states."""
    run, layout = case.run, case.run.layout
    fixed = Fixed()
    if layout.cp > 1 and "cp" not in program.axes:  # the program that ran it has that axis, whatever is known of it
        program = replace(program, axes=(*program.axes, "cp"))
    if not program.is_parallel3d:
        in_groups = program.splits_optimizer_alone and layout.optimizer_shards < layout.dp * layout.cp
        fixed = Fixed(
            recompute=layout.recompute if _states_recompute(case) else None,
            sequence_parallel=None if layout.sequence_parallel or layout.tp == 1 else False,
            dp_shard=max(1, layout.optimizer_shards // layout.cp) if in_groups else None,
        )
    spread = memory_spread(program, layout.world_size, run.precision, recorded_accuracy())
    return Question(
        shape=run.shape,
        cluster=run.cluster,
        gpus=layout.world_size,
        seq_len=run.seq_len,
        global_batch_size=run.global_batch_size,
        precision=run.precision,
        program=program,
        fixed=fixed,
        memory_fraction=min(1.0, round(safe_share(spread, RISK), 3)),
    )


def _states_recompute(case: PublishedCase) -> bool:
    """Whether a run is asked about with its own recompute: not where its source leaves that open, where no plan has
    it, or where the run would not fit at all by what it keeps here, because its program frees more."""
    is_open = any("activation_recompute" in field for field in case.filled)
    fits = _filled_share(case.run) <= 1.1
    return not is_open and fits and case.run.layout.recompute in ("none", "selective", "full")


def _filled_share(run: PlannedRun) -> float:
    return worst_rank(run).total / run.cluster.device.memory_bytes


def verdict(case: PublishedCase, program: TrainingProgram) -> Verdict:
    """Asks for a plan by a program under the conditions of a run, and looks for that run's layout in it."""
    run, layout, asked = case.run, case.run.layout, question_of(case, program)
    answer = settle_ties(search(asked, top=FIRST))
    ways = [(s.parallel.tp, s.parallel.pp, other_axes(s.parallel)[0]) for s in answer.strategies]
    here = (layout.tp, layout.pp, layout.cp)
    place = ways.index(here) + 1 if here in ways else None
    is_memory, why = (False, "") if place else _why(answer, here, ways)
    if is_memory and not program.is_parallel3d:
        why = f"fills {_filled_share(run):.0%} of a device, {asked.memory_fraction:.0%} are safe"
    steps = [each.cost.step_time_s for each in answer.strategies]
    took = steps[place - 1] if place else None
    if not program.is_parallel3d and _states_recompute(case):
        took = step_cost(run).step_time_s
    slower = took / steps[0] - 1 if took is not None and steps else None
    return Verdict(place, why, is_memory, layout_text(ways[0]) if ways else "nothing fits", slower)


def _why(answer: Answer, here: tuple[int, int, int], ways: Sequence[tuple[int, int, int]]) -> tuple[bool, str]:
    """Returns whether memory keeps a layout out of an answer, and the reason in its words."""
    if (cp := next((way[2] for way in ways if way[:2] == here[:2]), None)) is not None:
        return False, f"with cp {cp}"
    for refused in answer.rejected:
        if (refused.parallel.tp, refused.parallel.pp) == here[:2]:
            return True, refused.reason
    return False, next((each.reason for each in answer.left_out if (each.tp, each.pp) == here[:2]), "not asked")


def layout_text(way: tuple[int, int, int]) -> str:
    """Returns a layout's tp x pp, and its cp where it has one."""
    return f"{way[0]} x {way[1]}" + (f" x cp {way[2]}" if way[2] > 1 else "")


def rows(title: str = "") -> Iterator[PublishedRow]:
    """Yields the published layouts whose titles hold this, each with what is said of it."""
    for name, case in trusted(title):
        can_run = case.run.precision == "bf16" and case.run.layout.cp == 1
        yield PublishedRow(name, case, verdict(case, case.run.program), verdict(case, PARALLEL3D) if can_run else None)


def summary(found: Sequence[PublishedRow]) -> str:
    """Returns the table of docs/planner.md: a line for each title, and one for all."""
    lines = [
        "| layouts | runs | among five, first | missed for memory, speed | slower: median, most | this project's |",
        "|---|---|---|---|---|---|",
    ]
    for title in [*dict.fromkeys(row.title for row in found), "all"]:
        of = [row for row in found if title in (row.title, "all")]
        said, own = [row.said for row in of], [row.own for row in of if row.own is not None]
        placed = [each for each in said if each.place]
        slower = [each.slower for each in said if each.slower is not None]
        cells = (
            title,
            f"{len(of)}",
            f"{len(placed)}, {sum(each.place == 1 for each in placed)}",
            f"{sum(each.is_memory for each in said)}, {sum(not (each.place or each.is_memory) for each in said)}",
            f"{median(slower):+.1%}, {max(slower):+.1%}" if slower else "-",
            f"{sum(each.place is not None for each in own)} of {len(own)}" if own else "-",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(title: str = "") -> None:
    """Prints each layout with its place, and the summary."""
    print("| layouts | run | tp x pp | place | slower | first | this project's: place, first |")
    print("|---|---|---|---|---|---|---|", flush=True)
    found = []
    for row in rows(title):
        found.append(row)
        layout, said, own = row.case.run.layout, row.said, row.own
        cells = (
            row.title,
            row.case.id,
            layout_text((layout.tp, layout.pp, layout.cp)),
            str(said.place or said.why),
            "-" if said.slower is None else f"{said.slower:+.1%}",
            said.first,
            "-" if own is None else f"{own.place or own.why}, {own.first}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\n{summary(found)}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
