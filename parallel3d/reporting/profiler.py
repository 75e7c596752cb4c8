"""Profiles steps with torch.profiler, as traces for Perfetto and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch.profiler import profile, record_function

from parallel3d.config.recipe import LoggingConfig
from parallel3d.errors import writing


class ProfilerWindow(AbstractContextManager["ProfilerWindow"]):
    """Profiles the steps `logging.profile_steps` on the ranks `logging.profile_ranks`.

    The trace goes to a file in `folder`, which is reported with `say`.
    """

    def __init__(
        self, config: LoggingConfig, folder: Path, rank: int, say: Callable[[str], None]
    ) -> None:
        self._steps = config.profile_steps if rank in config.profile_ranks else None
        self._folder = folder
        self._rank = rank
        self._say = say
        self._profile: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context manager for one step. Profiles a selected step; writes a trace after the last."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            yield
            return
        first, last = self._steps
        if self._profile is None:
            self._profile = profile()  # Records CPU and GPU activities.
            self._profile.start()
        with record_function(f"step {step}"):
            yield
        if step < last:
            return
        self._profile.stop()
        # TensorBoard expects this suffix.
        path = self._folder / f"rank_{self._rank}.{step:08d}.pt.trace.json.gz"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(path))
        self._profile = None
        self._say(f"profile of steps {first} to {step}: {path}")

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:  # The run ended before the last selected step.
            self._profile.stop()
