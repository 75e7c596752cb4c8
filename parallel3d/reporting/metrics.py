"""The metrics of a run, and the file that they are written to."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from parallel3d.config.flops import PeakOf, attended_keys, training_flops_per_token
from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.errors import writing
from parallel3d.launch.run_dir import write_atomically
from parallel3d.reporting.sinks import Sinks


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
        own = dict(vars(self))
        losses = own.pop("set_losses")
        own["val_perplexity"] = None if self.val_loss is None else perplexity(self.val_loss)
        for name, loss in losses.items():
            own |= {f"val_loss/{name}": loss, f"val_perplexity/{name}": perplexity(loss)}
        for key, value in own.items():
            if value is not None and not math.isfinite(value):
                own[key] = None
        return own


def perplexity(loss: float) -> float:
    """Returns e to the power of a mean loss; infinity where no float is that large."""
    return math.exp(loss) if loss < 700.0 else math.inf


class MetricsFile:
    """The file metrics.jsonl, one JSON object a line, whose lines also go to the `sinks`. Lines
    beyond the step that a run resumes from, or goes back to, are dropped: the file is replaced by a
    new one. If it has lines that are not metrics, the old file is kept as `<name>.damaged`, and
    `note` says so."""

    def __init__(self, path: Path, *, resumed_step: int, sinks: Sinks | None = None) -> None:
        self._path = path
        self._sinks = sinks
        self.note = ""
        self.go_back(resumed_step)

    def go_back(self, step: int) -> None:
        """Drops the lines of the steps after `step`."""
        path = self._path
        before = path.read_text(errors="replace") if path.exists() else ""
        *whole, _cut_off = before.split("\n")  # a crash may cut off the last line
        steps = [_step_of(line) for line in whole]
        if None in steps:
            aside = path.with_name(f"{path.name}.damaged")
            with writing(aside):
                aside.write_text(before)
            bad = steps.index(None) + 1
            found = f"{path}: line {bad} is not a line of metrics"
            self.note = f"warning: {found}; {aside} has the old file"
        kept = [f"{line}\n" for line, at in zip(whole, steps, strict=True) if at and at <= step]
        with writing(path):
            write_atomically(path, "".join(kept))

    def write(self, metrics: StepMetrics) -> None:
        with writing(self._path), self._path.open("a") as file:
            file.write(json.dumps(metrics.scalars) + "\n")
        if self._sinks is not None:
            self._sinks.log(metrics.scalars)


def _step_of(line: str) -> int | None:
    """Returns the step of one line of metrics.jsonl, or None for any other line."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) else None


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


def peak_tokens_per_s(
    recipe: Recipe, device: torch.device, peak_of: PeakOf, block_weights: int | None
) -> tuple[float | None, str]:
    """Returns the tokens per second of one device at its peak FLOP/s, of which MFU is the share, or
    None and, for a GPU, a line that says why it is not known."""
    if recipe.logging.peak_tflops is not None:
        peak = recipe.logging.peak_tflops * 1e12
    elif device.type != "cuda":
        return None, ""
    else:
        name = torch.cuda.get_device_name(device)
        found = peak_of(name, recipe.train.precision)
        if found is None:
            return None, (
                f"no MFU: no hardware file lists {name!r} in its cuda_names; "
                "logging.peak_tflops=989.4 would say its peak"
            )
        peak = found
    if block_weights is None:
        name = recipe.model.architecture
        return None, f"no MFU: {name} has no static method block_weights(config)"
    return peak / flops_per_token(recipe.model, block_weights, recipe.train.seq_len), ""


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
