"""What runs leave behind, in the format of real runs and written without training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.manifest import MANIFEST_FILE, Progress
from parallel3d.reporting.metrics import StepMetrics
from parallel3d.schedules.build import build_schedule
from parallel3d.timeline.draw import draw_trace
from parallel3d.timeline.simulate import ActionTimes, StageTimes, simulate
from parallel3d.watch.step_clock import CAUSES

_SHARES = {
    "compute": 0.5,
    "recompute": 0.05,
    "tp": 0.1,
    "pp_bubble": 0.12,
    "pp_p2p": 0.03,
    "dp": 0.08,
    "optimizer": 0.06,
    "data": 0.02,
    "checkpoint": 0.01,
    "other": 0.03,
}
RECIPE = """
model: {layers: 4, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 264}
parallel: {pp: 2, tp: 2}
train: {steps: 100, global_batch_size: 8, seq_len: 512, precision: bf16}
"""
METRICS = StepMetrics(
    step=20,
    loss=3.12345,
    lr=1e-3,
    grad_norm=0.8123,
    tokens=40_960,
    step_time_s=0.25,
    tokens_per_s=8192.0,
    tokens_per_s_per_device=1024.0,
    mfu=None,
    peak_memory_bytes=412 * 2**20,
)
PROGRESS = Progress(
    step=1,
    tokens=2,
    seed=3,
    global_batch_size=4,
    seq_len=5,
    parameters=6,
    parallel={"tp": 2},
    drawn={"a": 7},
)
STEP_S = 0.25
EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\x1b[31m\u202e\nred",
)


def line(step: int, **changed: Any) -> dict[str, Any]:
    """Returns a line of metrics. Keys of `changed` replace or add values."""
    step_time_s = changed.get("step_time_s", STEP_S * (1 + 0.1 * math.sin(step)))
    times = {cause: _SHARES.get(cause, 0.0) * step_time_s for cause in CAUSES}
    rate = 4096 / step_time_s
    return {
        "step": step,
        "loss": 2.0 + 4.0 / (1 + step / 10) + 0.05 * math.sin(7.0 * step),
        "lr": 1e-3 * min(1.0, step / 20),
        "grad_norm": 0.5 + 0.2 * math.cos(5.0 * step),
        "tokens": 4096 * step,
        "step_time_s": step_time_s,
        "tokens_per_s": rate,
        "tokens_per_s_per_device": rate / 4,
        "mfu": 0.4 * STEP_S / step_time_s,
        "peak_memory_bytes": 6 << 30,
        "peak_reserved_bytes": 7 << 30,
        "val_loss": 2.1 + 4.0 / (1 + step / 10) if step % 25 == 0 else None,
        "spikes": 0,
        "rollbacks": 0,
        "skipped_steps": 0,
        "time_s": times,
        "time_spread_s": {cause: [0.8 * time, 1.1 * time] for cause, time in times.items()},
        "memory_bytes": {
            "parameters": 1 << 30,
            "gradients": 1 << 30,
            "optimizer": 2 << 30,
            "buffers": 1 << 20,
            "activations": 3 << 29,
        },
        **changed,
    }


def start(step: int, parallel: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """Returns a start of run.json."""
    return {
        "command": ["parallel3d-train", "quickstart", "train.steps=100"],
        "start": "2026-01-02T03:04:05+00:00",
        "end": None,
        "status": None,
        "exit_status": None,
        "reason": None,
        "step": step,
        "recipe": {"parallel": parallel, "optimizer": {"lr": 0.001}},
        "versions": {
            "parallel3d": "0.1.0",
            "commit": "a1b2c3d",
            "dirty": False,
            "torch": "2.11.0",
        },
        "hosts": {"node-1": [0, 1, 2, 3]},
        "devices": {"CPU": [0, 1, 2, 3]},
        "environment": {"OMP_NUM_THREADS": "1"},
        "saved": [25, 50],
        **changed,
    }


def write_run(
    folder: Path,
    lines: Iterable[dict[str, Any]],
    *,
    starts: Sequence[dict[str, Any]] = (),
    outcome: dict[str, Any] | None = None,
    recipe: str = RECIPE,
    checkpoints: Sequence[int] = (),
) -> Path:
    """Writes the folder of a run."""
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(each) + "\n" for each in lines)
    (folder / "config.yaml").write_text(recipe)
    if starts:
        tree = {"schema": "parallel3d.run/1", "starts": list(starts)}
        (folder / "run.json").write_text(json.dumps(tree))
    if outcome is not None:
        (folder / "outcome.json").write_text(json.dumps(outcome))
    for step in checkpoints:
        checkpoint = folder / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / MANIFEST_FILE).write_text("{}")
    return folder


def resumed_run(folder: Path) -> Path:
    """Writes a run that was killed after step 60, resumed from step 50 in another layout, skipped
    steps 71 and 72, had a spike at 80 with a rollback, and failed after step 90."""
    lines = []
    for step in range(1, 91):
        loss = {"loss": 9.0} if step == 80 else {}
        slow = {"step_time_s": 1.0} if step in (1, 51) else {}
        counts = {
            "skipped_steps": min(2, max(0, step - 70)),
            "spikes": int(step >= 80),
            "rollbacks": int(step >= 81),
        }
        lines.append(line(step, **loss, **slow, **counts))
    reason = "rank 3 (node-1, pp 1, tp 0): was killed by SIGKILL"
    ended = {
        "status": "failed",
        "exit_status": 70,
        "reason": reason,
    }
    before = start(0, {"pp": 2, "tp": 2})
    after = start(
        50,
        {"pp": 1, "tp": 4},
        saved=[75],
        **ended,
    )
    write_run(
        folder,
        lines,
        starts=[before, after],
        outcome=ended,
        checkpoints=(50, 75),
    )
    write_timeline(folder)
    return folder


def write_timeline(folder: Path) -> None:
    schedule = build_schedule("1f1b", pp=2, microbatches=4)
    times = StageTimes(forward=0.01, input=0.01, weight=0.01)
    slow = ActionTimes.uniform(2, times, transfer=0.002)
    fast = ActionTimes.uniform(2, times)
    timelines = [simulate(schedule, times) for times in (slow, fast)]
    (folder / "timeline_step_00000020.json").write_text(draw_trace(*timelines))
