"""The share of a run's time that trains, although devices fail: the rest saves checkpoints,
restarts and repeats lost work. Failures come at random, at one rate (Daly 2006, doi
10.1016/j.future.2004.11.016)."""

from __future__ import annotations

from math import exp, expm1, sqrt
from typing import NamedTuple


class Goodput(NamedTuple):
    """The share of the time that trains, with the time between two failures of the job and the
    work between two checkpoints."""

    share: float
    mtbf_s: float
    interval_s: float


class Failures(NamedTuple):
    """The mean time between failures of one device, and what a run does about them. No interval
    between checkpoints stands for the best one."""

    mtbf_hours: float = 50_000.0  # of an H100 (Llama 3, arXiv 2407.21783, section 3.3.4)
    checkpoint_s: float = 30.0
    restart_s: float = 300.0
    interval_s: float | None = None

    def goodput(self, gpus: int) -> Goodput:
        """Returns the goodput of a job on so many devices, from Daly's expected time of a run and
        his higher-order estimate of the best interval."""
        mtbf_s = self.mtbf_hours * 3600 / gpus
        root = min(1.0, sqrt(self.checkpoint_s / mtbf_s / 2))
        best_s = 2 * mtbf_s * root * (1 - 2 * root / 3 + root**2 / 9)
        interval_s = self.interval_s or best_s
        cycle = (interval_s + self.checkpoint_s) / mtbf_s
        survived = exp(-cycle - self.restart_s / mtbf_s)
        share = interval_s / mtbf_s * survived / -expm1(-cycle)
        return Goodput(max(share, 1e-9), mtbf_s, interval_s)
