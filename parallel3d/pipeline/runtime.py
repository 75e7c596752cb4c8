"""Executes a schedule: the one path of a batch, with one pipeline rank as with many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.pipeline.schedule import Action, Kind, Schedule
from parallel3d.pipeline.transport import Links, Transport, open_links

LossFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Boundary:
    """What crosses from stage to stage for microbatches [batch, seq]: [batch, seq / sequence_parts, hidden]."""

    hidden: int
    sequence_parts: int
    dtype: torch.dtype
    device: torch.device

    def buffer(self, batch: int, seq: int) -> Tensor:
        return torch.empty((batch, seq // self.sequence_parts, self.hidden), dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Stage:
    """A slice of the model on this rank. `before_backward(last)` is told before each backward whether it is the last of
    the step: the data dimension reduces gradients then and not before."""

    index: int
    module: nn.Module
    before_backward: Callable[[bool], None] = lambda last: None


class PipelineRuntime:
    """Runs microbatches through the stages of this rank and its neighbours.

    `stages` are this rank's, in the order of the schedule's placement; `loss_fn(output, labels)` gives the scalar that
    is differentiated, already divided as the sum over microbatches and data ranks needs it.
    """

    def __init__(self, stages: list[Stage], pp: DeviceMesh, boundary: Boundary, loss_fn: LossFunction) -> None:
        self._stages = {stage.index: stage for stage in stages}
        self._links: Links = open_links(pp)
        self._boundary = boundary
        self._loss_fn = loss_fn

    def run(self, schedule: Schedule, inputs: Tensor, labels: Tensor) -> Tensor:
        """Forward and backward of a batch (both [microbatches, batch, seq]). Returns the sum of the microbatches'
        losses on the rank of the last stage and 0 elsewhere; gradients are left in `.grad`."""
        step = _Run(self, schedule, inputs, labels)
        step.execute()
        return step.loss

    @torch.no_grad()
    def evaluate(self, schedule: Schedule, inputs: Tensor, labels: Tensor) -> Tensor:
        """As `run` for a schedule of forwards alone."""
        step = _Run(self, schedule, inputs, labels)
        step.execute()
        return step.loss

    @torch.no_grad()
    def forward(self, schedule: Schedule, inputs: Tensor) -> list[Tensor]:
        """The last stage's output for each microbatch, on its rank; an empty list elsewhere."""
        step = _Run(self, schedule, inputs, labels=None)
        step.execute()
        return step.outputs


class _Run:
    """One execution of a schedule: the activations that are alive, and what it adds up to."""

    def __init__(self, runtime: PipelineRuntime, schedule: Schedule, inputs: Tensor, labels: Tensor | None) -> None:
        self._runtime = runtime
        self._schedule = schedule
        self._inputs = inputs
        self._labels = labels
        self._rank = runtime._links.rank
        batch, seq = inputs.shape[1:]
        self._transport = Transport(runtime._links, schedule, lambda: runtime._boundary.buffer(batch, seq))
        self._handed_over: dict[Action, Tensor] = {}  # between two stages of this rank
        self._alive: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (stage, microbatch) -> input, output or loss
        self.loss = torch.zeros((), device=runtime._boundary.device)
        self.outputs: list[Tensor] = []

    def execute(self) -> None:
        for action in self._schedule.ranks[self._rank]:
            if action.kind is Kind.FORWARD:
                self._forward(action)
            else:
                self._backward(action)
        self._transport.finish()

    def _forward(self, action: Action) -> None:
        stage, m = self._runtime._stages[action.stage], action.microbatch
        x = self._inputs[m] if stage.index == 0 else self._take(action, stage.index - 1)
        if self._schedule.trains and stage.index > 0:
            x.requires_grad_()
        y = stage.module(x)
        if stage.index == self._schedule.stages - 1:
            y = self._finish_forward(y, m)
        else:
            self._give(action, y.detach())
        if self._schedule.trains:
            self._alive[stage.index, m] = (x, y)

    def _finish_forward(self, y: Tensor, microbatch: int) -> Tensor:
        """The loss of the last stage's output, where there are labels."""
        if self._labels is None:
            self.outputs.append(y)
            return y
        loss = self._runtime._loss_fn(y, self._labels[microbatch])
        self.loss += loss.detach()
        return loss

    def _backward(self, action: Action) -> None:
        stage, m = self._runtime._stages[action.stage], action.microbatch
        x, y = self._alive.pop((stage.index, m))
        grad = None if stage.index == self._schedule.stages - 1 else self._take(action, stage.index + 1)
        stage.before_backward(action in self._schedule.last_backwards)
        torch.autograd.backward(y, grad)
        if stage.index > 0:
            assert x.grad is not None
            self._give(action, x.grad)

    def _take(self, action: Action, giver_stage: int) -> Tensor:
        if self._schedule.placement[giver_stage] == self._rank:
            return self._handed_over.pop(action)
        return self._transport.receive(action, giver_stage)

    def _give(self, action: Action, tensor: Tensor) -> None:
        taker = self._schedule.feeds(action)
        assert taker is not None
        if self._schedule.placement[taker.stage] == self._rank:
            self._handed_over[taker] = tensor
        else:
            self._transport.send(tensor, taker)
