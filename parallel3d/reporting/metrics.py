"""The metrics of a run, clocks, and the file that the metrics are written to."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallel3d.config.flops import PeakOf, attended_keys, training_flops_per_token
from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.errors import writing


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl. Times and rates are means over the steps since the line before."""

    step: int
    loss: float  # mean over the tokens of this step's global batch
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # labels since the start of the run, including those of skipped steps
    step_time_s: float
    data_wait_s: float = 0.0  # the part of step_time_s that waits for a batch, on the worst rank
    tokens_per_s: float
    tokens_per_s_per_device: float
    # the share of the device's dense peak that was used; None where the peak is not known
    mfu: float | None
    peak_memory_bytes: int  # on the worst rank: CUDA's tensors, or the process on a CPU
    # on the worst rank: what CUDA's allocator has taken for them; None on a CPU
    peak_reserved_bytes: int | None = None
    # the rank whose own work takes longest, without its waits for peers
    slowest_rank: int | None = None
    slowest_ratio: float | None = None  # ... and how many times that of the median of its peers
    val_loss: float | None = None  # of the part of the run's own data that is kept for validation
    # of the other evaluation sets, by their names
    set_losses: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float | None = None  # the scale in this step; None where the precision is not fp16
    spikes: int = 0  # steps since the start of the run whose loss or gradient norm stood out
    rollbacks: int = 0  # how often the run has gone back to a checkpoint because of them
    # steps since the start of the run that were left out: not finite, or refused
    skipped_steps: int = 0

    @property
    def scalars(self) -> dict[str, float | None]:
        """The numbers of the line by their keys, each evaluation with its perplexity. A number that
        is not finite, such as a skipped step's norm, is None, because JSON has no infinity."""
        own = {name: value for name, value in vars(self).items() if name != "set_losses"}
        own["val_perplexity"] = None if self.val_loss is None else perplexity(self.val_loss)
        for name, loss in self.set_losses.items():
            own |= {f"val_loss/{name}": loss, f"val_perplexity/{name}": perplexity(loss)}
        return {
            key: value if value is not None and math.isfinite(value) else None
            for key, value in own.items()
        }


def perplexity(loss: float) -> float:
    """Returns e to the power of a mean loss; infinity where no float is that large."""
    return math.exp(loss) if loss < 700.0 else math.inf


class MetricsFile:
    """The file metrics.jsonl, one JSON object a line. Lines beyond the step that a run resumes
    from, or goes back to, are dropped: the file is replaced by a new one that is whole. Where it
    has lines that are no metrics, the old file is kept beside it, and `note` says so. Each new line
    is handed on to `also` as well, and each step that the run goes back to to `also_back`."""

    def __init__(
        self,
        path: Path,
        *,
        resumed_step: int,
        also: Callable[[dict[str, Any]], None] | None = None,
        also_back: Callable[[int], None] | None = None,
    ) -> None:
        self._path, self._also, self._also_back, self.note = path, also, also_back, ""
        # the lines of the steps that the run goes on from
        self.history = self._without_lines_after(resumed_step)

    def go_back(self, step: int) -> None:
        """Drops the lines of the steps after `step`."""
        self.history = self._without_lines_after(step)
        if self._also_back is not None:
            self._also_back(step)

    def _without_lines_after(self, step: int) -> list[dict[str, float | None]]:
        """Returns the lines that the file has up to a step, and leaves it with them alone."""
        path = self._path
        before = path.read_text(errors="replace") if path.exists() else ""
        *whole, _cut_off = before.split("\n")  # a crash may cut off the last line
        lines = [_read_line(line) for line in whole]
        kept = [line for line in lines if line is not None and (line["step"] or 0) <= step]
        if None in lines:
            number = 1
            while (aside := path.with_name(f"{path.name}.damaged.{number}")).exists():
                number += 1
            with writing(aside):
                shutil.copyfile(path, aside)
            bad = lines.index(None) + 1
            self.note = (
                f"{path}: line {bad} is no line of metrics; the file is kept as {aside}, without "
                "such lines here"
            )
        # no name that somebody else's file may have
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with writing(path):
            partial.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
            partial.replace(path)
        return kept

    def write(self, metrics: StepMetrics) -> None:
        with writing(self._path), self._path.open("a") as file:
            file.write(json.dumps(metrics.scalars) + "\n")
        if self._also is not None:
            self._also(metrics.scalars)


def _read_line(line: str) -> dict[str, float | None] | None:
    """Returns the numbers of one line of metrics.jsonl; None where it is no such line."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


@dataclass
class Stopwatch:
    """Adds up the time of the blocks that it times."""

    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0

    @contextmanager
    def timing(self) -> Iterator[None]:
        start = self.clock()
        yield
        self.seconds += self.clock() - start


def flops_per_token(config: ModelConfig, block_weights: int, seq_len: int) -> float:
    """Returns the operations of a token's forward and backward, as `config.flops` counts them."""
    return training_flops_per_token(
        layers=config.layers,
        hidden=config.hidden,
        query_hidden=config.query_hidden,
        weights_per_block=block_weights,
        vocab=config.vocab,
        seq_len=attended_keys(seq_len, config.window),
    )


def known_peak(
    recipe: Recipe, device: torch.device, peak_of: PeakOf
) -> tuple[float | None, list[str]]:
    """Returns the peak FLOP/s of one device, of which MFU is the share, or None and for a GPU a
    line that says why."""
    if recipe.logging.peak_tflops is not None:
        return recipe.logging.peak_tflops * 1e12, []
    if device.type != "cuda":
        return None, []
    name = torch.cuda.get_device_name(device)
    peak = peak_of(name, recipe.train.precision)
    unknown = (
        f"no MFU: no hardware file lists {name!r} in its cuda_names; logging.peak_tflops=989.4 "
        "would say its peak"
    )
    return peak, [] if peak else [unknown]


def gpu_bytes(device: torch.device) -> int | None:
    """Returns the memory of a GPU; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def peak_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Returns the most memory that this process has held: CUDA's tensors, and what its allocator
    has taken for them; on a CPU the resident set, and 0."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    units = 1 if sys.platform == "darwin" else 1024  # getrusage: bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units, 0
