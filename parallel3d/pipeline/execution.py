"""Executes one run of a schedule on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallel3d.errors import Parallel3dError, RankError
from parallel3d.layers.weight_gradients import DelayedGradients, Work
from parallel3d.pipeline.boundary import Message, Tensors, TensorSpec
from parallel3d.pipeline.transport import Transport
from parallel3d.schedules.schedule import Action, Kind, Schedule
from parallel3d.shared_memory.segment import PeerLostError
from parallel3d.timeline.recorder import Recorder
from parallel3d.watch.step_clock import timed_as

LossFunction = Callable[[Any, Any], Tensor]
# Root of the autograd graph for each output declared with a gradient, None if it requires none.
Roots = Sequence[GradientEdge | Tensor | None]
Microbatches = Tensor | Sequence[Any]  # A tensor [microbatches, ...] or one entry per microbatch.


class StageError(RuntimeError):
    """A stage failed on this rank. The cause is the original error."""


@dataclass(frozen=True)
class Stage:
    """A slice of the model on this rank, with hooks for data-parallel gradient synchronization.

    `shard` provides the hooks. A plain module needs none of them.

    Args:
        module: Module that takes the tensors of the previous stage and returns those for the next.
        before_backward: Called with `last` before each backward pass. `last` is True if the stage's
            gradients are complete after this backward pass, and always False before a split one.
        after_weights: Called with `last` after the weight-gradient half of each split backward
            pass.
        drop_gradients: Discards the gradients of the warm-up (`PipelineRuntime.warms_up`). None:
            the warm-up restores the previous gradients.
        delayed: Collects the weight-gradient matmuls of split backward passes. The runtime sets it
            if the schedule splits them.

    Example:
        >>> data = parallel3d.shard(module, mesh, "FULL_SHARD")
        >>> stage = parallel3d.Stage(
        ...     module, data.before_backward, data.after_weights, data.drop_gradients
        ... )
        >>> pp = mesh["pp"]
        >>> runtime = parallel3d.PipelineRuntime([stage], schedule, pp, loss_fn, boundaries=spec)
    """

    module: nn.Module
    before_backward: Callable[[bool], None] = lambda last: None
    after_weights: Callable[[bool], None] = lambda last: None
    drop_gradients: Callable[[], None] | None = None
    delayed: DelayedGradients | None = None


@dataclass(frozen=True)
class Batch:
    """Microbatches of one run, as `PipelineRuntime.run` takes them."""

    inputs: Microbatches | None
    labels: Microbatches | None
    keywords: Sequence[Mapping[str, Any]] | None
    sizes: Mapping[str, int] | None


@dataclass
class ScheduleExecutor:
    """Executes one rank's actions of a schedule.

    `stages` are this rank's stages by their index in the model. Without a `loss_fn`, the outputs of
    the last stage are collected in `outputs`.
    """

    schedule: Schedule
    stages: Mapping[int, Stage]
    transport: Transport
    batch: Batch
    loss_fn: LossFunction | None
    recorder: Recorder | None
    outputs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        links = self.transport.links
        self._rank = links.rank
        self._last_stage = self.schedule.stages - 1
        # Sum of the losses of all microbatches, 0 on ranks without the last stage.
        self.total_loss = torch.zeros((), dtype=torch.float64, device=links.device)
        # Saved for the backward pass, keyed by (stage, microbatch): inputs that get a gradient, and
        # graph edges of the outputs. On the last stage the loss is the only root. The outputs
        # themselves are freed.
        self._alive: dict[tuple[int, int], tuple[Sequence[Tensor], Roots]] = {}
        # Delayed weight-gradient matmuls of split backward passes, keyed by (stage, microbatch).
        self._weights: dict[tuple[int, int], list[Work]] = {}

    @timed_as("compute")
    def run(self) -> None:
        """Executes all actions of this rank in order.

        Raises:
            StageError: An action failed on this rank. A Parallel3dError is raised unchanged.
            RankError: Another rank failed or timed out.
        """
        actions = self.schedule.ranks[self._rank]
        at = 0
        recorder = self.recorder
        try:
            for at, action in enumerate(actions):  # noqa: B007  # the except clause reads `at`
                taken = self._take(action)
                start = None if recorder is None else recorder.now()
                made = None
                if action.kind is Kind.FORWARD:
                    made = self._forward(action, taken)
                elif action.kind is Kind.WEIGHT:
                    self._backward_weights(action)
                else:
                    made = self._backward(action, taken)
                if recorder is not None:
                    recorder.add(action, start, recorder.now())
                if made is not None:
                    self.transport.send(action, made)
                # Free the tensors before the next action blocks on a receive.
                del taken, made
                self.transport.action_issued()
            self.transport.finish()
        except Exception as error:
            self._fail(error, actions, at)

    def _take(self, action: Action) -> Tensors:
        """Returns the inputs of an action: a microbatch, or tensors that another stage sent."""
        stage, kind, microbatch = action
        is_forward = kind is Kind.FORWARD
        if is_forward and stage == 0:
            assert self.batch.inputs is not None
            return _as_tuple(self.batch.inputs[microbatch])
        if kind is Kind.WEIGHT or (stage == self._last_stage and not is_forward):
            return ()
        return self.transport.receive(action)

    def _forward(self, action: Action, inputs: Tensors) -> Tensors | None:
        """Runs the forward pass of a stage and saves what the backward pass needs.

        Returns:
            Outputs for the next stage, or None after the last stage, whose output goes to the loss.

        Raises:
            ValueError: The outputs do not match the boundary that was declared for them.
        """
        stage, _, microbatch = action
        batch = self.batch
        trains = self.schedule.trains
        crossings = self.transport.crossings
        kept: list[Tensor] = []
        if trains and stage > 0:
            for x, spec in zip(inputs, crossings[stage - 1].forward.specs, strict=True):
                if spec.has_gradient:
                    kept.append(x.requires_grad_())
        named = {} if batch.keywords is None else batch.keywords[microbatch]
        output = self.stages[stage].module(*inputs, **named)
        if stage == self._last_stage:
            if self.loss_fn is None:
                self.outputs.append(output)
                return None
            loss = self.loss_fn(output, None if batch.labels is None else batch.labels[microbatch])
            self.total_loss += loss.detach().reshape(())
            if trains:
                self._alive[stage, microbatch] = kept, [loss]
            return None
        outputs = _as_tuple(output)
        message = crossings[stage].forward
        _check_outputs(outputs, message)
        if trains:
            roots: list[GradientEdge | None] = []
            for y, spec in zip(outputs, message.specs, strict=True):
                if spec.has_gradient:
                    roots.append(get_gradient_edge(y) if y.requires_grad else None)
            self._alive[stage, microbatch] = kept, roots
        return tuple(y.detach() for y in outputs)

    def _backward(self, action: Action, grads: Tensors) -> Tensors | None:
        """Runs the full backward pass of a stage, or only its input-gradient half.

        Returns:
            Gradients for the previous stage, or None from the first stage.
        """
        stage, kind, microbatch = action
        own = self.stages[stage]
        inputs, roots = self._alive.pop((stage, microbatch))
        if kind is Kind.INPUT:
            assert own.delayed is not None
            own.before_backward(False)
            with own.delayed.collecting() as works:
                _differentiate(roots, grads)
            self._weights[stage, microbatch] = works
        else:
            own.before_backward(action in self.schedule.last_backwards)
            _differentiate(roots, grads)
        if stage == 0:
            return None
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)

    def _backward_weights(self, action: Action) -> None:
        """Runs the weight-gradient matmuls that the first half of a split backward pass delayed."""
        works = self._weights.pop((action.stage, action.microbatch))[::-1]
        with torch.no_grad():
            while works:  # Pop each before its call, so that its tensors are freed right after it.
                works.pop()()
        self.stages[action.stage].after_weights(action in self.schedule.last_backwards)

    def _fail(self, error: Exception, actions: Sequence[Action], at: int) -> NoReturn:
        """Reports the failure to the other ranks and raises the error that `run` documents."""
        links = self.transport.links
        action = actions[at]
        place = (
            f"rank {dist.get_rank()} (pipeline rank {links.rank} of {links.size}), stage "
            f"{action.stage}, microbatch {action.microbatch}, {action.kind.name.lower()} "
            f"({action}, action {at + 1} of {len(actions)})"
        )
        if isinstance(error, PeerLostError):
            first_failure = links.failure_message()
            message = f"{place}: {error}"
            links.fail(message)
            raise RankError(first_failure or message) from error
        message = f"{place}: {type(error).__name__}: {error}"
        links.fail(message)
        if isinstance(error, Parallel3dError):  # Errors for the user keep their own message.
            raise error
        raise StageError(message) from error


def _check_outputs(outputs: Tensors, message: Message) -> None:
    """Raises ValueError if a stage's outputs do not match its boundary."""
    if len(outputs) == len(message.specs) and all(map(TensorSpec.fits, message.specs, outputs)):
        return
    given = []
    for y in outputs:
        gradient = " with requires_grad=True" if y.requires_grad else ""
        given.append(f"{TensorSpec(tuple(y.shape), y.dtype)}{gradient}")
    raise ValueError(
        f"the stage returns {' and '.join(given)}, but its boundary declares {message}; an output "
        "that requires a gradient must be declared with requires_grad=True or detached"
    )


def _differentiate(roots: Roots, grads: Tensors) -> None:
    """Adds gradients to `.grad` of parameters and inputs.

    `grads` are the gradients of the roots. It is empty if the only root is the loss.
    """
    starts: list[Any] = []
    given: list[Tensor | None] = []
    for root, grad in zip(roots, grads or (None,), strict=True):
        if root is not None:
            starts.append(root)
            given.append(grad)
    if starts:
        torch.autograd.backward(starts, given)


def _as_tuple(value: Any) -> Tensors:
    return (value,) if isinstance(value, Tensor) else tuple(value)
