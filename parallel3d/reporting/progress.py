"""The progress of a run on stderr: a line for each measured step, and on a terminal a live bar
below them."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from parallel3d.errors import printable
from parallel3d.reporting.metrics import StepMetrics

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows the progress of a run of `steps`, of which `done` are done: nothing unless this rank
    `speaks`. Where stderr is a terminal that can redraw it, a bar stays below the lines; it is gone
    when the run is. Close the display before anything else is printed."""

    def __init__(self, steps: int = 0, done: int = 0, *, speaks: bool = False) -> None:
        self._steps = steps
        self._speaks = speaks
        self._bar: Progress | None = None
        if not (speaks and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"):
            return
        from rich import progress  # 0.3 s that a run into a file does not pay
        from rich.console import Console

        self._bar = progress.Progress(
            progress.BarColumn(bar_width=24),
            progress.TextColumn("step {task.completed}/{task.total}  eta"),
            progress.TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)
        self._bar.start()

    def say(self, text: str) -> None:
        """Shows a line. What cannot be printed, to a file on a full disk or a reader that has gone,
        ends no run."""
        if self._bar is not None:
            # Rich would colour numbers, take brackets for its markup, and break lines itself.
            self._bar.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
        elif self._speaks:
            with suppress(OSError):
                print(printable(text), file=sys.stderr, flush=True)

    def step_done(self, step: int) -> None:
        """Shows that `step` is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def measured(self, metrics: StepMetrics) -> None:
        """Shows the metrics of a step."""
        if self._speaks:
            self.say(describe(metrics, self._steps, shutil.get_terminal_size().columns))

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(metrics: StepMetrics, steps: int, columns: int) -> str:
    """Returns the line of a step, such as `step 20/300  loss 3.1234  grad 0.812  eta 0:01:10`. The
    last fields are left out if the line is longer than `columns`; metrics.jsonl has all of them."""
    fields = [f"step {metrics.step}/{steps}", f"loss {metrics.loss:.4f}"]
    if metrics.val_loss is not None:
        fields.append(f"val {metrics.val_loss:.4f}")
    fields += [f"{name} {loss:.4f}" for name, loss in metrics.set_losses.items()]
    fields += [f"grad {metrics.grad_norm:.3f}", f"lr {metrics.lr:.2e}"]
    fields.append(f"{metrics.tokens_per_s:,.0f} tok/s")
    if metrics.loss_scale is not None:
        fields.append(f"scale {metrics.loss_scale:g}")
    if metrics.skipped_steps:
        fields.append(f"skipped {metrics.skipped_steps}")
    if metrics.mfu is not None:
        fields.append(f"mfu {metrics.mfu:.1%}")
    fields.append(f"mem {metrics.peak_memory_bytes / 2**20:,.0f} MiB")
    left_s = round((steps - metrics.step) * metrics.step_time_s)
    fields.append(f"eta {timedelta(seconds=left_s)}")
    while len("  ".join(fields)) > columns:
        fields.pop()
    return "  ".join(fields)
