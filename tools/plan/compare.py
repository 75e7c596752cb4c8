"""`parallel3d-plan compare RUN_DIR`: what a run measured of itself, beside what the planner says of its recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError, DataError
from parallel3d.models import shape_cards
from parallel3d.planner.hardware.cluster import Cluster
from parallel3d.planner.hardware.units import GIB, rounded
from parallel3d.planner.memory.rank_memory import RankMemory, worst_rank
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.report.json import memory_tree
from parallel3d.planner.report.text import TIME_KINDS, layout_text, time_text, wrapped
from parallel3d.planner.time.step import Cost, step_cost
from parallel3d.tools.arguments import Parser, plan_parser
from parallel3d.tools.plan.devices import find_cluster
from parallel3d.tools.verify.command import run_of_recipe

_LABELS = {
    "step_time_s": "step, s",
    "tokens_per_s_per_device": "tokens/s a device",
    "mfu": "MFU",
    "peak_allocated_gib": "peak allocated, GiB",
}
_EPILOG = """\
examples:
  parallel3d-plan compare runs/quickstart --hardware mine.yaml     # of parallel3d-plan calibrate -o mine.yaml
  parallel3d-plan compare runs/llama3-8b --gpu h100

measured: the median of the lines of metrics.jsonl but the first, which has the start in it, and those of a batch that
still grows
exit status: 0 done, 2 a bad input, 65 a run folder that cannot be read
"""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of a run's lines: seconds of a step, and bytes of its fullest rank (the allocator's on CUDA)."""

    lines: int
    step_time_s: float
    least_s: float  # the tenth and the ninetieth percentile
    most_s: float
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A run and its prediction."""

    recipe: Recipe
    run: PlannedRun
    cost: Cost
    memory: RankMemory
    measured: Measured

    @property
    def figures(self) -> dict[str, tuple[float, float]]:
        """Predicted and measured, by name. On a CPU what is measured of memory is the whole process, Python's too, and
        is not compared."""
        found, step_s = self.measured, self.measured.step_time_s
        tokens = self.recipe.train.global_batch_size * self.recipe.train.seq_len / self.recipe.parallel.world_size
        figures = {
            "step_time_s": (self.cost.step_time_s, step_s),
            "tokens_per_s_per_device": (self.cost.tokens_per_s_per_gpu, tokens / step_s),
        }
        if not self.run.on_cpu:
            figures["mfu"] = (self.cost.mfu, self.cost.mfu * self.cost.step_time_s / step_s)
            figures["peak_allocated_gib"] = (self.memory.allocated / GIB, found.peak_memory_bytes / GIB)
        return figures


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    name = options.hardware or options.gpu
    if name is None or (options.hardware and options.gpu):
        raise ConfigError("--gpu, --hardware: what the run was on, one of the two; try --gpu h100")
    found = compare(options.run_dir, find_cluster(name))
    print(json.dumps(_tree(found)) if options.json else "\n".join(_page(found, options.run_dir)))
    return 0


def compare(run_dir: Path, cluster: Cluster) -> Compared:
    """Raises ConfigError for a folder that is no run's, DataError for metrics that cannot be used."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_dir}: no run's folder, it has no config.yaml; try runs/quickstart")
    recipe = load_recipe(path, cards=shape_cards())
    run = replace(run_of_recipe(recipe), cluster=cluster)
    measured = read_measured(run_dir / "metrics.jsonl", recipe)
    return Compared(recipe=recipe, run=run, cost=step_cost(run), memory=worst_rank(run), measured=measured)


def read_measured(path: Path, recipe: Recipe) -> Measured:
    """Of a metrics.jsonl; a last line that was cut off counts as none."""
    try:
        text = path.read_text()
        lines = [json.loads(line) for line in text.split("\n")[:-1]]
        steady = [
            line
            for before, line in zip(lines, lines[1:], strict=False)
            if recipe.batch_sizes.at(before["step"]) == recipe.train.global_batch_size
        ]
        times = [float(line["step_time_s"]) for line in steady]
        peak = max((int(line["peak_memory_bytes"]) for line in steady), default=0)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the metrics of a run ({type(error).__name__}: {error})") from error
    if not times:
        raise DataError(f"{path}: has too few lines; the first has the start in it: train on, or lower logging.every")
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times
    return Measured(
        lines=len(times), step_time_s=median(times), least_s=tenths[0], most_s=tenths[-1], peak_memory_bytes=peak
    )


def _parser() -> Parser:
    parser = plan_parser(
        "compare",
        takes="RUN_DIR (--gpu NAME | --hardware FILE) [--json]",
        does="A run that was made, beside the plan of its recipe.",
        epilog=_EPILOG,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder: config.yaml and metrics.jsonl")
    parser.add_argument("--gpu", metavar="NAME", help="the device it was on, such as h100")
    parser.add_argument("--hardware", "--cluster", metavar="FILE", help="or your own file, or a cluster's name")
    return parser


def _page(found: Compared, run_dir: Path) -> Iterator[str]:
    recipe, measured, run = found.recipe, found.measured, found.run
    name = recipe.model.name or recipe.model.architecture
    yield from wrapped("run", f"{run_dir}: {name}, {layout_text(recipe.parallel)}")
    yield from wrapped("hardware", f"{recipe.parallel.world_size} x {run.cluster.device.name}")
    yield ""
    yield f"{'':<28}{'predicted':>12}{'measured':>12}{'error':>9}"
    for kind, (predicted, real) in found.figures.items():
        shown = (f"{number:,.0f}" if number >= 1000 else f"{number:.3g}" for number in (predicted, real))
        yield f"{_LABELS[kind]:<28}{next(shown):>12}{next(shown):>12}{predicted / real - 1:>+9.1%}"
    yield ""
    spread = f"80% of them from {measured.least_s:.3g} to {measured.most_s:.3g} s a step"
    yield from wrapped("measured", f"the median of {measured.lines} lines of metrics.jsonl; {spread}")
    yield from wrapped("time", f"as predicted: {time_text(found.cost.parts)}")
    if run.on_cpu:
        yield from wrapped("memory", "what a CPU's process holds is Python's and torch's too, and not compared")


def _tree(found: Compared) -> object:
    measured = found.measured
    figures: dict[str, Any] = {
        kind: {"predicted": predicted, "measured": real, "error_pct": 100 * (predicted / real - 1)}
        for kind, (predicted, real) in found.figures.items()
    }
    return rounded({
        "schema": "parallel3d.compare/1",
        "layout": layout_text(found.recipe.parallel),
        "lines": measured.lines,
        "step_time_s_p10_p90": [measured.least_s, measured.most_s],
        "figures": figures,
        "predicted": {
            "time_s": {kind: getattr(found.cost.parts, kind) for kind in TIME_KINDS},
            "memory_gib": memory_tree(found.memory),
        },
    })  # fmt: skip
