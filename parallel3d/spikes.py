"""Spikes: steps whose loss or gradient norm stands out of the steps before. No torch here.

PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1) saw some twenty spikes of the loss in one run, went back to
a checkpoint about 100 steps before each, and left out the 200 to 500 batches around it; the same batches did no harm to
other weights. OLMo-core (its SkipStepOptimizer) leaves out the update of a step whose loss or norm lies more than 6
standard deviations above the mean of the last 128 steps.

Here a spike lies more than `train.spike_deviations` deviations above the median of the last `train.spike_window`
finite steps, where a deviation is 1.4826 times the median absolute one, which is the standard deviation of normal
numbers: no spike among these steps moves it. It lies above a multiple of the median, too, because many deviations are
still little where a curve is smooth. Nothing is judged before half of the window is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from parallel3d.config.recipe import TrainConfig

_NORMAL = 1.4826  # the standard deviation of normal numbers over their median absolute deviation


@dataclass(frozen=True, kw_only=True)
class SpikeHistory:
    """What a run knows of its last steps, equal on all ranks. A checkpoint holds it, so that a resumed run judges each
    step as an uninterrupted one does."""

    losses: tuple[float, ...] = ()  # the last finite steps, oldest first
    grad_norms: tuple[float, ...] = ()
    spikes: int = 0  # since the start of the run, those of steps that a rollback has undone among them
    rollbacks: int = 0
    last_spike: int = 0  # its step; 0: none
    in_a_row: int = 0  # spikes up to the last that followed each other closely

    def judge(self, loss: float, grad_norm: float, rule: TrainConfig) -> str | None:
        """Returns in words why a step of this loss and norm is a spike, and None if nothing stands out."""
        found = (
            _standing_out("loss", loss, self.losses, rule.spike_loss_ratio, rule),
            _standing_out("gradient norm", grad_norm, self.grad_norms, rule.spike_norm_ratio, rule),
        )
        return " and ".join(filter(None, found)) or None

    def after(self, step: int, loss: float, grad_norm: float, rule: TrainConfig, *, is_spike: bool) -> SpikeHistory:
        """Returns the history after a finite step. Spikes are in a row where no step lies between them; where each
        makes the run go back, where less than a window does."""
        window = rule.spike_window
        seen = replace(self, losses=(*self.losses, loss)[-window:], grad_norms=(*self.grad_norms, grad_norm)[-window:])
        if not is_spike:
            return seen
        is_near = step - self.last_spike <= (window if rule.on_spike == "rollback" else 1)
        in_a_row = self.in_a_row + 1 if is_near else 1
        return replace(seen, spikes=self.spikes + 1, last_spike=step, in_a_row=in_a_row)

    def back_at(self, checkpoint: SpikeHistory) -> SpikeHistory:
        """Returns the history of a run that has gone back to a checkpoint: its steps, and the counts of the run."""
        return replace(self, losses=checkpoint.losses, grad_norms=checkpoint.grad_norms, rollbacks=self.rollbacks + 1)


def _standing_out(name: str, value: float, past: Sequence[float], ratio: float, rule: TrainConfig) -> str | None:
    if len(past) < rule.spike_window / 2:
        return None
    middle = median(past)
    if value <= ratio * middle:  # nearly always, and then the deviation is not asked for
        return None
    deviation = _NORMAL * median(abs(each - middle) for each in past)
    if value <= middle + rule.spike_deviations * deviation:
        return None
    return f"{name} {value:.4f} against a median of {middle:.4f} in the {len(past)} steps before"
