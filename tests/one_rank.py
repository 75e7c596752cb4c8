"""The place of the only rank of a run, for tests that run a worker in their own process."""

from __future__ import annotations

from pathlib import Path

from parallel3d.launch.rendezvous import Rendezvous


def one_rank(folder: Path) -> Rendezvous:
    """Returns the place of a rank that meets nobody. Its store is a new file in `folder`."""
    store = folder / f"store_{len(list(folder.iterdir()))}"
    return Rendezvous(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        init_method=f"file://{store}",
    )
