"""The rows of signals to a run: those that kill, and those that ask it to save and end."""

from __future__ import annotations

import signal

from parallel3d.tools.bench.faults.fault import (
    Fault,
    to_group,
    to_launcher,
    to_rank,
)

_STOPPED_BY = r"^error: stopped by {} after step \d+, saved: "
_SENT = {"launcher": to_launcher, "rank 1": lambda signum: to_rank(1, signum), "group": to_group}


def _asks(signum: signal.Signals, whom: str, status: int, by: str) -> Fault:
    """A signal that asks a run to save and end."""
    return Fault(
        name=f"{signum.name} to the {whom}" if whom != "rank 1" else f"{signum.name} to rank 1",
        act=_SENT[whom](signum),
        words=(f"(?m){_STOPPED_BY.format(by)}",),
        within_s=3.0,
        status=status,
        saves=True,
    )


ASKED_TO_END: tuple[Fault, ...] = (
    *(_asks(signal.SIGTERM, whom, 75, "SIGTERM") for whom in _SENT),
    *(_asks(signal.SIGINT, whom, 130, "Ctrl-C") for whom in _SENT),
)

KILLED: tuple[Fault, ...] = (
    Fault(
        name="SIGKILL of the launcher",
        act=to_launcher(signal.SIGKILL),
        words=(),
        within_s=5.0,
        status=-signal.SIGKILL,
        has_peer=True,
    ),
    Fault(
        name="SIGKILL of rank 1",
        act=to_rank(1, signal.SIGKILL),
        words=(r"(?m)^error: rank 1 \(.*, pp 0, dp_replicate 0, dp_shard 1, tp 0\) was killed by SIGKILL",),
        within_s=2.0,
        has_peer=True,
    ),
)
