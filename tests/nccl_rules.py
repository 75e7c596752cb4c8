"""A model of NCCL's rules that tells whether a pipeline's ranks would wait for each other for ever
on GPUs.

What the host of each rank does is recorded from the project's own runtime, links and transport,
with stages that compute nothing (`Program`). Then all ranks' programs are played against each other
(`stuck`) by these rules:

- A host goes through its program. Compute, sends, receives and waits are put into queues of the
  device at once.
- The compute queue is worked off in order. A wait stands in it until its transfer is done.
- The transfers of one communicator are worked off in order, and one begins only when the compute
  queue has come to where the host was when it issued the transfer. A transfer ends when both of its
  ends have begun.
- Two ranks connect at their first transfer in a group: each host stops until the other comes to its
  own first one.
- A group is made, and a barrier passed, when the hosts of all its ranks are there.
- Where `device_waits` is True, a host stops before each stage's first action of each kind until all
  queues of its device are empty, as when a kernel is loaded at its first use.

`assert_never_hangs(schedule)` puts a schedule through it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.mesh import Axis
from parallel3d.pipeline import links
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.execution import Stage
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.schedules.schedule import Action, Schedule

Fault = Literal["one group for both ways", "posted at once"]


@dataclass(frozen=True)
class Meet:
    """The host stops until all `ranks` are at the same place."""

    place: Hashable
    ranks: frozenset[int]


@dataclass(frozen=True)
class Transfer:
    """One end of a message from `source` to `target` by a communicator."""

    number: int
    group: Hashable
    source: int
    target: int


@dataclass(frozen=True)
class Wait:
    """The compute queue stops until the transfer of this number is done."""

    number: int


@dataclass(frozen=True)
class Compute:
    """Part of an action. `is_first`: its kernels were never used before."""

    name: str
    is_first: bool


Step = Meet | Transfer | Wait | Compute


@dataclass
class Program:
    """What the host of one rank does: `steps`, in order. While it is `recording`, torch's
    point-to-point calls and the making of groups are written down, and none is carried out."""

    schedule: Schedule
    rank: int
    faults: frozenset[Fault] = frozenset()
    steps: list[Step] = field(default_factory=list)
    _used: set[str] = field(default_factory=set)  # the names of `Compute` so far
    _barriers: int = 0

    def runtime(self) -> PipelineRuntime:
        """Builds this rank's runtime, as on a GPU."""
        stages = []
        for stage in self.schedule.stages_of(self.rank):
            module = _Stage(self, stage)
            stages.append(Stage(module, module.note_backward, module.note_weights))
        shape = TensorSpec((1,))
        axis = Axis(self.size(), self.rank, "pipeline")  # type: ignore[arg-type]
        with mock.patch.object(links.Axis, "of", lambda mesh: axis):
            runtime = PipelineRuntime(stages, self.schedule, self, _loss, boundaries=shape)  # type: ignore[arg-type]
        runtime.warms_up = True
        return runtime

    def size(self) -> int:
        return len(self.schedule.ranks)

    def get_local_rank(self) -> int:
        return self.rank

    @property
    def mesh(self) -> Tensor:
        return torch.arange(self.size())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Puts the recorder in the place of torch's calls for a block, and the faults into the
        project's code."""
        with ExitStack() as patches:
            for name in ("isend", "irecv", "barrier"):
                patches.enter_context(mock.patch.object(dist, name, getattr(self, f"_{name}")))
            patches.enter_context(mock.patch.object(dist, "get_backend", lambda group: "fake"))
            patches.enter_context(mock.patch.object(links, "group_of", self._group_of))
            if "posted at once" in self.faults:
                patches.enter_context(mock.patch.object(Schedule, "postable_after", _zeros))
            yield

    def note(self, name: str) -> None:
        self.steps.append(Compute(name, name not in self._used))
        self._used.add(name)

    def _isend(self, tensor: Tensor, target: int, group: Hashable) -> _Work | None:
        return self._transfer(group, self.rank, target)

    def _irecv(self, tensor: Tensor, source: int, group: Hashable) -> _Work | None:
        return self._transfer(group, source, self.rank)

    def _transfer(self, group: Hashable, source: int, target: int) -> _Work:
        number = len(self.steps)
        self.steps.append(Transfer(number, group, source, target))
        return _Work(self, number)

    def _barrier(self, group: Hashable) -> None:
        self.steps.append(Meet(("barrier", self._barriers), frozenset(range(self.size()))))
        self._barriers += 1

    def _group_of(self, ranks: Sequence[int], description: str, **options: Any) -> Hashable:
        assert options["name"].endswith(f"{ranks[0]} to {ranks[1]}")
        source, target = ranks
        if "one group for both ways" in self.faults:
            return frozenset(ranks)
        self.steps.append(Meet((source, target), frozenset(ranks)))
        return source, target


class _Stage(nn.Module):
    """A stage that computes next to nothing and writes down when it does so."""

    def __init__(self, program: Program, stage: int) -> None:
        super().__init__()
        self._program = program
        self._stage = stage
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self._program.note(f"{self._stage}F")
        return x + self.weight

    def note_backward(self, last: bool) -> None:
        self._program.note(f"{self._stage}B")

    def note_weights(self, last: bool) -> None:
        self._program.note(f"{self._stage}W")


@dataclass(frozen=True)
class _Work:
    program: Program
    number: int

    def wait(self, timeout: object = None) -> None:
        self.program.steps.append(Wait(self.number))


def _loss(output: Tensor, labels: object) -> Tensor:
    return output[0]


def _zeros(schedule: Schedule, rank: int) -> dict[Action, int]:
    return {taker: 0 for takers in schedule.transfers.values() for taker in takers}


def programs(
    schedule: Schedule,
    *,
    trains: bool = True,
    warms_up: bool = True,
    faults: frozenset[Fault] = frozenset(),
) -> list[list[Step]]:
    """Returns the program of each rank: its runtime is built, trains a step and evaluates, or
    evaluates alone."""
    found = []
    for rank in range(len(schedule.ranks)):
        program = Program(schedule, rank, faults)
        with program.recording():
            runtime = program.runtime()
            inputs = torch.zeros(schedule.microbatches, 1)
            runtime.warms_up = warms_up
            if trains:
                runtime.run(inputs)
            runtime.evaluate(inputs)
        found.append(program.steps)
    return found


@dataclass
class _Device:
    """One rank as the rules see it."""

    rank: int
    steps: Sequence[Step]
    at: int = 0  # the step at which the host is
    issued: int = 0  # steps given to the compute queue so far
    computed: int = 0  # steps of the compute queue that are done
    compute: deque[Compute | Wait] = field(default_factory=deque)
    # By communicator: transfers, each with its message and how many steps of the compute queue come
    # before it.
    transfers: defaultdict[Hashable, deque[tuple[Transfer, Hashable, int]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    done: set[int] = field(default_factory=set)  # numbers of transfers

    @property
    def is_idle(self) -> bool:
        return not self.compute and not any(self.transfers.values())

    def __str__(self) -> str:
        host = self.steps[self.at] if self.at < len(self.steps) else "the end"
        return (
            f"rank {self.rank}: host at {host}, compute queue at "
            f"{self.compute[0] if self.compute else 'its end'}"
        )


def stuck(programs: Sequence[Sequence[Step]], *, device_waits: bool) -> list[str]:
    """Plays the programs of all ranks. Returns where each rank stands when none can go on, and an
    empty list where all have come to their end."""
    devices = [_Device(rank, steps) for rank, steps in enumerate(programs)]
    # who has come to a meeting, a communicator, a message
    there: defaultdict[Hashable, set[int]] = defaultdict(set)
    messages: defaultdict[Hashable, int] = defaultdict(int)  # so far, by the end that issues them

    def issue(device: _Device, step: Step) -> bool:
        """Carries out the host's next step, or returns False where the host has to wait."""
        if isinstance(step, Meet):
            there[step].add(device.rank)
            return there[step] == step.ranks
        if isinstance(step, Transfer):
            ends = step.source, step.target
            communicator = step.group, frozenset(ends)
            there[communicator].add(device.rank)
            if len(there[communicator]) < 2:
                return False
            way = communicator, ends
            messages[way, device.rank] += 1
            message = way, messages[way, device.rank]
            device.transfers[communicator].append((step, message, device.issued))
            return True
        if device_waits and isinstance(step, Compute) and step.is_first and not device.is_idle:
            return False
        device.compute.append(step)
        device.issued += 1
        return True

    def work_off(device: _Device) -> bool:
        """Does what the device's queues can do, and returns whether that was anything."""
        before = device.computed, len(device.done)
        while device.compute and (
            isinstance(step := device.compute[0], Compute) or step.number in device.done
        ):
            device.compute.popleft()
            device.computed += 1
        for communicator, queue in device.transfers.items():
            while queue and queue[0][2] <= device.computed:
                transfer, message, _ = queue[0]
                there[message].add(device.rank)
                if len(there[message]) < 2:
                    break
                for rank in (transfer.source, transfer.target):
                    end, arrived, _ = devices[rank].transfers[communicator].popleft()
                    assert arrived == message
                    devices[rank].done.add(end.number)
        return before != (device.computed, len(device.done))

    moves = True
    while moves:
        moves = False
        for device in devices:
            while device.at < len(device.steps) and issue(device, device.steps[device.at]):
                device.at += 1
                moves = True
            moves |= work_off(device)
    all_done = all(device.at == len(device.steps) and device.is_idle for device in devices)
    return [] if all_done else [str(device) for device in devices]


def assert_never_hangs(schedule: Schedule) -> None:
    """Asserts that no rank waits for ever where it trains and evaluates by `schedule`, or evaluates
    alone, whether or not kernels that are used for the first time wait for the whole device."""
    for trains in (True, False):
        recorded = programs(schedule, trains=trains)
        for device_waits in (False, True):
            where = stuck(recorded, device_waits=device_waits)
            what = (
                f"{schedule.name}, {len(schedule.ranks)} ranks, {schedule.microbatches} "
                f"microbatches, {trains=}"
            )
            assert not where, "\n".join([f"{what}, {device_waits=}:", *where])
