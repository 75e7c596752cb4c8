"""Guards the weights against steps whose loss or gradient norm is not finite or spikes.

`train.on_nonfinite` and `train.on_spike` decide whether such a step is applied with a warning, is
skipped or ends the run.

Loss scale: float16 cannot represent numbers between 0 and 6e-8, so the loss is multiplied by a
scale before the backward pass (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). A step
that overflows is skipped and lowers the scale. `loss_scale.interval` finite steps in a row raise
it, as in torch.amp.GradScaler. All ranks see the same numbers, so their scales stay equal.

Spikes: PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1) restarted from a checkpoint
about 100 steps before each loss spike and skipped 200 to 500 batches. OLMo-core (SkipStepOptimizer)
skips a step whose loss or norm is more than 6 standard deviations above the mean of the last 128
steps.

A step is a spike here if its loss or norm exceeds two bounds, both relative to the median of the
last `train.spike_window` finite steps. One bound is `train.spike_deviations` deviations above the
median, the other a multiple of it (`train.spike_loss_ratio` or `spike_norm_ratio`). A deviation is
1.4826 times the median absolute deviation, which spikes within the window hardly change. Spikes are
detected once the window is half full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from parallel3d.checkpoint.manifest import Progress, SpikeHistory
from parallel3d.config.recipe import LossScaleConfig, Recipe, TrainConfig
from parallel3d.errors import NonFiniteError, SpikeError
from parallel3d.training.step_result import StepResult

SMALLEST_SCALE = 1.0  # A loss that overflows without scaling has diverged.
LARGEST_SCALE = 2.0**127  # Largest power of two in float32.
# Ratio of standard deviation to median absolute deviation for a normal distribution.
_NORMAL = 1.4826


class Guard:
    """Checks each step before the optimizer applies it. All ranks compute the same result."""

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
        """Returns the result and the progress, updated for a non-finite number or a spike.

        The result gets a warning about a spike and the reason to skip the step, if any. A step that
        is skipped only to lower the loss scale gets no reason. The progress gets the next loss
        scale and the history of spikes. `describe_nonfinite`, a collective, names the rank and
        parameter of a non-finite number. Raises NonFiniteError or SpikeError to end the run.
        """
        progress = next_loss_scale(self._loss_scale, progress, is_finite=result.is_finite)
        if result.is_finite:
            self._nonfinite_in_a_row = 0
            return self._check_spike(step, result, progress)
        found = f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}"
        if progress.loss_scale is not None:
            if progress.loss_scale >= SMALLEST_SCALE:
                return result, progress  # The next step tries a smaller scale.
            progress = replace(progress, loss_scale=SMALLEST_SCALE)
            found += f" even at a loss scale of {result.loss_scale:g}"
        found += f"; {describe_nonfinite()}"
        self._nonfinite_in_a_row += 1
        in_a_row = self._nonfinite_in_a_row
        most = self._train.nonfinite_in_a_row if self._train.on_nonfinite == "skip" else 0
        if in_a_row > most:
            raise NonFiniteError(
                f"{found}; weights are those of step {step - in_a_row}; lower optimizer.lr or "
                "raise optimizer.warmup_steps"
            )
        found += f"; step skipped ({in_a_row} in a row, at most {most})"
        return replace(result, skip_reason=found), progress

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
            is_first = history.in_a_row == 1  # Warn only once for consecutive spikes.
            return replace(result, spike=spike if is_first else None), progress
        if history.in_a_row > rule.spikes_in_a_row:
            raise SpikeError(
                f"{spike}; {history.in_a_row} spikes in a row, more than "
                f"train.spikes_in_a_row = {rule.spikes_in_a_row}. Resume from a checkpoint with a "
                "lower optimizer.lr, or set train.on_spike=warn"
            )
        return replace(result, spike=spike, skip_reason=f"{spike}; step skipped"), progress


def next_loss_scale(config: LossScaleConfig, progress: Progress, *, is_finite: bool) -> Progress:
    """Returns the progress with the loss scale of the next step, unchanged without loss scaling."""
    scale = progress.loss_scale
    good_steps = progress.loss_scale_good_steps + 1
    if scale is None:
        return progress
    if not is_finite:
        scale = scale * config.backoff
        good_steps = 0
    elif good_steps >= config.interval:  # `>=`, because a resumed run can have a shorter interval.
        good_steps = 0
        if scale * config.growth <= LARGEST_SCALE:
            scale *= config.growth
    return replace(progress, loss_scale=scale, loss_scale_good_steps=good_steps)


def find_spike(
    history: SpikeHistory, step: int, loss: float, grad_norm: float, rule: TrainConfig
) -> tuple[str | None, SpikeHistory]:
    """Returns the reason why a finite step is a spike, or None, and the updated history.

    Spikes count as consecutive if no step lies between them or, with `rollback`, fewer than
    `train.spike_window` steps.
    """
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
    return f"{name} {value:.4f} against a median of {middle:.4f} over the last {len(past)} steps"
