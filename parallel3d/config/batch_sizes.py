"""The size of each step's global batch, which may start small and grow. Early gradients agree with each other, so
that a large batch buys little (McCandlish et al. 2018, arXiv 1812.06162).

The size depends on the step and the recipe alone, never on the layout, so that every layout sees the same sequences in
the same steps, and a run resumes in the middle by arithmetic. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The sequences in the batch of step 0, 1, ...: `start` at first, then `increment` more at a time, evenly over
    `warmup_steps`, after which the batch is `full`. `increment` divides full - start."""

    full: int
    start: int
    increment: int
    warmup_steps: int

    @classmethod
    def of(cls, full: int, start: int | None, increment: int | None, warmup_steps: int | None) -> BatchSizes:
        """Makes the sizes from the recipe's keys. Without a start the batch is always full."""
        if start is None or warmup_steps is None:
            return cls(full=full, start=full, increment=1, warmup_steps=0)
        return cls(full=full, start=start, increment=increment or start, warmup_steps=warmup_steps)

    @property
    def rises(self) -> int:
        """The number of times that the batch grows."""
        return (self.full - self.start) // self.increment

    def at(self, step: int) -> int:
        """Returns the size of the batch of `step`, which counts from 0."""
        if step >= self.warmup_steps:
            return self.full
        return self.start + self.increment * (self.rises * step // self.warmup_steps)

    def before(self, step: int) -> int:
        """Returns the sequences in all batches before `step`, which is the number of its first sample."""
        grown = (max(0, step - -(-rise * self.warmup_steps // self.rises)) for rise in range(1, self.rises + 1))
        return self.start * step + self.increment * sum(grown)
