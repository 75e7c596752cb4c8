"""Guards the weights: decides whether the optimizer makes a step whose loss or gradient norm is not
finite or stands out.

Loss scale: float16 has no number between 0 and 6e-8, so the loss is multiplied by a scale before
the backward pass (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). A step that overflows
is skipped and lowers the scale; many good steps raise it, by the rule of torch.amp.GradScaler. All
ranks see the same numbers, so their scales stay equal.

Spikes: PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1) went back to a checkpoint about
100 steps before each spike of the loss and left out 200 to 500 batches. OLMo-core (its
SkipStepOptimizer) skips a step whose loss or norm lies more than 6 standard deviations above the
mean of the last 128 steps. Here a spike lies more than `train.spike_deviations` deviations and a
multiple above the median of the last `train.spike_window` finite steps. A deviation is 1.4826 times
the median absolute deviation, so spikes in the window do not move it. Nothing is judged before half
of the window is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from parallel3d.checkpoint.manifest import Progress, SpikeHistory
from parallel3d.config.recipe import LossScaleConfig, Recipe, TrainConfig
from parallel3d.errors import NonFiniteError, SpikeError
from parallel3d.training.step_result import StepResult

SMALLEST_SCALE = 1.0  # a loss that overflows unscaled has diverged
LARGEST_SCALE = 2.0**127  # the largest power of two in float32
_NORMAL = 1.4826  # the standard deviation of normal numbers over their median absolute deviation


class Guard:
    """Checks each step before the optimizer makes it. Every rank has one, with equal results."""

    def __init__(self, recipe: Recipe) -> None:
        self._train = recipe.train
        self._loss_scale = recipe.loss_scale
        self._nonfinite_in_a_row = 0

    def check(
        self,
        step: int,
        result: StepResult,
        progress: Progress,
        describe_nonfinite: Callable[[], str],
    ) -> tuple[StepResult, Progress]:
        """Returns the result with the reason to skip the step, if any, and the progress with the
        next loss scale and the history of spikes. Raises NonFiniteError or SpikeError to end the
        run. `describe_nonfinite` names the rank and the parameter; every rank calls it."""
        progress = next_loss_scale(self._loss_scale, progress, is_finite=result.is_finite)
        if result.is_finite:
            self._nonfinite_in_a_row = 0
            return self._check_spike(step, result, progress)
        found = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}"
        if progress.loss_scale is not None:
            if progress.loss_scale >= SMALLEST_SCALE:
                return result, progress  # the next step tries a smaller scale
            progress = replace(progress, loss_scale=SMALLEST_SCALE)
            found += f" even at a loss scale of {result.loss_scale:g}"
        found += f"; {describe_nonfinite()}"
        self._nonfinite_in_a_row += 1
        in_a_row = self._nonfinite_in_a_row
        most = self._train.nonfinite_in_a_row if self._train.on_nonfinite == "skip" else 0
        if in_a_row > most:
            raise NonFiniteError(
                f"{found}; weights are those of step {step - in_a_row}. A lower optimizer.lr or "
                "more optimizer.warmup_steps may do"
            )
        found += f"; the step is left out, {in_a_row} in a row of {most} at most"
        return replace(result, left_out=found), progress

    def _check_spike(
        self, step: int, result: StepResult, progress: Progress
    ) -> tuple[StepResult, Progress]:
        rule = self._train
        why, history = find_spike(progress.spikes, step, result.loss, result.grad_norm, rule)
        progress = replace(progress, spikes=history)
        if why is None:
            return result, progress
        spike = f"step {step}: a spike: {why}"
        if rule.on_spike == "warn":
            is_first = history.in_a_row == 1  # one warning for spikes in a row
            return replace(result, spike=spike if is_first else None), progress
        if history.in_a_row > rule.spikes_in_a_row:
            raise SpikeError(
                f"{spike}; it is number {history.in_a_row} in a row, more than "
                f"train.spikes_in_a_row = {rule.spikes_in_a_row}. Go on from a checkpoint with a "
                "lower optimizer.lr, or train.on_spike=warn"
            )
        return replace(result, spike=spike, left_out=f"{spike}; its update is left out"), progress


def next_loss_scale(config: LossScaleConfig, progress: Progress, *, is_finite: bool) -> Progress:
    """Returns the progress with the loss scale of the next step, if there is one."""
    scale = progress.loss_scale
    good_steps = progress.loss_scale_good_steps + 1
    if scale is None:
        return progress
    if not is_finite:
        scale = scale * config.backoff
        good_steps = 0
    elif good_steps >= config.interval:  # a resumed run may have a shorter interval
        good_steps = 0
        if scale * config.growth <= LARGEST_SCALE:
            scale *= config.growth
    return replace(progress, loss_scale=scale, loss_scale_good_steps=good_steps)


def find_spike(
    history: SpikeHistory, step: int, loss: float, grad_norm: float, rule: TrainConfig
) -> tuple[str | None, SpikeHistory]:
    """Returns why a finite step is a spike, None if it is not, and the history after it. Spikes are
    in a row if no step lies between them, or with `rollback` fewer steps than a window."""
    window = rule.spike_window
    found = (
        _exceeds("loss", loss, history.losses, rule.spike_loss_ratio, rule),
        _exceeds("gradient norm", grad_norm, history.grad_norms, rule.spike_norm_ratio, rule),
    )
    why = " and ".join(filter(None, found))
    after = replace(
        history,
        losses=(*history.losses, loss)[-window:],
        grad_norms=(*history.grad_norms, grad_norm)[-window:],
    )
    if not why:
        return None, after
    nearest = window if rule.on_spike == "rollback" else 1
    is_near = step - history.last_spike <= nearest
    in_a_row = history.in_a_row + 1 if is_near else 1
    return why, replace(after, spikes=history.spikes + 1, last_spike=step, in_a_row=in_a_row)


def _exceeds(
    name: str, value: float, past: Sequence[float], ratio: float, rule: TrainConfig
) -> str | None:
    if len(past) < rule.spike_window / 2:
        return None
    middle = median(past)
    deviation = _NORMAL * median(abs(each - middle) for each in past)
    if value <= max(ratio * middle, middle + rule.spike_deviations * deviation):
        return None
    return f"{name} {value:.4f} against a median of {middle:.4f} in the {len(past)} steps before"
