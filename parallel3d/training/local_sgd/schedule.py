"""The steps after which local SGD synchronises each part of the model: plain arithmetic, the same on every rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

_BLOCK = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """Each of `fragments` parts of the model is synchronised every `sync_every` steps, at even distances from each
    other, and what it sends is used `overlap_steps` later (Streaming DiLoCo, arXiv 2501.18512, section 2)."""

    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0

    def fragment_of(self, name: str) -> int:
        """Returns the fragment of a parameter by its global name. Blocks take turns (the paper's strided pattern), so
        that every pipeline stage has some of each fragment. The embedding is in the first fragment, the last norm and
        the head are in the last."""
        block = _BLOCK.match(name)
        if block is not None:
            return int(block[1]) % self.fragments
        return 0 if name.startswith("embed.") else self.fragments - 1

    def sent(self, step: int) -> list[int]:
        """Returns the fragments whose pseudo-gradients are sent after `step` (the first is 1)."""
        return [f for f in range(self.fragments) if step > 0 and (step - self._first(f)) % self.sync_every == 0]

    def halfway(self, step: int) -> list[int]:
        """Returns the fragments whose parts each replica has received after `step`, and whose mean it then sends."""
        return self.sent(step - -(-self.overlap_steps // 2))

    def due(self, step: int) -> list[int]:
        """Returns the fragments that take their outer step after `step`."""
        return self.sent(step - self.overlap_steps)

    def on_their_way(self, step: int) -> list[int]:
        """Returns the fragments that are sent and not yet due at the end of `step`."""
        return [f for before in range(self.overlap_steps) for f in self.sent(step - before)]

    def _first(self, fragment: int) -> int:
        """Returns the first step after which the fragment is synchronised; for the last fragment it is `sync_every`."""
        return (fragment + 1) * self.sync_every // self.fragments
