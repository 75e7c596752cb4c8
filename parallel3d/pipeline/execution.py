"""One run of a schedule on one rank: action after action, what each takes, computes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallel3d.errors import Parallel3dError, RankError
from parallel3d.layers.deferral import Work, deferring
from parallel3d.pipeline.boundary import Boundary, Crossing
from parallel3d.pipeline.links import Links
from parallel3d.pipeline.shared_link import PeerLostError
from parallel3d.pipeline.transport import Transport
from parallel3d.schedules.schedule import Action, Kind, Schedule
from parallel3d.timeline.recorder import Recorder

LossFunction = Callable[[Any, Any], Tensor]
Tensors = tuple[Tensor, ...]


class Microbatches(Protocol):
    """A tensor [microbatches, ...], or a sequence of what each microbatch is."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


class StageError(RuntimeError):
    """A stage, or what it takes and gives, failed on this rank; the cause is the error that it raised."""


@dataclass(frozen=True)
class Stage:
    """A slice of the model on this rank, and what the data dimension wants to know of its backwards:
    `before_backward(last)` before each, with whether the stage's gradients are complete after it, and
    `after_weights(last)` after each second half of a split one."""

    module: nn.Module
    before_backward: Callable[[bool], None] = lambda last: None
    after_weights: Callable[[bool], None] = lambda last: None


@dataclass(frozen=True, slots=True)
class _Alive:
    """What a forward leaves for its backward: the inputs that a gradient goes to, and where in the graph the outputs
    are (not the outputs themselves: the next stage has them, and their memory is free)."""

    inputs: Tensors
    roots: Sequence[GradientEdge | Tensor | None]  # of the last stage, the loss


class Execution:
    """Carries out this rank's actions of a schedule. `crossings[s]` is what goes between stages s and s + 1."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        crossings: Sequence[Crossing],
        transport: Transport,
        *,
        inputs: Microbatches | None,
        labels: Microbatches | None,
        loss_fn: LossFunction | None,
        recorder: Recorder | None,
        keywords: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._schedule = schedule
        self._stages = stages
        self._crossings = crossings
        self._transport = transport
        self._inputs = inputs
        self._labels = labels
        self._loss_fn = loss_fn
        self._keywords = keywords
        self._recorder = recorder
        self._last_stage = schedule.stages - 1
        self._handed_over: dict[Action, Tensors] = {}  # between two stages of this rank
        self._alive: dict[tuple[int, int], _Alive] = {}  # by (stage, microbatch)
        self._weights: dict[tuple[int, int], list[Work]] = {}  # second halves of backwards, until they are done
        self.total: Tensor | None = None
        self.outputs: list[Any] = []

    @property
    def loss(self) -> Tensor:
        assert self.total is not None
        return self.total

    def run(self, links: Links) -> None:
        """Raises StageError where something here fails, RankError where it does on another rank; both say where."""
        actions, at = self._schedule.ranks[links.rank], 0
        try:
            for at, action in enumerate(actions):  # noqa: B007  # told below
                self._do(action, links.rank)
            self._transport.finish()
        except Exception as error:
            place = _describe(actions[at], at, len(actions), links)
            if isinstance(error, PeerLostError):
                told = links.failure_message()
                links.fail(f"{place}: {error}")
                raise RankError(told or f"{place}: {error}") from error
            links.fail(f"{place}: {type(error).__name__}: {error}")
            if isinstance(error, Parallel3dError):  # says all that its reader needs
                raise
            raise StageError(f"{place}: {type(error).__name__}: {error}") from error

    def _do(self, action: Action, rank: int) -> None:
        taken = self._take(action, rank)
        start = None if self._recorder is None else self._recorder.now()
        if action.kind is Kind.FORWARD:
            made = self._forward(action, taken)
        elif action.kind is Kind.WEIGHT:
            made = None
            self._backward_weights(action)
        else:
            made = self._backward(action, taken)
        if self._recorder is not None:
            assert start is not None
            self._recorder.add(action, start, self._recorder.now())
        if made is not None:
            self._give(action, made, rank)

    def _take(self, action: Action, rank: int) -> Tensors:
        """What another stage has made for the action; for the first stage's forward, the microbatch."""
        stage, kind, microbatch = action
        if kind is Kind.FORWARD:
            if stage == 0:
                assert self._inputs is not None
                return _as_tuple(self._inputs[microbatch])
            giver = stage - 1
        elif kind is Kind.WEIGHT or stage == self._last_stage:
            return ()
        else:
            giver = stage + 1
        if self._schedule.placement[giver] == rank:
            return self._handed_over.pop(action)
        return self._transport.receive(action)

    def _give(self, action: Action, made: Tensors, rank: int) -> None:
        taker = self._schedule.feeds(action)
        assert taker is not None
        if self._schedule.placement[taker.stage] == rank:
            self._handed_over[taker] = made
        else:
            self._transport.send(taker, made)

    def _forward(self, action: Action, inputs: Tensors) -> Tensors | None:
        """The outputs for the next stage; None of the last, whose output goes to the loss."""
        stage, _, microbatch = action
        trains = self._schedule.trains
        kept: Tensors = ()
        if trains and stage > 0:
            specs = self._crossings[stage - 1].forward.specs
            kept = tuple(x.requires_grad_() for x, spec in zip(inputs, specs, strict=True) if spec.has_gradient)
        output = self._stages[stage].module(*inputs, **({} if self._keywords is None else self._keywords[microbatch]))
        if stage == self._last_stage:
            loss = self._finish(output, microbatch)
            if trains:
                assert loss is not None
                self._alive[stage, microbatch] = _Alive(kept, [loss])
            return None
        outputs, specs = _as_tuple(output), self._crossings[stage].forward.specs
        _check_outputs(outputs, specs)
        if trains:
            roots = [
                get_gradient_edge(y) if y.requires_grad else None
                for y, spec in zip(outputs, specs, strict=True)
                if spec.has_gradient
            ]
            self._alive[stage, microbatch] = _Alive(kept, roots)
        return tuple(y.detach() for y in outputs)

    def _finish(self, output: Any, microbatch: int) -> Tensor | None:
        """The loss of the last stage's output, where there is one to compute."""
        if self._loss_fn is None:
            self.outputs.append(output)
            return None
        loss = self._loss_fn(output, None if self._labels is None else self._labels[microbatch])
        self.total = loss.detach() if self.total is None else self.total + loss.detach()
        return loss

    def _backward(self, action: Action, grads: Tensors) -> Tensors | None:
        """The gradients of the inputs, for the stage before; None of the first."""
        stage, kind, microbatch = action
        alive = self._alive.pop((stage, microbatch))
        is_split = kind is Kind.INPUT
        self._stages[stage].before_backward(not is_split and action in self._schedule.last_backwards)
        if is_split:
            with deferring() as works:
                _differentiate(alive.roots, grads)
            self._weights[stage, microbatch] = works
        else:
            _differentiate(alive.roots, grads)
        if stage == 0:
            return None
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in alive.inputs)

    def _backward_weights(self, action: Action) -> None:
        stage, _, microbatch = action
        works = self._weights.pop((stage, microbatch))[::-1]
        with torch.no_grad():
            while works:  # each goes with what it has multiplied
                works.pop()()
        self._stages[stage].after_weights(action in self._schedule.last_backwards)


def _differentiate(roots: Sequence[GradientEdge | Tensor | None], grads: Tensors) -> None:
    """Adds to `.grad` of parameters and inputs. `grads` are the roots', none for a loss; a root that needs no gradient
    is None."""
    pairs = [(root, grad) for root, grad in zip(roots, grads or (None,) * len(roots), strict=True) if root is not None]
    if pairs:
        starts: Any = [root for root, _ in pairs]  # torch takes both kinds of them, and says that it takes one
        torch.autograd.backward(starts, [grad for _, grad in pairs])


def _as_tuple(value: Any) -> Tensors:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _check_outputs(outputs: Tensors, specs: Boundary) -> None:
    """Raises ValueError where a stage's outputs are not what was declared."""
    if len(outputs) != len(specs):
        raise ValueError(f"the stage gives {len(outputs)} tensors, and its boundary declares {len(specs)}")
    for at, (tensor, spec) in enumerate(zip(outputs, specs, strict=True)):
        if not spec.fits(tensor):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(
                f"the stage's output {at} is {dtype} {list(tensor.shape)}, and its boundary declares {spec}"
            )
        if tensor.requires_grad and not spec.has_gradient:
            raise ValueError(
                f"the stage's output {at} needs a gradient, and its boundary declares that none comes back; detach it, "
                f"or declare requires_grad=True"
            )


def _describe(action: Action, at: int, actions: int, links: Links) -> str:
    kinds = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
    return (
        f"rank {dist.get_rank()} (pipeline rank {links.rank} of {links.size}), stage {action.stage}, microbatch "
        f"{action.microbatch}, {kinds[action.kind]} ({action}, action {at + 1} of {actions})"
    )
