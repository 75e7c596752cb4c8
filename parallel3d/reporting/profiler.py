"""Profiles of some steps by torch.profiler, as traces that Perfetto and TensorBoard open, and
pictures of a GPU's memory. What only a GPU can run of this has not been run yet."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from parallel3d.config.recipe import LoggingConfig
from parallel3d.errors import writing


class ProfilerWindow(AbstractContextManager["ProfilerWindow"]):
    """Records the steps of `logging.profile_steps` on this rank, if it is one of
    `logging.profile_ranks`, and the memory of a GPU where the run ends for want of it. Files go to
    `folder`."""

    def __init__(
        self, config: LoggingConfig, folder: Path, *, rank: int, device: torch.device
    ) -> None:
        is_wanted = config.profile_steps is not None and rank in config.profile_ranks
        self._steps = config.profile_steps if is_wanted else None
        self._folder, self._rank, self._device = folder, rank, device
        self._profile: profile | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Runs a step in its block, and records it if it is in the window."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            yield
            return
        if self._profile is None:
            activities = (
                {ProfilerActivity.CPU, ProfilerActivity.CUDA}
                if self._device.type == "cuda"
                else None
            )
            self._profile = profile(activities=activities or {ProfilerActivity.CPU})
            self._profile.start()
        with record_function(f"step {step}"):
            yield

    def end_after(self, step: int) -> str | None:
        """Writes the trace if `step` was the window's last, and returns a line for the user about
        it."""
        if self._profile is None or self._steps is None or step < self._steps[1]:
            return None
        self._profile.stop()
        # TensorBoard looks for this ending
        path = self._folder / f"rank_{self._rank}.{step:08d}.pt.trace.json.gz"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            self._write_memory(f"{step:08d}")
        self._profile = None
        return f"profile of steps {self._steps[0]} to {step}: {path}"

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            with suppress(OSError):  # which would hide the error
                self._write_memory("out_of_memory")
        if self._profile is not None:  # the run ends inside of the window
            self._profile.stop()

    def _write_memory(self, when: str) -> None:
        """Writes what the GPU's allocator holds, as docs.pytorch.org/memory_viz opens it; nothing
        on a CPU."""
        if self._device.type == "cuda":
            self._folder.mkdir(parents=True, exist_ok=True)
            snapshot = {"segments": torch.cuda.memory_snapshot(), "device_traces": []}
            (self._folder / f"rank_{self._rank}.{when}.memory.pickle").write_bytes(
                pickle.dumps(snapshot)
            )
