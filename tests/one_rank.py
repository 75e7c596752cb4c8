"""What tests share that run a worker in their own process: a small recipe, the place of its only
rank, and the metrics that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallel3d.config.recipe import LoggingConfig, ModelConfig, Recipe, TrainConfig
from parallel3d.launch.rendezvous import Rendezvous

SMALL = Recipe(
    model=ModelConfig(
        layers=1,
        hidden=16,
        heads=2,
        ffn_hidden=32,
        vocab=264,
    ),
    train=TrainConfig(
        steps=4,
        global_batch_size=2,
        seq_len=16,
        device="cpu",
    ),
    logging=LoggingConfig(every=1),
)


def one_rank(folder: Path) -> Rendezvous:
    """Returns the place of a rank that meets nobody. Its store is a new file in `folder`."""
    store = folder / f"store_{len(list(folder.iterdir()))}"
    return Rendezvous(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        init_method=f"file://{store}",
    )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
