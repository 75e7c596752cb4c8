"""Determines how much memory this host, or the container that this process is in, has left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FreeMemory:
    """Bytes available on this host, and the name of the limit that leaves them."""

    bytes_: int
    limit: str


def free_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> FreeMemory | None:
    """Returns the smallest free memory of the system and of the version 2 cgroups of this process,
    or None if it is unknown."""
    try:
        meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        found = [FreeMemory(int(meminfo["MemAvailable"].split()[0]) << 10, "the system")]
        groups = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    except (OSError, KeyError, ValueError):
        return None
    for _, controllers, path in groups:
        inner = cgroups / path.lstrip("/")
        if not controllers:  # cgroup version 2
            for group in (inner, *inner.parents):
                found += _left_in(group)
    return min(found, key=lambda free: free.bytes_)


def _left_in(group: Path) -> Iterator[FreeMemory]:
    """Yields the free memory of a cgroup if it has a limit. Inactive file pages count as free."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left = (
            int(limit)
            - int((group / "memory.current").read_text())
            + int(stat.get("inactive_file", 0))
        )
    except (OSError, ValueError):
        return  # the cgroup is not visible, as in a container
    yield FreeMemory(max(left, 1), f"the cgroup limit of {int(limit) / 2**30:,.1f} GiB")
