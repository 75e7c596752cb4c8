"""One run's transfers between pipeline ranks: sends that do not block, receives posted ahead of
their use.

Between two ranks messages travel in the order in which the sender makes them, which the receiver
knows from the schedule, so neither tags nor shapes are on the wire. Small messages between CPUs of
one host go through `shared_memory.ring`, others by the backend (`Links.shares`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from parallel3d.pipeline.boundary import Crossing, Message, Tensors
from parallel3d.pipeline.links import Links
from parallel3d.schedules.schedule import RECEIVES_AHEAD, SENDS_KEPT, Action, Kind, Schedule

WAITS_FOR_RANKS = True  # for parallel3d.watch.heartbeat

Receive = tuple[Action, list[dist.Work], Tensors]  # by the backend, for the action that takes it


class Transport:
    """Carries out the sends and receives of one run. `send` passes on what an action has made,
    `receive` gets what an action takes, and `action_issued` is to be called after each action of
    this rank, when what it gives has been sent. `crossings[s]` is what goes between stages s and
    s + 1.

    A receive is posted only when all of this rank's own work from which its data follows has been
    issued, because a GPU may come to wait for all that was posted to it: for memory, or for a
    kernel that is loaded at its first use."""

    def __init__(self, links: Links, schedule: Schedule, crossings: Sequence[Crossing]) -> None:
        self.links = links
        self.crossings = crossings
        self._schedule = schedule
        # What stages of this rank made, and what was sent before a message that an action waited
        # for.
        self._arrived: dict[Action, Tensors] = {}
        # The takers of what each rank sends here, in its order, through shared memory and by the
        # backend, and the receives by the backend that are posted.
        self._in_memory: defaultdict[int, deque[Action]] = defaultdict(deque)
        self._unposted: defaultdict[int, deque[Action]] = defaultdict(deque)
        self._posted: defaultdict[int, deque[Receive]] = defaultdict(deque)
        self._issued = 0  # actions of this rank so far
        self._outboxes: defaultdict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._expect()

    def _expect(self) -> None:
        """Lists what is to come, and posts what can come by the backend before this rank has done
        anything."""
        links = self.links
        for (source, target), takers in self._schedule.transfers.items():
            for taker in takers if target == links.rank else ():
                is_shared = links.shares(source, target, self._message(taker))
                expected = self._in_memory if is_shared else self._unposted
                expected[source].append(taker)
        self._post()

    def action_issued(self) -> None:
        """Posts the receives that can come now that one more action of this rank has been
        issued."""
        self._issued += 1
        self._post()

    def send(self, maker: Action, tensors: Tensors) -> None:
        taker = self._schedule.feeds(maker)
        assert taker is not None
        links = self.links
        target = self._schedule.placement[taker.stage]
        if target == links.rank:
            self._arrived[taker] = tensors
            return
        message = self._message(taker)
        if links.shares(links.rank, target, message):
            links.outgoing[target].send(message.digest, tensors)
            return
        outbox = self._outboxes[target]
        for tensor in tensors:
            if len(outbox) >= SENDS_KEPT:
                links.complete(outbox.popleft()[0], target)
            tensor = tensor.contiguous()
            # the tensor must live until it is sent
            outbox.append((links.isend(tensor, target), tensor))

    def receive(self, taker: Action) -> Tensors:
        giver = taker.stage - 1 if taker.kind is Kind.FORWARD else taker.stage + 1
        source = self._schedule.placement[giver]
        while taker not in self._arrived:
            if self.links.shares(source, self.links.rank, self._message(taker)):
                self._read(source)
            else:
                self._complete(source)
        return self._arrived.pop(taker)

    def finish(self) -> None:
        """Waits until every message is on its way."""
        self.links.wait_until_sent()
        for target, outbox in self._outboxes.items():
            for work, _ in outbox:
                self.links.complete(work, target)

    def _read(self, source: int) -> None:
        """Waits for the next message in the memory shared with `source`."""
        taker = self._in_memory[source].popleft()
        link = self.links.incoming[source]
        message = self._message(taker)
        if self.links.wait(link) != message.digest:
            raise ValueError(
                f"{taker} takes {message} ({message.nbytes} bytes), and pipeline rank {source} has "
                "sent something else: the ranks have declared other shapes or sizes"
            )
        self._arrived[taker] = message.empty(self.links.device)
        link.read(self._arrived[taker])

    def _complete(self, source: int) -> None:
        """Waits for the next message that `source` sends by the backend."""
        taker, works, tensors = self._posted[source].popleft()
        self._post()
        for work in works:
            self.links.complete(work, source)
        self._arrived[taker] = tensors

    def _post(self) -> None:
        for source, unposted in self._unposted.items():
            posted = self._posted[source]
            after = self._schedule.postable_after(self.links.rank)
            while unposted and len(posted) <= RECEIVES_AHEAD and after[unposted[0]] <= self._issued:
                taker = unposted.popleft()
                tensors = self._message(taker).empty(self.links.device)
                works = [self.links.irecv(tensor, source) for tensor in tensors]
                posted.append((taker, works, tensors))

    def _message(self, taker: Action) -> Message:
        if taker.kind is Kind.FORWARD:
            return self.crossings[taker.stage - 1].forward
        return self.crossings[taker.stage].backward


class WarmupTransport(Transport):
    """Stands in for the transport of stages that run alone: what another rank would send is zeros,
    and what goes to another rank goes nowhere."""

    def _expect(self) -> None:
        pass

    def send(self, maker: Action, tensors: Tensors) -> None:
        pass

    def receive(self, taker: Action) -> Tensors:
        return tuple(x.zero_() for x in self._message(taker).empty(self.links.device))
