"""`parallel3d-plan calibrate --check`: what a hardware file predicts of eight layouts of a model
that it was not measured with, beside what the trainer takes for them on this machine, their order
compared too."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from statistics import correlation
from typing import Any, Literal

import yaml

from parallel3d.config.recipe import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrainConfig,
)
from parallel3d.errors import ConfigError
from parallel3d.planner.hardware.cluster import Cluster, cluster_from_tree
from parallel3d.planner.model.shapes import from_config
from parallel3d.planner.report.text import layout_text
from parallel3d.planner.search.question import Question, Strategy
from parallel3d.tools.calibrate.worker import run_workers, train
from parallel3d.tools.reply import Reply

MODEL = ModelConfig(layers=8, hidden=192, heads=8, kv_heads=4, ffn_hidden=512, vocab=1024)
SEQ_LEN = 96
BATCH = 16
# mostly further apart than a machine's noise, without which their order would say nothing
LAYOUTS = (
    ParallelConfig(),
    ParallelConfig(recompute="full"),
    ParallelConfig(tp=2, microbatch_size=2),
    ParallelConfig(pp=2),
    ParallelConfig(dp_shard=2, microbatch_size=8),
    ParallelConfig(
        pp=2, virtual_stages=2, schedule="interleaved_1f1b", dp_replicate=2, sharding="NO_SHARD"
    ),
    ParallelConfig(dp_shard=2, tp=2, sequence_parallel=True),
    ParallelConfig(tp=4),
)
_PASSES = 2


def check(text: str, *, device: Literal["auto", "cpu", "cuda"]) -> Reply:
    """Trains every layout, and compares with what the hardware file of this `text` predicts."""
    cluster = cluster_from_tree(yaml.safe_load(text), "calibrated")
    if cluster.measured is None:
        raise ConfigError(
            "--check: the file has no section `measured`; parallel3d-plan calibrate -o FILE writes "
            "one"
        )
    steps = TrainConfig(steps=1_000_000, global_batch_size=BATCH, seq_len=SEQ_LEN, device=device)
    optimizer = OptimizerConfig(lr=1e-4)
    least_s: dict[ParallelConfig, float] = {}
    # twice through all, for what else the machine does meanwhile
    for parallel in LAYOUTS * _PASSES:
        print(layout_text(parallel), file=sys.stderr, flush=True)
        recipe = Recipe(model=MODEL, parallel=parallel, train=steps, optimizer=optimizer)
        taken_s = run_workers(train, recipe)
        least_s[parallel] = min(taken_s, least_s.get(parallel, taken_s))
    rows: list[dict[str, Any]] = []
    for parallel, measured_s in least_s.items():
        predicted = predicted_s(cluster, parallel)
        rows.append(
            {
                "layout": layout_text(parallel),
                "processes": parallel.world_size,
                "predicted_s": predicted,
                "measured_s": measured_s,
                "error_pct": 100 * (predicted / measured_s - 1),
            }
        )
    worst = max(abs(row["error_pct"]) for row in rows)
    places = [_places([row[key] for row in rows]) for key in ("predicted_s", "measured_s")]
    rank_correlation = correlation(*places)  # Spearman's

    def page() -> Iterator[str]:
        yield "processes  predicted   measured    error  layout"
        for row in rows:
            times = f"{row['predicted_s'] * 1e3:>8.1f} ms{row['measured_s'] * 1e3:>8.1f} ms"
            yield f"{row['processes']:>9}{times}{row['error_pct']:>+8.1f}%  {row['layout']}"
        yield f"worst error {worst:.0f}%, rank correlation (Spearman) {rank_correlation:.2f}"

    tree = {"layouts": rows, "worst_abs_error_pct": worst, "rank_correlation": rank_correlation}
    return Reply(page=page, tree=lambda: tree)


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


def _places(values: Sequence[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]
