"""What a rank keeps between stages, counted in tensors of one size: as `pipeline.transport` receives ahead into memory
that it uses again, and keeps what it sends for a while."""

from __future__ import annotations

from collections import Counter

from parallel3d.schedules.schedule import Action, Kind
from parallel3d.schedules.transfers import RECEIVES_AHEAD, SENDS_KEPT


class Traffic:
    """Of a rank of a pipeline that does `actions`. From each rank things are taken to come in the order in which they
    are used; where forwards and backwards come from one rank it is nearly so. `keeps_gradients`: what is put off of a
    backward is made of the gradient that it took."""

    def __init__(
        self, holders: tuple[int, ...], rank: int, actions: tuple[Action, ...], *, keeps_gradients: bool
    ) -> None:
        self._holders, self._rank, self._keeps_gradients = holders, rank, keeps_gradients
        sources = map(self._giver, actions)
        self._unposted = Counter(source for source in sources if source is not None and source != rank)
        self._posted: Counter[int] = Counter()
        self._in_use = 0  # of the memory that is received into: posted, or a stage's
        self._pool = 0  # that there is: it is not given back
        self._inputs = 0  # of it, what waits for a backward as a stage's input
        self._put_off = 0  # or as a gradient for the second half of one
        self._sent: Counter[int] = Counter()
        self._handed_over = 0  # between two stages of this rank
        self._taken = 0  # of those, a gradient that the action has
        for source in self._unposted:
            self._post(source)

    @property
    def waiting(self) -> int:
        """Beside the inputs of forwards that are alive, and of the one that begins, and what second halves wait for."""
        return self._pool - self._inputs - self._put_off + self._sent.total() + self._handed_over + self._taken

    @property
    def received(self) -> int:
        """Memory that there is to receive into."""
        return self._pool

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
        self._posted[source] -= 1
        self._post(source)
        self._inputs += is_forward

    def give(self, action: Action) -> None:
        """What an action leaves: what it took is free again, what it made is on its way."""
        stage, kind, _ = action
        self._taken = 0
        if kind is Kind.WEIGHT:
            kept = self._keeps(stage)
            self._put_off -= kept
            self._in_use -= kept
            return
        if kind is not Kind.FORWARD:
            kept = kind is Kind.INPUT and self._keeps(stage)
            self._put_off += kept
            self._in_use -= not kept and self._giver(action) not in (None, self._rank)
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
            self._sent[to] = min(self._sent[to] + 1, SENDS_KEPT)

    def _giver(self, action: Action) -> int | None:
        stage = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        if action.kind is Kind.WEIGHT or not 0 <= stage < len(self._holders):
            return None
        return self._holders[stage]

    def _keeps(self, stage: int) -> bool:
        """Whether second halves of a stage need gradients that another rank has sent."""
        last = len(self._holders) - 1
        return self._keeps_gradients and stage < last and self._holders[stage + 1] != self._rank

    def _receives(self, stage: int) -> bool:
        """Whether a stage's input comes from another rank."""
        return stage > 0 and self._holders[stage - 1] != self._rank

    def _post(self, source: int) -> None:
        more = min(self._unposted[source], RECEIVES_AHEAD + 1 - self._posted[source])
        self._unposted[source] -= more
        self._posted[source] += more
        self._in_use += more
        self._pool = max(self._pool, self._in_use)
