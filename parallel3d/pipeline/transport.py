"""One run's transfers between pipeline ranks: sends that do not block, receives posted ahead of
their use.

Between two ranks messages travel in the order in which the sender makes them, which the receiver
knows from the schedule. Small messages between CPUs of one host go through `host_memory.ring`,
others by the backend, without tags or shapes on the wire.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.host_memory.ring import LARGEST_BYTES, Incoming
from parallel3d.pipeline.boundary import Boundary, Crossing, Message, TensorSpec
from parallel3d.pipeline.links import Links
from parallel3d.schedules.schedule import RECEIVES_AHEAD, SENDS_KEPT, Action, Kind, Schedule
from parallel3d.torch_private import storage_references

WAITS_FOR_RANKS = True  # for parallel3d.watch.heartbeat

# a message's stage, kind and microbatch, and the digest of what its sender declared
_TAG = struct.Struct("<HcII")


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
        self._arrived: dict[Action, tuple[Tensor, ...]] = {}
        self._outboxes: defaultdict[int, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)
        self._inboxes: dict[int, _Inbox] = {}
        self._open_inboxes(schedule)

    def _open_inboxes(self, schedule: Schedule) -> None:
        """Posts what can come by the backend before this rank has done anything."""
        links = self.links
        needs_groups = False
        gaps = zip(schedule.placement[:-1], schedule.placement[1:], self.crossings, strict=True)
        for one, other, crossing in gaps:
            is_shared = links.shared.issuperset({(one, other), (other, one)})
            is_small = is_shared and crossing.forward.nbytes <= LARGEST_BYTES
            needs_groups |= one != other and not is_small
        if not needs_groups:
            return
        links.open_groups()
        postable_after = schedule.postable_after(links.rank)
        for (source, target), takers in schedule.transfers.items():
            if target == links.rank:
                expected: deque[_Expected] = deque()
                for taker in takers:
                    message = self._message(taker)
                    is_shared = source in links.incoming and message.nbytes <= LARGEST_BYTES
                    if message.specs and not is_shared:
                        expected.append(_Expected(taker, message.specs, postable_after[taker]))
                self._inboxes[source] = _Inbox(links, source, expected, self._buffers.take)

    @property
    def device(self) -> torch.device:
        return self._buffers.device

    def action_issued(self) -> None:
        """Posts the receives that can come now that one more action of this rank has been
        issued."""
        for inbox in self._inboxes.values():
            inbox.issued += 1
            inbox.post()

    def send(self, taker: Action, tensors: Sequence[Tensor]) -> None:
        message = self._message(taker)
        if not message.specs:
            return
        target = self._placement[taker.stage]
        link = self.links.outgoing.get(target)
        if link is not None and message.nbytes <= LARGEST_BYTES:
            link.send(
                _TAG.pack(taker.stage, taker.kind.encode(), taker.microbatch, message.digest),
                tensors,
            )
            return
        outbox = self._outboxes[target]
        for tensor in tensors:
            while len(outbox) >= SENDS_KEPT:
                self.links.complete(outbox.popleft()[0], target)
            tensor = tensor.contiguous()
            work = self.links.isend(tensor, target)
            assert work is not None
            outbox.append((work, tensor))  # the tensor must live until it is sent

    def receive(self, taker: Action) -> tuple[Tensor, ...]:
        message = self._message(taker)
        if not message.specs:
            return ()
        source = self._placement[taker.stage + (-1 if taker.kind is Kind.FORWARD else 1)]
        link = self.links.incoming.get(source)
        is_shared = link is not None and message.nbytes <= LARGEST_BYTES
        while taker not in self._arrived:
            arrived, tensors = (
                self._read(link) if link is not None and is_shared else self._inboxes[source].next()
            )
            self._arrived[arrived] = tensors
        return self._arrived.pop(taker)

    def finish(self) -> None:
        """Waits until every message is on its way."""
        self.links.wait_until_sent()
        for target, outbox in self._outboxes.items():
            while outbox:
                self.links.complete(outbox.popleft()[0], target)

    def _read(self, link: Incoming) -> tuple[Action, tuple[Tensor, ...]]:
        """Waits for the next message of a link, and returns it with the action that takes it."""
        header = self.links.wait(link)
        stage, kind, microbatch, digest = _TAG.unpack_from(header.tag)
        taker = Action(stage, Kind(kind.decode()), microbatch)
        message = self._message(taker)
        if digest != message.digest:
            raise ValueError(
                f"{taker} takes {message} ({message.nbytes} bytes), and pipeline rank {link.peer} "
                f"has sent something else ({header.nbytes} bytes): the ranks have declared other "
                "shapes or sizes"
            )
        tensors = tuple(self._buffers.take(spec) for spec in message.specs)
        link.read(header, tensors)
        return taker, tensors

    def _message(self, taker: Action) -> Message:
        if taker.kind is Kind.FORWARD:
            return self.crossings[taker.stage - 1].forward
        return self.crossings[taker.stage].backward


class WarmupTransport(Transport):
    """Stands in for the transport of stages that run alone: what another rank would send is zeros,
    and what goes to another rank goes nowhere."""

    def _open_inboxes(self, schedule: Schedule) -> None:
        pass

    def send(self, taker: Action, tensors: Sequence[Tensor]) -> None:
        pass

    def receive(self, taker: Action) -> tuple[Tensor, ...]:
        return tuple(self._buffers.take(spec).zero_() for spec in self._message(taker).specs)


@dataclass(frozen=True)
class _Expected:
    """A message that is not posted yet, and after how many of this rank's actions it may be."""

    taker: Action
    specs: Boundary
    postable_after: int


@dataclass
class _Inbox:
    """Receives what one rank sends here by the backend, in the order of the sender."""

    links: Links
    source: int
    unposted: deque[_Expected]
    buffer: Callable[[TensorSpec], Tensor]
    posted: deque[tuple[Action, list[dist.Work], tuple[Tensor, ...]]] = field(default_factory=deque)
    issued: int = 0  # actions of this rank so far

    def __post_init__(self) -> None:
        self.post()

    def next(self) -> tuple[Action, tuple[Tensor, ...]]:
        """Waits for the next message, and returns it with the action that takes it."""
        arriving, works, tensors = self.posted.popleft()
        self.post()
        for work in works:
            self.links.complete(work, self.source)
        return arriving, tensors

    def post(self) -> None:
        while (
            self.unposted
            and len(self.posted) <= RECEIVES_AHEAD
            and self.unposted[0].postable_after <= self.issued
        ):
            expected = self.unposted.popleft()
            tensors = tuple(self.buffer(spec) for spec in expected.specs)
            works = [self.links.irecv(tensor, self.source) for tensor in tensors]
            self.posted.append(
                (expected.taker, [work for work in works if work is not None], tensors)
            )
