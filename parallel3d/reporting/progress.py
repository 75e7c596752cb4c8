"""The progress of a run on stderr: a line for each measured step, and on a terminal a live bar
below them."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, suppress
from datetime import timedelta

from parallel3d.errors import printable
from parallel3d.reporting.metrics import StepMetrics


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows the progress of a run; this one shows nothing, on the ranks that do not speak. Close it
    before anything else is printed."""

    def say(self, text: str) -> None:
        """Shows a line."""

    def step_done(self, step: int) -> None:
        """Shows that `step` is done."""

    def measured(self, metrics: StepMetrics) -> None:
        """Shows the metrics of a step."""

    def __exit__(self, *error: object) -> None:
        """Ends the display."""


def open_progress(steps: int, done: int, *, speaks: bool) -> ProgressDisplay:
    """Opens the display of a run of `steps` of which `done` are done: none unless this rank
    `speaks`, and a bar if stderr is a terminal that can redraw it. Rich leaves colours out if
    NO_COLOR is set."""
    if not speaks:
        return ProgressDisplay()
    can_redraw = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return Bar(steps, done) if can_redraw else Lines(steps)


def describe(metrics: StepMetrics, steps: int) -> str:
    """Returns the line of a step, such as `step 20/300  loss 3.1234  grad 0.812  eta 0:01:10`."""
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
    return "  ".join((*fields, f"eta {timedelta(seconds=left_s)}"))


class Lines(ProgressDisplay):
    """Prints a line on stderr for each measured step."""

    def __init__(self, steps: int) -> None:
        self._steps, self._stream = steps, sys.stderr

    def say(self, text: str) -> None:
        """Prints a text. What cannot be printed, to a file on a full disk or a reader that has
        gone, ends no run."""
        with suppress(OSError):
            print(printable(text), file=self._stream, flush=True)

    def measured(self, metrics: StepMetrics) -> None:
        self.say(describe(metrics, self._steps))


class Bar(Lines):
    """Shows a live bar below the lines on a terminal. The lines stay and scroll; the bar is gone
    when the run is."""

    def __init__(self, steps: int, done: int) -> None:
        from rich import progress  # 0.3 s that a run into a file does not pay
        from rich.console import Console

        super().__init__(steps)
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=24),
            progress.TextColumn("step {task.completed}/{task.total}  eta"),
            progress.TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        self._task = self._bar.add_task("", total=steps, completed=done)
        self._bar.start()

    def say(self, text: str) -> None:
        # Rich would colour numbers, take brackets for its markup, and break long lines itself.
        self._bar.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def step_done(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
