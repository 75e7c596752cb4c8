"""What a rank keeps between stages, counted in tensors of one size: as `pipeline.transport` receives ahead into memory
that it uses again, and keeps what it sends for a while."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from parallel3d.pipeline.schedule import Action, Kind

_AHEAD = 2  # as pipeline.transport's: receives posted beyond the one waited for, from each rank
_IN_FLIGHT = 4  # and sends to each rank that are kept

Taker = tuple[int, bool, int]  # stage, whether its forward, microbatch


class Traffic:
    """Of a rank of a pipeline, `senders` being the actions of the ranks that it receives from."""

    def __init__(self, holders: tuple[int, ...], rank: int, senders: Mapping[int, tuple[Action, ...]]) -> None:
        self._holders, self._rank = holders, rank
        self._unposted = {source: deque(self._takers(actions)) for source, actions in senders.items()}
        self._posted: dict[int, deque[Taker]] = {source: deque() for source in senders}
        self._arrived: set[Taker] = set()
        self._in_use = 0  # of the memory that is received into: waiting, or a stage's
        self._pool = 0  # that there is: it is not given back
        self._inputs = 0  # of it, what waits for a backward as a stage's input
        self._sent: Counter[int] = Counter()
        self._handed_over = 0  # between two stages of this rank
        self._taken = 0  # of those, a gradient that the action has
        for source in senders:
            self._post(source)

    @property
    def waiting(self) -> int:
        """Beside the inputs of forwards that are alive, and of the one that begins."""
        return self._pool - self._inputs + self._sent.total() + self._handed_over + self._taken

    def take(self, action: Action) -> None:
        """What an action takes of another stage."""
        source = self._giver(action)
        self._taken = 0
        if source is None:
            return
        is_forward = action.kind is Kind.FORWARD
        if source == self._rank:
            self._handed_over -= 1
            self._taken = int(not is_forward)
            return
        taker = (action.stage, is_forward, action.microbatch)
        while taker not in self._arrived:
            self._arrived.add(self._posted[source].popleft())
            self._post(source)
        self._arrived.remove(taker)
        self._inputs += is_forward

    def give(self, action: Action) -> None:
        """What an action leaves: what it took is free again, what it made is on its way."""
        stage, kind, _ = action
        self._taken = 0
        if kind is Kind.WEIGHT:
            return
        if kind is not Kind.FORWARD:
            self._in_use -= self._giver(action) not in (None, self._rank)
            if self._receives(stage):
                self._in_use -= 1
                self._inputs -= 1
        target = stage + 1 if kind is Kind.FORWARD else stage - 1
        if not 0 <= target < len(self._holders):
            return
        if self._holders[target] == self._rank:
            self._handed_over += 1
        else:
            to = self._holders[target]
            self._sent[to] = min(self._sent[to] + 1, _IN_FLIGHT)

    def _giver(self, action: Action) -> int | None:
        stage = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        if action.kind is Kind.WEIGHT or not 0 <= stage < len(self._holders):
            return None
        return self._holders[stage]

    def _receives(self, stage: int) -> bool:
        """Whether a stage's input comes from another rank."""
        return stage > 0 and self._holders[stage - 1] != self._rank

    def _post(self, source: int) -> None:
        unposted, posted = self._unposted[source], self._posted[source]
        while unposted and len(posted) <= _AHEAD:
            posted.append(unposted.popleft())
            self._in_use += 1
            self._pool = max(self._pool, self._in_use)

    def _takers(self, actions: tuple[Action, ...]) -> list[Taker]:
        found = []
        for stage, kind, microbatch in actions:
            target = stage + 1 if kind is Kind.FORWARD else stage - 1
            is_one = kind is not Kind.WEIGHT and 0 <= target < len(self._holders)
            if is_one and self._holders[target] == self._rank:
                found.append((target, kind is Kind.FORWARD, microbatch))
        return found
