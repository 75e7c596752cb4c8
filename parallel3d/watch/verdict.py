"""Who is at fault when a run stands still: the rank that is stopped, silent or busy, not those that wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel3d.watch.pulse import Beat

STOPPED_S = 2.5  # a process that is stopped for longer is told
LOST_S = 4.0  # a host that gives no sign for longer is told; a link that is gone for 2 s is silent for 3.2 s
STUCK_S = 7.0  # the least time that a rank may keep the others waiting (it is told within 10), ...
STUCK_STEPS = 5  # ... which is so many steps where these are longer
ALL_READ_S = 60.0  # the least time that all ranks may wait for their data: a file server may go away and come back
_GAP_S = 2.0  # a watcher that was held for longer has seen nothing of the others meanwhile
# What may take long on one rank alone is not judged: there train.timeout_s is the limit.
_JUDGED = ("data", "forward or backward", "optimizer")


@dataclass
class _Seen:
    """What the watcher knows of a rank, in its own time."""

    beat: Beat
    beaten_at: float  # when the count last grew
    doing: tuple[int, bool, bool, bool]  # the steps done, and whether it waits, is in a phase that is judged, in data
    since: float  # ... for so long
    stopped_since: float | None = None


class Judge:
    """Remembers the beats of all ranks. `hosts` has the host of each rank, and the watcher is on `own_host`. It counts
    in the watcher's own time, so that hosts need no common clock, and begins anew when the watcher itself was held, as
    it is where a whole job is stopped and continued."""

    def __init__(self, hosts: Sequence[str], own_host: str) -> None:
        self._world_size = len(hosts)
        others: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            if host != own_host:
                others.setdefault(host, []).append(rank)
        self._other_hosts = list(others.values())  # the ranks of each
        self._seen: dict[int, _Seen] = {}
        self._looked_at: float | None = None

    def look(self, beats: Mapping[int, Beat], states: Mapping[int, str], now: float) -> tuple[int, str] | None:
        """Takes the newest beats and the process states that can be read on this host ("T": stopped). Returns the rank
        at fault and words on it, or None while nobody is."""
        was_held = self._looked_at is not None and now - self._looked_at > _GAP_S
        self._looked_at = now
        for rank, beat in beats.items():
            self._take(rank, beat, states.get(rank, ""), now, was_held=was_held)
        patience = self._patience()
        return (
            self._stopped(now)
            or self._lost(now, patience)
            or self._silent(states, now, patience)
            or self._stuck(now, patience)
        )

    def last_seen(self, rank: int) -> str:
        """Returns where a rank was by its newest beat, to be put after words on its end; "" before its first."""
        return f", last seen {_place(self._seen[rank].beat)}" if rank in self._seen else ""

    def _take(self, rank: int, beat: Beat, state: str, now: float, *, was_held: bool) -> None:
        seen, doing = self._seen.get(rank), (beat.step, beat.waits, beat.phase in _JUDGED, beat.phase == "data")
        if seen is None or was_held:
            self._seen[rank] = seen = _Seen(beat, now, doing, now)
        if beat.count != seen.beat.count:
            seen.beat, seen.beaten_at = beat, now
            if seen.doing != doing:  # so that what was not judged does not count once the rank goes on
                seen.doing, seen.since = doing, now
        if state != "T":
            seen.stopped_since = None
        elif seen.stopped_since is None:
            seen.stopped_since = now

    def _stopped(self, now: float) -> tuple[int, str] | None:
        for rank, seen in self._seen.items():
            if seen.stopped_since is not None and now - seen.stopped_since > STOPPED_S:
                return rank, f"is stopped (state T) {_place(seen.beat)}"
        return None

    def _lost(self, now: float, patience: float) -> tuple[int, str] | None:
        """Another host, none of whose ranks gives a sign, in a phase in which no interpreter is held for long. Of a
        host that has a single rank a sign may just be late."""
        for own in self._other_hosts:
            beats = [self._seen[rank].beat for rank in own if rank in self._seen]
            in_a_step = [each for each in beats if each.step_s is not None and (each.waits or each.phase in _JUDGED)]
            if len(in_a_step) < len(own) or any(each.phase == "done" for each in beats):
                continue
            silent_s = min(now - self._seen[rank].beaten_at for rank in own)
            if silent_s > (LOST_S if len(own) > 1 else patience):
                others = f", nor do the {len(own) - 1} others on its host" * (len(own) > 1)
                where = _place(self._seen[own[0]].beat)
                return own[0], f"gives no sign for {silent_s:.0f} s {where}{others}: the host is lost or cut off"
        return None

    def _silent(self, states: Mapping[int, str], now: float, patience: float) -> tuple[int, str] | None:
        for rank, seen in self._seen.items():
            silent_s = now - seen.beaten_at
            if seen.beat.step_s is not None and seen.beat.phase in _JUDGED and silent_s > patience:
                state = f" (state {states[rank]})" if states.get(rank) else ""
                return rank, f"gives no sign for {silent_s:.0f} s{state}: its interpreter is held {_place(seen.beat)}"
        return None

    def _stuck(self, now: float, patience: float) -> tuple[int, str] | None:
        """The ranks that do not wait, while all others wait for them, in a step that none has done for long; or all
        ranks, where each of them waits for its data."""
        if len(self._seen) < self._world_size:
            return None
        busy = {rank: seen for rank, seen in self._seen.items() if not seen.beat.waits}
        if not busy or any(seen.beat.phase not in _JUDGED for seen in busy.values()):
            return None
        others = "while the others wait"
        if len(busy) == len(self._seen):
            if any(seen.beat.phase != "data" for seen in busy.values()):
                return None
            others, patience = "as are all others", max(ALL_READ_S, patience)
        stuck_s = min(now - seen.since for seen in self._seen.values())
        if any(seen.beat.step_s is None for seen in self._seen.values()) or stuck_s <= patience:
            return None
        rank, seen = min(busy.items())
        return rank, f"is stuck for {stuck_s:.0f} s {_place(seen.beat)}, {others}; {seen.beat.stack}"

    def _patience(self) -> float:
        """The seconds that a rank may keep the others waiting."""
        longest = max((seen.beat.step_s or 0.0 for seen in self._seen.values()), default=0.0)
        return max(STUCK_S, STUCK_STEPS * longest)


def process_state(pid: int) -> str:
    """Returns the letter of a process of this host that Linux has for its state, such as S or T; "" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _place(beat: Beat) -> str:
    """Where a rank is in the run, in words."""
    return f"in {beat.phase} " + (f"after step {beat.step}" if beat.step else "before its first step")
