"""One run of a schedule on one rank: what each action takes, computes and gives, in the order of
the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallel3d.errors import Parallel3dError, RankError
from parallel3d.layers.gradients import DelayedGradients, Work
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.transport import Tensors, Transport
from parallel3d.schedules.schedule import Action, Kind, Schedule
from parallel3d.shared_memory.segment import PeerLostError
from parallel3d.timeline.recorder import Recorder

LossFunction = Callable[[Any, Any], Tensor]
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
    (`PipelineRuntime.warms_up`), which without it puts back those that were there."""

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
        self._rank, self._last_stage = links.rank, self.schedule.stages - 1
        # the sum over microbatches; 0 without the last stage
        self.total_loss = torch.zeros((), dtype=torch.float64, device=links.device)
        # What a forward leaves for its backward, by (stage, microbatch): the inputs that get a
        # gradient, and the outputs' places in the graph (the last stage's is the loss). The outputs
        # themselves are not kept.
        self._alive: dict[
            tuple[int, int], tuple[Tensors, Sequence[GradientEdge | Tensor | None]]
        ] = {}
        # second halves of backwards, until they are done
        self._weights: dict[tuple[int, int], list[Work]] = {}

    def run(self) -> None:
        """Does all actions of this rank, in order. Raises StageError where something fails here and
        RankError where it fails on another rank; both say where."""
        actions, at, recorder = self.schedule.ranks[self._rank], 0, self.recorder
        try:
            for at, action in enumerate(actions):  # noqa: B007  # read by the error below
                taken = self._take(action)
                start = None if recorder is None else recorder.now()
                match action.kind:
                    case Kind.FORWARD:
                        module, keywords = self.stages[action.stage].module, self.batch.keywords
                        named = {} if keywords is None else keywords[action.microbatch]
                        made = self._after_forward(action, taken, module(*taken, **named))
                    case Kind.WEIGHT:
                        made = None
                        self._backward_weights(action)
                    case Kind.BACKWARD | Kind.INPUT:
                        made = self._backward(action, taken)
                if recorder is not None:
                    recorder.add(action, start, recorder.now())
                if made is not None:
                    taker = self.schedule.feeds(action)
                    assert taker is not None
                    self.transport.send(taker, made)
                # so that their memory is free before the next action waits for its input
                del taken, made
                self.transport.action_issued()
            self.transport.finish()
        except Exception as error:
            self._fail(error, actions, at)

    def _take(self, action: Action) -> Tensors:
        """What another stage has made for the action; for the first stage's forward, the
        microbatch."""
        stage, kind, microbatch = action
        if kind is Kind.FORWARD and stage == 0:
            assert self.batch.inputs is not None
            return _as_tuple(self.batch.inputs[microbatch])
        if kind is Kind.WEIGHT or (kind is not Kind.FORWARD and stage == self._last_stage):
            return ()
        taken = self.transport.receive(action)
        if kind is Kind.FORWARD and self.schedule.trains:
            specs = self.transport.crossings[stage - 1].forward.specs
            for x, spec in zip(taken, specs, strict=True):
                if spec.has_gradient:
                    x.requires_grad_()
        return taken

    def _after_forward(self, action: Action, inputs: Tensors, output: Any) -> Tensors | None:
        """Keeps what the backward needs. Returns the outputs for the next stage, or None after the
        last stage, whose output goes to the loss. Raises ValueError where a stage's outputs are not
        what its boundary declares."""
        stage, _, microbatch = action
        trains = self.schedule.trains
        kept = tuple(x for x in inputs if x.requires_grad)
        if stage == self._last_stage:
            if self.loss_fn is None:
                self.outputs.append(output)
                return None
            labels = self.batch.labels
            loss = self.loss_fn(output, None if labels is None else labels[microbatch])
            self.total_loss += loss.detach().reshape(())
            if trains:
                self._alive[stage, microbatch] = kept, [loss]
            return None
        outputs, message = _as_tuple(output), self.transport.crossings[stage].forward
        specs = message.specs
        if len(outputs) != len(specs) or not all(map(TensorSpec.fits, specs, outputs)):
            given = []
            for y in outputs:
                gradient = ", which needs a gradient" if y.requires_grad else ""
                given.append(f"{TensorSpec(tuple(y.shape), y.dtype)}{gradient}")
            raise ValueError(
                f"the stage gives {' and '.join(given)}, and its boundary declares {message}; an "
                "output that needs a gradient must be detached, or declared with "
                "requires_grad=True"
            )
        if trains:
            returning = [y for y, spec in zip(outputs, specs, strict=True) if spec.has_gradient]
            roots = [get_gradient_edge(y) if y.requires_grad else None for y in returning]
            self._alive[stage, microbatch] = kept, roots
        return tuple(y.detach() for y in outputs)

    def _backward(self, action: Action, grads: Tensors) -> Tensors | None:
        """Differentiates a stage's microbatch, wholly or in its input alone. Returns the gradients
        of the inputs for the stage before, or None from the first stage."""
        stage, kind, microbatch = action
        inputs, roots = self._alive.pop((stage, microbatch))
        is_split, own = kind is Kind.INPUT, self.stages[stage]
        own.before_backward(not is_split and action in self.schedule.last_backwards)
        # A root is None if it needs no gradient. `grads` are empty if the root is a loss.
        pairs = zip(roots, grads or (None,) * len(roots), strict=True)
        starts: list[Any] = [pair for pair in pairs if pair[0] is not None]
        collecting: AbstractContextManager[list[Work]] = nullcontext([])
        if is_split and own.delayed is not None:
            collecting = own.delayed.collecting()
        with collecting as works:
            if starts:
                torch.autograd.backward([root for root, _ in starts], [grad for _, grad in starts])
        if is_split:
            self._weights[stage, microbatch] = works
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
        links, action = self.transport.links, actions[at]
        place = (
            f"rank {dist.get_rank()} (pipeline rank {links.rank} of {links.size}), stage "
            f"{action.stage}, microbatch {action.microbatch}, {action.kind.name.lower()} "
            f"({action}, action {at + 1} of {len(actions)})"
        )
        if isinstance(error, PeerLostError):
            first_failure = links.failure_message()
            links.fail(f"{place}: {error}")
            raise RankError(first_failure or f"{place}: {error}") from error
        links.fail(f"{place}: {type(error).__name__}: {error}")
        if isinstance(error, Parallel3dError):  # its message says all that its reader needs
            raise error
        raise StageError(f"{place}: {type(error).__name__}: {error}") from error


def _as_tuple(value: Any) -> Tensors:
    return (value,) if isinstance(value, Tensor) else tuple(value)
