"""Goodput: the fraction of a run's time spent on training despite failures.

The rest is spent on checkpoints, restarts and repeated work. Failures are random with a constant
rate (Daly 2006, doi 10.1016/j.future.2004.11.016).
"""

from __future__ import annotations

from math import exp, expm1, sqrt
from typing import NamedTuple


class Goodput(NamedTuple):
    """Goodput of a job, its mean time between failures, and its checkpoint interval."""

    share: float
    mtbf_s: float
    interval_s: float


class Failures(NamedTuple):
    """Mean time between failures of a device, durations of a checkpoint and of a restart, and the
    checkpoint interval (None: the optimum)."""

    # Mean time between failures of one device. The default is that of H100s (Llama 3, arXiv
    # 2407.21783, section 3.3.4).
    mtbf_hours: float = 50_000.0
    checkpoint_s: float = 30.0
    restart_s: float = 300.0
    interval_s: float | None = None

    def goodput(self, gpus: int) -> Goodput:
        """Returns the goodput of a job by Daly's expected run time and his higher-order estimate of
        the optimal interval."""
        mtbf_s = self.mtbf_hours * 3600 / gpus
        root = min(1.0, sqrt(self.checkpoint_s / mtbf_s / 2))
        best_s = 2 * mtbf_s * root * (1 - 2 * root / 3 + root**2 / 9)
        interval_s = self.interval_s or best_s
        cycle = (interval_s + self.checkpoint_s) / mtbf_s
        survived = exp(-cycle - self.restart_s / mtbf_s)
        share = interval_s / mtbf_s * survived / -expm1(-cycle)
        return Goodput(max(share, 1e-9), mtbf_s, interval_s)
