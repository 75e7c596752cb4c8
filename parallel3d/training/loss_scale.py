"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2).

float16 has no number between 0 and 6e-8, and gradients are often smaller: the loss is multiplied by a scale before the
backward, and the gradients are divided by it after. A step whose gradients overflow is left out and the scale is
lowered; after many good steps it is raised. The rule is torch.amp.GradScaler's. Every rank updates its scale with the
same answer to whether the gradients of all ranks are finite, so all scales stay equal without being sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel3d.config.recipe import LossScaleConfig

SMALLEST = 1.0  # a loss that overflows unscaled has diverged
LARGEST = 2.0**127  # the largest power of two in float32, in which losses are multiplied


@dataclass
class LossScaler:
    """The scale of the next step, and how many good steps in a row have had it."""

    config: LossScaleConfig
    scale: float
    good_steps: int = 0

    @property
    def has_failed(self) -> bool:
        """True if no scale helps any more."""
        return self.scale < SMALLEST

    def update(self, *, is_finite: bool) -> None:
        """Sets the next step's scale; `is_finite` says whether this step's loss and gradients were finite."""
        if not is_finite:
            self.scale *= self.config.backoff
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.config.interval:
            self.good_steps = 0
            if self.scale * self.config.growth <= LARGEST:
                self.scale *= self.config.growth
