"""The progress of `tokenize` on stderr: a live bar on a terminal, a plain line every ten seconds
elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LINE_EVERY_S = 10.0


@contextmanager
def show_progress(title: str, total_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """Shows how far a task of `total_bytes` is. Gives a function that counts bytes of the inputs as
    done, and the tokens that were made of them."""
    from rich import progress
    from rich.console import Console

    done = tokens = 0
    started = last_line = time.monotonic()
    columns = ("{task.description}", progress.BarColumn(), progress.TimeRemainingColumn())
    is_live = sys.stderr.isatty()

    def advance(more_bytes: int, more_tokens: int) -> None:
        nonlocal done, tokens, last_line
        done, tokens = done + more_bytes, tokens + more_tokens
        now = time.monotonic()
        line = f"{title}  {min(done / total, 1):.0%}"
        if tokens:
            rate = tokens / max(now - started, 1e-9)
            line += f"  {tokens:,} tokens  {rate:,.0f} tokens/s"
        bar.update(task, completed=done, description=line)
        if not is_live and now - last_line >= _LINE_EVERY_S:
            last_line = now
            print(line, file=sys.stderr, flush=True)

    total = max(total_bytes, 1)
    with progress.Progress(*columns, console=Console(stderr=True), disable=not is_live) as bar:
        task = bar.add_task(title, total=total)
        yield advance
