"""Sends and receives between pipeline ranks, posted ahead of their use so that they overlap compute.

Between two ranks things travel in the order in which the sender makes them, which the receiver knows from the schedule:
no tags, no shapes on the wire. One process group carries what goes to a higher rank and another what goes to a lower
one, because a GPU's group works off its queue in order: in a single queue two ranks that each send first would wait for
each other for ever.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.pipeline.schedule import Action, Schedule

AHEAD = 2  # receives posted beyond the one waited for, from each rank
IN_FLIGHT = 4  # sends to each rank before the oldest is waited for; its receive is always posted, so none blocks


@dataclass(frozen=True)
class Links:
    """The two process groups over one pipeline, and this rank's place in it."""

    ascending: dist.ProcessGroup | None
    descending: dist.ProcessGroup | None
    rank: int
    size: int

    def group(self, source: int, target: int) -> dist.ProcessGroup:
        group = self.ascending if source < target else self.descending
        assert group is not None
        return group


def open_links(pp: DeviceMesh) -> Links:
    """The groups of this rank's pipeline; the second is made here, by the pipeline's ranks alone."""
    rank, size = pp.get_local_rank(), pp.size()
    if size == 1:
        return Links(None, None, 0, 1)
    ascending = pp.get_group()
    descending = dist.new_group(
        dist.get_process_group_ranks(ascending), use_local_synchronization=True, group_desc="pipeline_descending"
    )
    return Links(ascending, descending, rank, size)


class Transport:
    """One run's transfers: `send` hands over what an action on another rank takes, `receive` gets what one here does.

    `buffer` makes an empty tensor of the shape that crosses between stages.
    """

    def __init__(self, links: Links, schedule: Schedule, buffer: Callable[[], Tensor]) -> None:
        self._links = links
        self._schedule = schedule
        self._inboxes = {
            source: Inbox(links, source, takers, buffer)
            for (source, target), takers in schedule.transfers.items()
            if target == links.rank
        }
        self._outboxes: defaultdict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    def send(self, tensor: Tensor, taker: Action) -> None:
        target = self._schedule.placement[taker.stage]
        outbox = self._outboxes[target]
        while len(outbox) >= IN_FLIGHT:
            outbox.popleft()[0].wait()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._links.group(self._links.rank, target), group_dst=target)
        assert work is not None
        outbox.append((work, tensor))  # the tensor must live until it is sent

    def receive(self, taker: Action, giver_stage: int) -> Tensor:
        return self._inboxes[self._schedule.placement[giver_stage]].take(taker)

    def finish(self) -> None:
        """Waits for the sends that are left."""
        for outbox in self._outboxes.values():
            while outbox:
                outbox.popleft()[0].wait()


class Inbox:
    """What one rank sends here, in its order."""

    def __init__(self, links: Links, source: int, expected: Sequence[Action], buffer: Callable[[], Tensor]) -> None:
        self._links = links
        self._source = source
        self._unposted = deque(expected)
        self._posted: deque[tuple[Action, dist.Work, Tensor]] = deque()
        self._arrived: dict[Action, Tensor] = {}
        self._buffer = buffer
        self._post()

    def take(self, action: Action) -> Tensor:
        """Waits for what `action` takes. What was sent before it is kept for its own taker."""
        while action not in self._arrived:
            arriving, work, tensor = self._posted.popleft()
            self._post()
            work.wait()
            self._arrived[arriving] = tensor
        return self._arrived.pop(action)

    def _post(self) -> None:
        while self._unposted and len(self._posted) <= AHEAD:
            tensor = self._buffer()
            work = dist.irecv(tensor, group=self._links.group(self._source, self._links.rank), group_src=self._source)
            assert work is not None
            self._posted.append((self._unposted.popleft(), work, tensor))
