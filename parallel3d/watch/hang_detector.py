"""Finds the rank that blocks a run: one that is stopped, silent or stuck, not one that waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel3d.watch.heartbeat import Beat

STOPPED_S = 2.5  # Seconds that a process may be stopped (state T) and silent.
# Seconds that a host may be silent. A link failure of 2 s silences it for 3.2 s.
LOST_S = 4.0
STUCK_S = 7.0  # Seconds that a rank may be silent or keep the others waiting.
STUCK_STEPS = 5  # The same in step durations, if that is longer.
# Seconds that all ranks may wait for data, for example while a file server restarts.
ALL_READ_S = 60.0
_GAP_S = 2.0  # Seconds without a call of `check` after which it assumes that it was suspended.
# Phases in which a silent or stuck rank is reported. train.timeout_s limits the others.
_JUDGED: tuple[str, ...] = ("data", "forward or backward", "optimizer")


@dataclass
class _Seen:
    """Last known state of a rank, in the detector's own time."""

    beat: Beat
    beaten_at: float  # Time of the last new heartbeat.
    since: float  # Time when the rank began its current activity.

    def is_in(self, phases: Sequence[str]) -> bool:
        """True if the rank has completed two steps and is in one of these phases."""
        return self.beat.step_s is not None and self.beat.phase in phases


class HangDetector:
    """Detects a hanging rank from the heartbeats of all ranks. `hosts` holds the host of each rank.

    Hosts need no common clock. If the detector itself was suspended, for example because the job
    was, it starts over.
    """

    def __init__(self, hosts: Sequence[str], own_host: str) -> None:
        self._hosts = hosts
        self._own_host = own_host
        self._seen: dict[int, _Seen] = {}
        self._checked_at = 0.0

    def check(
        self, beats: Mapping[int, Beat], states: Mapping[int, str], now: float
    ) -> tuple[int, str] | None:
        """Returns the hanging rank and a description, or None.

        `beats` has the newest heartbeats, and `states` the process states of ranks on this host
        ("T": stopped).
        """
        if now - self._checked_at > _GAP_S:
            self._seen = {}
        self._checked_at = now
        for rank, beat in beats.items():
            seen = self._seen.setdefault(rank, _Seen(beat, now, now))
            if beat.count != seen.beat.count:
                if beat.activity != seen.beat.activity:
                    seen.since = now
                seen.beat = beat
                seen.beaten_at = now
        durations = [seen.beat.step_s or 0.0 for seen in self._seen.values()]
        patience = max(STUCK_S, STUCK_STEPS * max(durations, default=0.0))
        for rank, seen in self._seen.items():
            place = _place(seen.beat)
            silent_s = now - seen.beaten_at
            silence = f"gives no sign for {silent_s:.0f} s {place}"
            state = states.get(rank)
            host = self._hosts[rank]
            if state == "T" and silent_s > STOPPED_S:
                return rank, f"is stopped (state T) {place}"
            if self._is_host_lost(host, now):
                everyone = f"all {self._hosts.count(host)} ranks on its host"
                return rank, f"{silence}, like {everyone}: the host is lost or cut off"
            if seen.is_in(_JUDGED) and silent_s > patience:
                why = "its host is lost or its interpreter is held"
                if state:
                    why = f"its interpreter is held (state {state})"
                return rank, f"{silence}: {why}"
        return self._find_stuck(now, patience)

    def last_seen(self, rank: int) -> str:
        """Returns the last known phase and step of a rank, to append to a message about its end."""
        return f", last seen {_place(self._seen[rank].beat)}" if rank in self._seen else ""

    def _is_host_lost(self, host: str, now: float) -> bool:
        """Returns True if all ranks of another host are silent, in a step or collecting metrics.

        Only hosts with several ranks count, because a single heartbeat may just be late.
        """
        seen = [self._seen[rank] for rank in self._seen if self._hosts[rank] == host]
        if host == self._own_host or not 1 < len(seen) == self._hosts.count(host):
            return False
        phases = (*_JUDGED, "metrics")
        return all(each.is_in(phases) and now - each.beaten_at > LOST_S for each in seen)

    def _find_stuck(self, now: float, patience: float) -> tuple[int, str] | None:
        """Finds the lowest rank that does not wait for others while no rank makes progress.

        If no rank waits for others, a rank counts as stuck only if all are waiting for data.
        """
        busy = {rank: seen for rank, seen in self._seen.items() if not seen.beat.waits}
        if not busy or len(self._seen) < len(self._hosts):
            return None
        phases = _JUDGED
        others = "while the others wait"
        if len(busy) == len(self._hosts):
            phases = ("data",)
            others = "as are all others"
            patience = max(ALL_READ_S, patience)
        stuck_s = min(now - seen.since for seen in self._seen.values())
        if stuck_s <= patience or not all(seen.is_in(phases) for seen in busy.values()):
            return None
        rank = min(busy)
        beat = busy[rank].beat
        return rank, f"is stuck for {stuck_s:.0f} s {_place(beat)}, {others}; {beat.stack}"


def process_state(pid: int) -> str:
    """Returns the Linux state letter of a process on this host, or "" if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _place(beat: Beat) -> str:
    when = f"after step {beat.step}" if beat.step else "before its first step"
    return f"in {beat.phase} {when}"
