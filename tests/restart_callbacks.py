"""What interrupts a run in test_restarts.py, once, from rank 0: the file `plan` of the run's parent
folder says it."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from parallel3d.training.callbacks import Callback, RunView
from parallel3d.training.step_result import StepResult


class Interrupts(Callback):
    """Sends a signal to a rank, or another process, after a step; a plan that is carried out is
    renamed."""

    def step_done(self, run: RunView, result: StepResult) -> None:
        plan = run.run_dir.parent / "plan"
        time.sleep(0.02)
        if not plan.exists():
            return
        wanted = json.loads(plan.read_text())
        if (run.step, run.recipe.parallel.world_size) != (wanted["step"], wanted["ranks"]):
            return
        plan.rename(plan.with_name("done"))
        victims = (
            [pid for pid in workers() if is_rank(pid, wanted["rank"])]
            if wanted["pid"] is None
            else [wanted["pid"]]
        )
        (run.run_dir.parent / "workers").write_text(json.dumps(workers()))
        for pid in victims:
            os.kill(pid, wanted["signal"])
        time.sleep(0.2)


def workers() -> list[int]:
    """The workers on this machine of the launch that has started this one."""
    own = environment(os.getpid())["TORCHELASTIC_RUN_ID"]
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return [pid for pid in pids if environment(pid).get("TORCHELASTIC_RUN_ID") == own]


def is_rank(pid: int, rank: int) -> bool:
    return environment(pid).get("RANK") == str(rank)


def environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(each.split("=", 1) for each in raw.split("\0") if "=" in each)


class Slow(Callback):
    """Makes each step take the seconds that the file `slow` says, while it is beside the run's
    folder."""

    def step_done(self, run: RunView, result: StepResult) -> None:
        with suppress(FileNotFoundError):
            time.sleep(float((run.run_dir.parent / "slow").read_text()))
