"""One run of a schedule on one rank: what each action takes, computes and gives, in the order of
the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallel3d.errors import Parallel3dError, RankError
from parallel3d.layers.gradients import DelayedGradients, Work
from parallel3d.pipeline.boundary import Message, Tensors, TensorSpec
from parallel3d.pipeline.transport import Transport
from parallel3d.schedules.schedule import Action, Kind, Schedule
from parallel3d.shared_memory.segment import PeerLostError
from parallel3d.timeline.recorder import Recorder

LossFunction = Callable[[Any, Any], Tensor]
# where the graph of a stage's microbatch begins: an output that needs no gradient has None
Roots = Sequence[GradientEdge | Tensor | None]
Microbatches = Tensor | Sequence[Any]  # a tensor [microbatches, ...], or one entry per microbatch


class StageError(RuntimeError):
    """A stage, or what it takes and gives, failed on this rank; the cause is the error that it
    raised."""


@dataclass(frozen=True)
class Stage:
    """A slice of the model on this rank, and three calls by which the data dimension follows its
    backwards: `before_backward(last)` comes before each backward and says whether the stage's
    gradients are complete after it; `after_weights(last)` comes after the second half of each split
    backward and says the same; `drop_gradients()` throws away the gradients of the warm-up
    (`PipelineRuntime.warms_up`), which without it puts back those that were there.

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
    # set by the runtime of a schedule that splits the backward
    delayed: DelayedGradients | None = None


@dataclass(frozen=True)
class Batch:
    """The microbatches of a run: `inputs[m]` goes to the first stage, a tensor or a tuple of them,
    `labels[m]` to the loss, `keywords[m]` to the forward of every stage. `sizes` has the numbers
    for the names of sizes that boundaries have."""

    inputs: Microbatches | None
    labels: Microbatches | None
    keywords: Sequence[Mapping[str, Any]] | None
    sizes: Mapping[str, int] | None


@dataclass
class ScheduleExecutor:
    """Carries out one rank's actions of a schedule. `stages` are this rank's by their index in the
    model. Without `loss_fn` the last stage's outputs are collected."""

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
        # the sum over microbatches; 0 without the last stage
        self.total_loss = torch.zeros((), dtype=torch.float64, device=links.device)
        # What a forward leaves for its backward, by (stage, microbatch): the inputs that get a
        # gradient, and the outputs' places in the graph (the last stage's is the loss). The outputs
        # themselves are not kept.
        self._alive: dict[tuple[int, int], tuple[Sequence[Tensor], Roots]] = {}
        # second halves of backwards, until they are done
        self._weights: dict[tuple[int, int], list[Work]] = {}

    def run(self) -> None:
        """Does all actions of this rank, in order. Raises StageError if something fails here and
        RankError if it fails on another rank; both say where."""
        actions = self.schedule.ranks[self._rank]
        at = 0
        recorder = self.recorder
        try:
            for at, action in enumerate(actions):  # noqa: B007  # read by the error below
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
                # so that their memory is free before the next action waits for its input
                del taken, made
                self.transport.action_issued()
            self.transport.finish()
        except Exception as error:
            self._fail(error, actions, at)

    def _take(self, action: Action) -> Tensors:
        """Returns what another stage has made for the action, or the microbatch for the forward of
        the first stage."""
        stage, kind, microbatch = action
        is_forward = kind is Kind.FORWARD
        if is_forward and stage == 0:
            assert self.batch.inputs is not None
            return _as_tuple(self.batch.inputs[microbatch])
        if kind is Kind.WEIGHT or (stage == self._last_stage and not is_forward):
            return ()
        return self.transport.receive(action)

    def _forward(self, action: Action, inputs: Tensors) -> Tensors | None:
        """Computes a stage's outputs and keeps what the backward needs. Returns the outputs for the
        next stage, or None after the last stage, whose output goes to the loss. Raises ValueError
        if a stage's outputs are not what its boundary declares."""
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
        """Differentiates a stage's microbatch, in full or only in its input. Returns the gradients
        of the inputs for the stage before, or None from the first stage."""
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
        """Does the second half of a split backward: the products that the first half has
        delayed."""
        works = self._weights.pop((action.stage, action.microbatch))[::-1]
        with torch.no_grad():
            while works:  # popped before it is called, so that its tensors are freed with it
                works.pop()()
        self.stages[action.stage].after_weights(action in self.schedule.last_backwards)

    def _fail(self, error: Exception, actions: Sequence[Action], at: int) -> NoReturn:
        """Tells the other ranks, and raises the error with the rank, the stage and the action where
        it came up."""
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
        if isinstance(error, Parallel3dError):  # its message says all that its reader needs
            raise error
        raise StageError(message) from error


def _check_outputs(outputs: Tensors, message: Message) -> None:
    """Raises ValueError if a stage's outputs are not those that its boundary declares."""
    if len(outputs) == len(message.specs) and all(map(TensorSpec.fits, message.specs, outputs)):
        return
    given = []
    for y in outputs:
        gradient = ", which needs a gradient" if y.requires_grad else ""
        given.append(f"{TensorSpec(tuple(y.shape), y.dtype)}{gradient}")
    raise ValueError(
        f"the stage gives {' and '.join(given)}, and its boundary declares {message}; an output "
        "that needs a gradient must be detached, or declared with requires_grad=True"
    )


def _differentiate(roots: Roots, grads: Tensors) -> None:
    """Adds to `.grad` of parameters and inputs. `grads` are the gradients of the roots, and empty
    if the root is a loss."""
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
