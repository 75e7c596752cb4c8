"""The metrics of a run, the clock of its steps, and the file that the metrics are written to."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel3d.config.flops_and_peaks import peak_bf16_flops, training_flops_per_token
from parallel3d.config.recipe import ModelConfig, Precision


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
    mfu: float | None  # the share of the dense bf16 peak that was used; None where the peak is not known
    peak_memory_bytes: int  # on the worst rank: CUDA's allocator, or the process on a CPU
    val_loss: float | None = None
    loss_scale: float | None = None  # the scale in this step; None where the precision is not fp16
    skipped_steps: int = 0  # steps since the start of the run whose gradients overflowed


class MetricsFile:
    """The file metrics.jsonl, one JSON object a line. Lines beyond the step that a run resumes from are dropped."""

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        self._path = path
        *whole, _cut_off = path.read_text().split("\n") if path.exists() else [""]  # a crash may cut off the last line
        kept = [line for line in whole if json.loads(line)["step"] <= resumed_step]
        path.write_text("".join(f"{line}\n" for line in kept))

    def write(self, metrics: StepMetrics) -> None:
        # A number that is not finite, such as a skipped step's norm, is null, because JSON has no infinity.
        line = {
            name: None if value is None or not math.isfinite(value) else value for name, value in vars(metrics).items()
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Stopwatch:
    """Adds up the time of the blocks that it times, until it is read: steps, but not validation or checkpoints."""

    def __init__(self) -> None:
        self._seconds, self._blocks = 0.0, 0

    @contextmanager
    def timing(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start
        self._blocks += 1

    def read(self) -> tuple[float, int]:
        """Returns the seconds and the number of blocks since the last reading, and starts again from 0."""
        read, self._seconds, self._blocks = (self._seconds, self._blocks), 0.0, 0
        return read


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Returns the operations of a token's forward and backward, as `config.flops_and_peaks` counts them."""
    return training_flops_per_token(
        layers=config.layers,
        hidden=config.hidden,
        weights_per_block=config.block_weights,
        vocab=config.vocab,
        seq_len=seq_len,
    )


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Returns the peak FLOP/s of one device at 16 bits. None where it is not known, and in float32, whose peak depends
    on what torch allows."""
    if device.type != "cuda" or precision == "fp32":
        return None
    return peak_bf16_flops(torch.cuda.get_device_name(device))


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the most memory that this process has held: by CUDA's allocator, or its resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    units = 1 if sys.platform == "darwin" else 1024  # getrusage: bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units
