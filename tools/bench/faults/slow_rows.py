"""The rows of a slow node: one rank alone has to share its processor with other programs, and the run goes on."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from parallel3d.config.recipe import ModelConfig, ParallelConfig, Recipe
from parallel3d.tools.bench.faults.fault import Fault, LiveRun

_OTHER_PROGRAMS = 3
# Each busy until the run has ended.
_BUSY = ("sh", "-c", "while kill -0 $1 2>/dev/null; do :; done", "sh")
_LAYOUTS = {"dp_shard": ParallelConfig(dp_shard=2), "tp": ParallelConfig(tp=2), "pp": ParallelConfig(pp=2)}


def _crowd(run: LiveRun) -> None:
    """Binds rank 1 to this machine's last processor, with programs that are always busy, and all else of the run to the
    others. Each program has a session of its own: Linux may share a processor out among sessions, not processes. Where
    it does, and root asks, what else runs on this machine counts little."""
    *others, last = sorted(os.sched_getaffinity(0))
    slow = run.rank_pid(1)
    for pid in run.processes():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {last} if pid == slow else others or {last})
    programs = [
        subprocess.Popen([*_BUSY, str(run.command.pid)], start_new_session=True) for _ in range(_OTHER_PROGRAMS)
    ]
    for program in programs:
        os.sched_setaffinity(program.pid, {last})
    for each in (run.command, *programs):
        with suppress(OSError):
            Path(f"/proc/{each.pid}/autogroup").write_text("-10")


def with_work(recipe: Recipe) -> Recipe:
    """Makes the steps of a run long enough, and without pauses, so that a rank misses the processor that it shares."""
    model = ModelConfig(layers=4, hidden=128, heads=4, ffn_hidden=512, vocab=258)
    return replace(recipe, model=model, train=replace(recipe.train, seq_len=64, steps=40, callbacks=()))


SLOW_NODES: tuple[Fault, ...] = tuple(
    Fault(
        name=f"rank 1 on a crowded processor, {axis} 2",
        act=_crowd,
        words=(rf"(?m)^warning: rank 1 \(.*, {parallel.coordinates(1)}\) is slow: its work takes \d+\.\d times that",),
        within_s=20.0,
        within_steps=20,
        goes_on=True,
        parallel=parallel,
        change=with_work,
    )
    for axis, parallel in _LAYOUTS.items()
)
