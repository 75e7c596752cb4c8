"""Progress of a run on stderr: a line per report, and a live bar on a terminal."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.errors import printable
from parallel3d.launch.run_log import write_log
from parallel3d.reporting.metrics import StepMetrics

if TYPE_CHECKING:
    from rich.progress import Progress

_LOG_COLUMNS = 1000


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows the progress of a run of `steps` steps if `speaks`, which is True on one rank.

    On a terminal, a bar stays below the lines until the context ends. Print other text only after
    that. The lines also go to log.txt in `run_dir`.
    """

    def __init__(
        self, steps: int = 0, done: int = 0, run_dir: Path | None = None, *, speaks: bool = False
    ) -> None:
        self._run_dir = run_dir
        self._steps = steps
        self._speaks = speaks
        self._bar: Progress | None = None
        if not (speaks and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"):
            return
        # Imported here, because it takes 0.3 s and only a terminal needs it.
        from rich import progress
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

    def say(self, text: str, logged: str | None = None) -> None:
        """Prints a line, and logs `logged` or the same line. Without a bar, ignores errors such as
        a full disk or a closed pipe."""
        if self._speaks and self._run_dir is not None:
            write_log(self._run_dir, logged or text)
        if self._bar is not None:
            # Rich would otherwise color numbers, interpret brackets as markup, and wrap lines.
            self._bar.console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
        elif self._speaks:
            with suppress(OSError):
                print(printable(text), file=sys.stderr, flush=True)

    def step_done(self, step: int) -> None:
        """Advances the bar to `step`."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def measured(self, metrics: StepMetrics) -> None:
        """Prints the metrics as one line that fits into the terminal, and logs all of them."""
        if self._speaks:
            columns = shutil.get_terminal_size().columns
            full = describe(metrics, self._steps, _LOG_COLUMNS)
            self.say(describe(metrics, self._steps, columns), full)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(metrics: StepMetrics, steps: int, columns: int) -> str:
    """Formats metrics as one line: `step 20/300  loss 3.1234  grad 0.812  ...  eta 0:01:10`.

    The last fields are omitted until the line fits into `columns` characters.
    """
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
