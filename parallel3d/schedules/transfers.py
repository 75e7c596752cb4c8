"""How far a pipeline rank's transfers run ahead of its actions: what the transport does and the planner counts."""

from __future__ import annotations

RECEIVES_AHEAD = 2  # receives posted beyond the one waited for, from each rank
SENDS_KEPT = 4  # sends to each rank before the oldest is waited for; its receive is always posted, so none blocks
