"""`parallel3d-plan calibrate --check`: what a hardware file predicts of eight layouts of a model that it was not
measured with, beside what the trainer takes for them on this machine, their order compared too."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import yaml

from parallel3d.config.recipe import ModelConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from parallel3d.errors import ConfigError, RankError
from parallel3d.launch.local import launch_local
from parallel3d.launch.rendezvous import Rendezvous, choose_device, process_group
from parallel3d.planner.hardware.cluster import Cluster, cluster_from_tree
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.report.text import layout_text
from parallel3d.planner.search.question import Question, Strategy
from parallel3d.tools.reply import Reply

MODEL = ModelConfig(layers=8, hidden=192, heads=8, kv_heads=4, ffn_hidden=512, vocab=1024)
SEQ_LEN, BATCH = 96, 16
LAYOUTS = (  # mostly further apart than a machine's noise, without which their order would say nothing
    ParallelConfig(),
    ParallelConfig(recompute="full"),
    ParallelConfig(tp=2, microbatch_size=2),
    ParallelConfig(pp=2),
    ParallelConfig(dp_shard=2, microbatch_size=8),
    ParallelConfig(pp=2, virtual_stages=2, schedule="interleaved_1f1b", dp_replicate=2, sharding="NO_SHARD"),
    ParallelConfig(dp_shard=2, tp=2, sequence_parallel=True),
    ParallelConfig(tp=4),
)
TARGET = "parallel3d.tools.calibrate.check:worker"
_PRELOAD = ("torch", "parallel3d.tools.calibrate.check", "parallel3d.training.trainer", "parallel3d.models.llama")
_PASSES, _ROUNDS = 2, 5
_RESULT = "step_time_s"


@dataclass(frozen=True, kw_only=True)
class CheckedStep:
    """The predicted and the measured seconds of a step in one layout."""

    layout: str
    processes: int
    predicted_s: float
    measured_s: float

    @property
    def error_pct(self) -> float:
        return 100 * (self.predicted_s / self.measured_s - 1)


def check(text: str, *, device: Literal["auto", "cpu", "cuda"]) -> Reply:
    """Trains every layout, and compares with what the hardware file of this `text` predicts."""
    cluster = cluster_from_tree(yaml.safe_load(text), "calibrated")
    if cluster.measured is None:
        raise ConfigError("--check: the file has no section `measured`; parallel3d-plan calibrate -o FILE writes one")
    least_s = [float("inf")] * len(LAYOUTS)
    for done in range(_PASSES * len(LAYOUTS)):  # twice through all, for what else the machine does meanwhile
        at = done % len(LAYOUTS)
        print(f"[{done + 1}/{_PASSES * len(LAYOUTS)}] {layout_text(LAYOUTS[at])}", file=sys.stderr, flush=True)
        least_s[at] = min(least_s[at], _train(LAYOUTS[at], device))
    found = [
        CheckedStep(
            layout=layout_text(parallel),
            processes=parallel.world_size,
            predicted_s=predicted_s(cluster, parallel),
            measured_s=measured_s,
        )
        for parallel, measured_s in zip(LAYOUTS, least_s, strict=True)
    ]
    return Reply(page=lambda: _page(found), tree=lambda: _tree(found))


def predicted_s(cluster: Cluster, parallel: ParallelConfig) -> float:
    """Returns the predicted seconds of a step of the check's model."""
    return Strategy(question(cluster, parallel), parallel).cost.step_time_s


def question(cluster: Cluster, parallel: ParallelConfig) -> Question:
    return Question(
        shape=from_config(MODEL),
        cluster=cluster,
        gpus=parallel.world_size,
        seq_len=SEQ_LEN,
        global_batch_size=BATCH,
        precision="fp32",
    )


def _train(parallel: ParallelConfig, device: Literal["auto", "cpu", "cuda"]) -> float:
    with tempfile.TemporaryDirectory(prefix="parallel3d-check-") as folder:
        recipe = Recipe(
            model=MODEL,
            parallel=parallel,
            train=TrainConfig(steps=1_000_000, global_batch_size=BATCH, seq_len=SEQ_LEN, device=device),
            optimizer=OptimizerConfig(lr=1e-4),
            run_dir=folder,
        )
        status = launch_local(TARGET, recipe, parallel.world_size, preload=_PRELOAD)
        if status != 0:
            raise RankError(f"{layout_text(parallel)}: did not finish (exit status {status})")
        return float((Path(folder) / _RESULT).read_text())


def worker(recipe: Recipe, rendezvous: Rendezvous) -> None:
    """Runs on every rank: times the recipe's steps. Rank 0 writes the result into `run_dir`."""
    from parallel3d.tools.calibrate.probes import time_probes

    device = choose_device(recipe.train.device, rendezvous)
    with process_group(rendezvous, device, recipe.train.timeout_s):
        (seconds,) = time_probes([recipe], device, rounds=_ROUNDS)
    if rendezvous.rank == 0:
        assert recipe.run_dir is not None
        (Path(recipe.run_dir) / _RESULT).write_text(repr(seconds))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Spearman's correlation, that of the places; equal values share theirs."""
    a, b = _places(first), _places(second)
    mean = (len(a) - 1) / 2
    shared = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return shared / spread if spread else 0.0


def _places(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (list(values).count(value) - 1) / 2 for value in values]


def _tree(found: Sequence[CheckedStep]) -> dict[str, object]:
    return {
        "layouts": [{**asdict(each), "error_pct": each.error_pct} for each in found],
        "worst_abs_error_pct": max(abs(each.error_pct) for each in found),
        "rank_correlation": _correlation(found),
    }


def _correlation(found: Sequence[CheckedStep]) -> float:
    return rank_correlation([each.predicted_s for each in found], [each.measured_s for each in found])


def _page(found: Sequence[CheckedStep]) -> Iterator[str]:
    yield "processes  predicted   measured    error  layout"
    for each in found:
        times = f"{each.predicted_s * 1e3:>8.1f} ms{each.measured_s * 1e3:>8.1f} ms"
        yield f"{each.processes:>9}{times}{each.error_pct:>+8.1f}%  {each.layout}"
    worst = max(abs(each.error_pct) for each in found)
    yield f"worst error {worst:.0f}%, rank correlation (Spearman) {_correlation(found):.2f}"
