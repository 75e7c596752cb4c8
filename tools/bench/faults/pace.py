"""What keeps the runs of `bench faults` from ending before their fault: a callback that sleeps after each step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from parallel3d.training.callbacks import Callback, RunView

if TYPE_CHECKING:
    from parallel3d.training.hooks import StepResult

STEP_S = 0.05


class Pace(Callback):
    """Makes each step take `STEP_S` longer, as all ranks wait for rank 0 in the next."""

    def step_done(self, run: RunView, result: StepResult) -> None:
        time.sleep(STEP_S)
