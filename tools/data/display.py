"""The progress of `tokenize` on stderr: a live bar on a terminal, a plain line every ten seconds
elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Self

_LINE_EVERY_S = 10.0


class TokenizeDisplay:
    """Shows how far a task of `total_bytes` is. Open it by `with`."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title, self._total = title, max(total_bytes, 1)
        self._done = self._tokens = 0
        self._started = self._last_line = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=24))
            self._bar = progress.Progress(
                *columns, progress.TimeRemainingColumn(), console=Console(stderr=True)
            )
            self._task = self._bar.add_task(title, total=self._total)

    def advance(self, input_bytes: int, tokens: int = 0) -> None:
        """Counts bytes of the inputs as done, and the tokens that were made of them."""
        self._done, self._tokens = self._done + input_bytes, self._tokens + tokens
        now = time.monotonic()
        parts = [self._title, f"{min(self._done / self._total, 1):.0%}"]
        if self._tokens:
            rate = self._tokens / max(now - self._started, 1e-9)
            parts += [f"{self._tokens:,} tokens", f"{rate:,.0f} tokens/s"]
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description="  ".join(parts))
        elif now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            print("  ".join(parts), file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
