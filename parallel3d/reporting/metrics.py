"""Metrics of a run, and the file metrics.jsonl."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from parallel3d.config.flops import PeakOf, attended_keys, training_flops_per_token
from parallel3d.config.hugging_face import config_of, sliding_window, windowed_layers
from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.errors import writing
from parallel3d.launch.files import write_atomically
from parallel3d.reporting.sinks import Sinks
from parallel3d.watch.step_clock import Cause


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl. Times and rates are means over the steps since the last line."""

    step: int
    loss: float  # Mean over the target tokens of this step, in nats.
    lr: float
    grad_norm: float  # Before clipping.
    tokens: int  # Target tokens since the start of the run, including those of skipped steps.
    # On the slowest rank. Includes the time that saves stop training, but not validation.
    step_time_s: float
    data_wait_s: float = 0.0  # Longest wait of any rank for a batch, a part of step_time_s.
    # Seconds by cause on the slowest rank, which waits least for others. They sum to step_time_s.
    time_s: Mapping[Cause, float] = field(default_factory=dict)
    # (least, most) over the ranks for each cause.
    time_spread_s: Mapping[Cause, tuple[float, float]] = field(default_factory=dict)
    tokens_per_s: float
    tokens_per_s_per_device: float
    # Model FLOPs utilization: fraction of the device's dense peak. None: the peak is unknown.
    mfu: float | None
    # Peak memory of the rank with the highest: CUDA tensors, or on CPU the resident set.
    peak_memory_bytes: int
    # The same for memory reserved by the CUDA allocator. None on CPU.
    peak_reserved_bytes: int | None = None
    # Memory of the rank with the highest peak, by kind. "activations" is the rest of the peak, with
    # all temporary tensors. None on CPU.
    memory_bytes: Mapping[str, int | None] = field(default_factory=dict)
    val_loss: float | None = None  # Loss of the validation set held out from the training data.
    # Losses of the other evaluation sets, keyed by their names.
    set_losses: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float | None = None  # None: the precision is not fp16.
    spikes: int = 0  # Number of steps with a spike in loss or gradient norm so far.
    rollbacks: int = 0  # Number of rollbacks so far.
    # Steps since the start of the run without an update, because of non-finite numbers or spikes.
    skipped_steps: int = 0
    # Load of the experts in this step (`ExpertLoad`), by key. Empty without experts.
    experts: Mapping[str, float] = field(default_factory=dict)

    @property
    def line(self) -> dict[str, Any]:
        """The line as a JSON object, with a perplexity for each evaluation loss.

        A non-finite number, such as the norm of a skipped step, becomes None for JSON.
        """
        own = dict(vars(self))
        own |= own.pop("experts")
        own["time_s"] = {cause: _short(seconds) for cause, seconds in self.time_s.items()}
        own["time_spread_s"] = {
            cause: [*map(_short, spread)] for cause, spread in self.time_spread_s.items()
        }
        losses = own.pop("set_losses")
        own["val_perplexity"] = None if self.val_loss is None else perplexity(self.val_loss)
        for name, loss in losses.items():
            own |= {f"val_loss/{name}": loss, f"val_perplexity/{name}": perplexity(loss)}
        for key, value in own.items():
            if isinstance(value, float) and not math.isfinite(value):
                own[key] = None
        return own


def _short(seconds: float) -> float:
    """Rounds to microseconds, to keep lines short."""
    return round(seconds, 6)


def perplexity(loss: float) -> float:
    """Returns exp(loss), or infinity if the loss is NaN or at least 700, to avoid an overflow."""
    return math.exp(loss) if loss < 700.0 else math.inf


class MetricsFile:
    """File metrics.jsonl with one JSON object per line. Lines are also sent to `sinks`.

    If a run resumes from or rolls back to a step, the lines of later steps are removed. If the file
    has invalid lines, a copy is kept as `<name>.damaged`, and `note` has a warning.
    """

    def __init__(self, path: Path, *, resumed_step: int, sinks: Sinks | None = None) -> None:
        self._path = path
        self._sinks = sinks
        self.note = ""
        self.go_back(resumed_step)

    def go_back(self, step: int) -> None:
        """Drops the lines of steps after `step`, and invalid lines."""
        path = self._path
        before = path.read_text(errors="replace") if path.exists() else ""
        *whole, _cut_off = before.split("\n")  # A crash can leave an incomplete last line.
        steps = [_step_of(line) for line in whole]
        if None in steps:
            aside = path.with_name(f"{path.name}.damaged")
            with writing(aside):
                aside.write_text(before)
            bad = steps.index(None) + 1
            found = f"{path}: line {bad} is not a metrics line"
            self.note = f"warning: {found}; the old file is kept as {aside}"
        kept = [f"{line}\n" for line, at in zip(whole, steps, strict=True) if at and at <= step]
        with writing(path):
            write_atomically(path, "".join(kept))

    def write(self, metrics: StepMetrics) -> None:
        line = metrics.line
        with writing(self._path), self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._sinks is not None:
            self._sinks.log(line)


def _step_of(line: str) -> int | None:
    """Returns the step number in a line of metrics.jsonl, or None if the line is invalid."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


def flops_per_token(config: ModelConfig, block_weights: float, seq_len: int) -> float:
    """Returns the FLOPs per token of forward and backward pass, counted as in `config.flops`."""
    keys = attended_keys(seq_len, config.window)
    if config.architecture == "transformers":
        own = config_of(config)
        share = windowed_layers(own) / config.layers
        keys = share * attended_keys(seq_len, sliding_window(own)) + (1 - share) * seq_len
    return training_flops_per_token(
        layers=config.layers,
        hidden=config.hidden,
        query_hidden=config.query_hidden,
        weights_per_block=block_weights,
        vocab=config.vocab,
        seq_len=keys,
    )


def peak_tokens_per_s(
    recipe: Recipe, device: torch.device, peak_of: PeakOf, block_weights: float | None
) -> tuple[float | None, str]:
    """Returns the tokens per second of one device at its peak FLOP/s, the denominator of the MFU.

    If it is unknown, returns None and the reason as a line for the user (empty on CPU).
    `logging.peak_tflops` takes precedence over `peak_of`.
    """
    if recipe.logging.peak_tflops is not None:
        peak = recipe.logging.peak_tflops * 1e12
    elif device.type != "cuda":
        return None, ""
    else:
        name = torch.cuda.get_device_name(device)
        found = peak_of(name, recipe.train.precision)
        if found is None:
            return None, (
                f"no MFU: the peak of {name!r} is unknown; "
                "set it, for example logging.peak_tflops=989.4"
            )
        peak = found
    if block_weights is None:
        name = recipe.model.architecture
        return None, f"no MFU: {name} has no static method block_weights(config)"
    return peak / flops_per_token(recipe.model, block_weights, recipe.train.seq_len), ""


def gpu_bytes(device: torch.device) -> int | None:
    """Returns the total memory of `device` in bytes if it is a GPU, else None."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def peak_memory_bytes(device: torch.device) -> tuple[int, int]:
    """Returns the peak memory of this process in bytes: (CUDA tensors, reserved by the allocator).

    On CPU: (peak resident set size, 0).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    # getrusage returns bytes on macOS, KiB elsewhere.
    units = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units, 0
