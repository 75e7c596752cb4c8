"""What a run measures of itself, and the file that it is written to."""

from __future__ import annotations

import json
import math
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from parallel3d.config.recipe import ModelConfig, Precision

# Dense peak FLOP/s of a device by the name that CUDA gives it, from the makers' data sheets (bf16, without sparsity).
PEAK_BF16_FLOPS = {"A100": 312e12, "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl. Means are over the steps since the line before."""

    step: int
    loss: float  # mean over the tokens of this step's global batch
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # since the start of the run; those that are ignored do not count, and those of skipped steps do
    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float | None  # of the dense bf16 peak; None where that is not known
    peak_memory_bytes: int  # of the worst rank: CUDA's allocator, or the process on a CPU
    val_loss: float | None = None
    loss_scale: float | None = None  # of this step; None where the precision needs none
    skipped_steps: int = 0  # since the start of the run: gradients that overflowed


class MetricsFile:
    """metrics.jsonl, a JSON object a line. Lines beyond the step that a run goes on from are dropped."""

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        self._path = path
        kept = [line for line in _lines(path) if json.loads(line)["step"] <= resumed_step]
        path.write_text("".join(f"{line}\n" for line in kept))

    def write(self, metrics: StepMetrics) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({name: _valid(value) for name, value in asdict(metrics).items()}) + "\n")


def flops_per_token(config: ModelConfig, parameters: int, seq_len: int) -> float:
    """Forward and backward of one token: 6 N + 12 L D S (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), N
    without the tables of tokens and positions, which are looked up and not multiplied."""
    looked_up = 0 if config.tied_embeddings else config.vocab * config.hidden
    looked_up += (config.max_positions or 0) * config.hidden
    return 6.0 * (parameters - looked_up) + 12.0 * config.layers * config.hidden * seq_len


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Of one device at 16 bits; None where it is not known, and in float32, whose peak depends on what torch allows."""
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for model, flops in PEAK_BF16_FLOPS.items() if model in name), None)


def peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    units = 1 if sys.platform == "darwin" else 1024  # getrusage: bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units


def _valid(value: float | None) -> float | None:
    """JSON has no infinity: the norm of a skipped step is null."""
    return value if value is None or math.isfinite(value) else None


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; a last one that was cut off by a crash is no line."""
    if not path.exists():
        return []
    *whole, _cut_off = path.read_text().split("\n")
    return whole
