"""One run's transfers between pipeline ranks: sends that do not block, receives posted ahead of
their use.

Between two ranks messages travel in the order in which the sender makes them, which the receiver
knows from the schedule, so neither tags nor shapes are on the wire. Small messages between CPUs of
one host go through `host_memory.ring`, others by the backend (`Links.shares`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.pipeline.boundary import Boundary, Crossing, Message, TensorSpec
from parallel3d.pipeline.links import Links
from parallel3d.schedules.schedule import RECEIVES_AHEAD, SENDS_KEPT, Action, Kind, Schedule
from parallel3d.torch_private import storage_references

WAITS_FOR_RANKS = True  # for parallel3d.watch.heartbeat

Tensors = tuple[Tensor, ...]


class Buffers:
    """A pool of memory for received tensors. A tensor is used again as soon as nothing but the pool
    refers to it: autograd may keep a received tensor, or a view of it, for longer than the runtime
    does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: defaultdict[TensorSpec, deque[tuple[Tensor, torch.UntypedStorage]]] = (
            defaultdict(deque)
        )

    def take(self, spec: TensorSpec) -> Tensor:
        pool = self._pools[spec]
        for _ in range(len(pool)):
            tensor, storage = pool[0]
            pool.rotate(-1)
            if storage_references(storage) == 2:  # the pool's own two
                return tensor.detach()
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)  # type: ignore[arg-type]
        pool.append((tensor, tensor.untyped_storage()))
        return tensor.detach()

    def take_all(self, specs: Boundary) -> Tensors:
        return tuple(self.take(spec) for spec in specs)


class _Posted(NamedTuple):
    """A message that is being received by the backend."""

    taker: Action
    works: list[dist.Work]
    tensors: Tensors


class Transport:
    """Carries out the sends and receives of one run. `send` passes on what an action on another
    rank takes, `receive` gets what an action here takes, and `action_issued` is to be called after
    each action of this rank, when what it gives has been sent. `crossings[s]` is what goes between
    stages s and s + 1.

    A receive is posted only when all of this rank's own work from which its data follows has been
    issued, because a GPU may come to wait for all that was posted to it: for memory, or for a
    kernel that is loaded at its first use."""

    def __init__(
        self, links: Links, schedule: Schedule, crossings: Sequence[Crossing], buffers: Buffers
    ) -> None:
        self.links, self.crossings, self._buffers = links, crossings, buffers
        self._placement = schedule.placement
        # what was sent before that which an action waited for
        self._arrived: dict[Action, Tensors] = {}
        # The takers of what each rank sends here, in its order, through shared memory and by the
        # backend, and of those the receives that are posted.
        self._in_memory: defaultdict[int, deque[Action]] = defaultdict(deque)
        self._unposted: defaultdict[int, deque[Action]] = defaultdict(deque)
        self._posted: defaultdict[int, deque[_Posted]] = defaultdict(deque)
        self._postable_after: Mapping[Action, int] = {}
        self._issued = 0  # actions of this rank so far
        self._outboxes: defaultdict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._expect(schedule)

    @property
    def device(self) -> torch.device:
        return self._buffers.device

    def _expect(self, schedule: Schedule) -> None:
        """Lists what is to come, and posts what can come by the backend before this rank has done
        anything."""
        links = self.links
        gaps = zip(schedule.placement[:-1], schedule.placement[1:], self.crossings, strict=True)
        for one, other, crossing in gaps:
            # all ranks come to need the groups at once
            if one != other and not links.shares(one, other, crossing.forward.nbytes):
                links.open_groups()
        for (source, target), takers in schedule.transfers.items():
            for taker in takers if target == links.rank else ():
                if links.shares(source, target, self._message(taker).nbytes):
                    self._in_memory[source].append(taker)
                else:
                    self._unposted[source].append(taker)
        if self._unposted:
            self._postable_after = schedule.postable_after(links.rank)
        self._post()

    def action_issued(self) -> None:
        """Posts the receives that can come now that one more action of this rank has been
        issued."""
        self._issued += 1
        self._post()

    def send(self, taker: Action, tensors: Sequence[Tensor]) -> None:
        links, target, message = self.links, self._placement[taker.stage], self._message(taker)
        if links.shares(links.rank, target, message.nbytes):
            links.outgoing[target].send(message.digest, tensors)
            return
        outbox = self._outboxes[target]
        for tensor in tensors:
            while len(outbox) >= SENDS_KEPT:
                links.complete(outbox.popleft()[0], target)
            tensor = tensor.contiguous()
            # the tensor must live until it is sent
            outbox.append((links.isend(tensor, target), tensor))

    def receive(self, taker: Action) -> Tensors:
        source = self._placement[taker.stage + (-1 if taker.kind is Kind.FORWARD else 1)]
        is_shared = self.links.shares(source, self.links.rank, self._message(taker).nbytes)
        take_next = self._read if is_shared else self._complete
        while taker not in self._arrived:
            arrived, tensors = take_next(source)
            self._arrived[arrived] = tensors
        return self._arrived.pop(taker)

    def finish(self) -> None:
        """Waits until every message is on its way."""
        self.links.wait_until_sent()
        for target, outbox in self._outboxes.items():
            while outbox:
                self.links.complete(outbox.popleft()[0], target)

    def _read(self, source: int) -> tuple[Action, Tensors]:
        """Waits for the next message in the memory shared with `source`, and returns it with the
        action that takes it."""
        taker, link = self._in_memory[source].popleft(), self.links.incoming[source]
        message = self._message(taker)
        if self.links.wait(link) != message.digest:
            raise ValueError(
                f"{taker} takes {message} ({message.nbytes} bytes), and pipeline rank {source} has "
                "sent something else: the ranks have declared other shapes or sizes"
            )
        tensors = self._buffers.take_all(message.specs)
        link.read(tensors)
        return taker, tensors

    def _complete(self, source: int) -> tuple[Action, Tensors]:
        """Waits for the next message that `source` sends by the backend, and returns it with the
        action that takes it."""
        posted = self._posted[source].popleft()
        self._post()
        for work in posted.works:
            self.links.complete(work, source)
        return posted.taker, posted.tensors

    def _post(self) -> None:
        for source, unposted in self._unposted.items():
            posted = self._posted[source]
            while unposted and len(posted) <= RECEIVES_AHEAD:
                if self._postable_after[unposted[0]] > self._issued:
                    break
                taker = unposted.popleft()
                tensors = self._buffers.take_all(self._message(taker).specs)
                works = [self.links.irecv(tensor, source) for tensor in tensors]
                posted.append(_Posted(taker, works, tensors))

    def _message(self, taker: Action) -> Message:
        if taker.kind is Kind.FORWARD:
            return self.crossings[taker.stage - 1].forward
        return self.crossings[taker.stage].backward


class WarmupTransport(Transport):
    """Stands in for the transport of stages that run alone: what another rank would send is zeros,
    and what goes to another rank goes nowhere."""

    def _expect(self, schedule: Schedule) -> None:
        pass

    def send(self, taker: Action, tensors: Sequence[Tensor]) -> None:
        pass

    def receive(self, taker: Action) -> Tensors:
        tensors = self._buffers.take_all(self._message(taker).specs)
        for tensor in tensors:
            tensor.zero_()
        return tensors
