"""Transfers between pipeline ranks during one run.

Receives are posted ahead of their use. A send through the backend does not block unless SENDS_KEPT
earlier ones to the same rank are unfinished. A send through shared memory never blocks.

Messages between two ranks travel in the order in which they are sent. The receiver knows this order
from the schedule, so messages carry no tags or shapes. Small messages between CPUs of one host go
through `shared_memory.ring`, all others through the backend (`Links.shares`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from parallel3d.pipeline.boundary import Crossing, Message, Tensors
from parallel3d.pipeline.links import Links
from parallel3d.schedules.schedule import RECEIVES_AHEAD, SENDS_KEPT, Action, Kind, Schedule
from parallel3d.watch.step_clock import timed, timed_as

WAITS_FOR_RANKS = True  # Makes parallel3d.watch.heartbeat count a rank as waiting in this module.

# Receive through the backend: the action that consumes it, the handles to wait for, the buffers.
Receive = tuple[Action, list[dist.Work], Tensors]


class Transport:
    """Sends and receives of one run.

    Call `receive` for the inputs of an action, `send` for its result, and `action_issued` after
    each action. `crossings[s]` declares the messages between stages s and s + 1.

    A receive is posted only after this rank has issued all of its own actions that the data depends
    on. Otherwise a GPU could deadlock: allocating memory or loading a kernel may block until all
    posted work is done.
    """

    def __init__(self, links: Links, schedule: Schedule, crossings: Sequence[Crossing]) -> None:
        self.links = links
        self.crossings = crossings
        self._schedule = schedule
        # Messages received early or made on this rank, keyed by the action that consumes them.
        self._arrived: dict[Action, Tensors] = {}
        # Actions that consume the messages of each source rank, in the order of arrival: those
        # through shared memory, those through the backend, and those with a posted receive.
        self._in_memory: defaultdict[int, deque[Action]] = defaultdict(deque)
        self._unposted: defaultdict[int, deque[Action]] = defaultdict(deque)
        self._posted: defaultdict[int, deque[Receive]] = defaultdict(deque)
        self._issued = 0  # Number of actions that this rank has issued.
        self._outboxes: defaultdict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._expect()

    def _expect(self) -> None:
        """Lists the expected messages and posts receives that depend on no action of this rank."""
        links = self.links
        for (source, target), takers in self._schedule.transfers.items():
            for taker in takers if target == links.rank else ():
                is_shared = links.shares(source, target, self._message(taker))
                expected = self._in_memory if is_shared else self._unposted
                expected[source].append(taker)
        self._post()

    def action_issued(self) -> None:
        """Counts an action of this rank and posts the receives that this allows."""
        self._issued += 1
        self._post()

    @timed_as("pp_p2p")
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
            # Keep the tensor alive until it is sent.
            outbox.append((links.isend(tensor, target), tensor))

    @timed_as("pp_p2p")
    def receive(self, taker: Action) -> Tensors:
        giver = taker.stage - 1 if taker.kind is Kind.FORWARD else taker.stage + 1
        source = self._schedule.placement[giver]
        while taker not in self._arrived:
            if self.links.shares(source, self.links.rank, self._message(taker)):
                self._read(source)
            else:
                self._complete(source)
        return self._arrived.pop(taker)

    @timed_as("pp_p2p")
    def finish(self) -> None:
        """Waits until all messages are sent."""
        self.links.wait_until_sent()
        for target, outbox in self._outboxes.items():
            for work, _ in outbox:
                self.links.complete(work, target)

    def _read(self, source: int) -> None:
        """Waits for the next message from `source` through shared memory."""
        taker = self._in_memory[source].popleft()
        link = self.links.incoming[source]
        message = self._message(taker)
        with timed("pp_bubble"):
            digest = self.links.wait(link)
        if digest != message.digest:
            raise ValueError(
                f"{taker} expects {message} ({message.nbytes} bytes), but pipeline rank {source} "
                "sent another shape or dtype; declare the same boundaries and sizes on all ranks"
            )
        self._arrived[taker] = message.empty(self.links.device)
        link.read(self._arrived[taker])

    def _complete(self, source: int) -> None:
        """Waits for the next message from `source` through the backend."""
        taker, works, tensors = self._posted[source].popleft()
        self._post()
        with timed("pp_bubble"):
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
    """Replaces all transfers during a warm-up: receives return zeros, sends are dropped."""

    def _expect(self) -> None:
        pass

    def send(self, maker: Action, tensors: Tensors) -> None:
        pass

    def receive(self, taker: Action) -> Tensors:
        return tuple(x.zero_() for x in self._message(taker).empty(self.links.device))
