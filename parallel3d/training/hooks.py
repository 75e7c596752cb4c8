"""The result of a training step, and the features that hang on it: the loss scale, counted labels, local SGD."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import Recipe, TrainConfig
from parallel3d.data.loader import IGNORED, WrongId
from parallel3d.errors import DataError, NonFiniteError, SpikeError
from parallel3d.layers.collectives import all_reduce_over
from parallel3d.mesh import Axis
from parallel3d.spikes import SpikeHistory
from parallel3d.training.local_sgd.replicas import LocalSgd
from parallel3d.training.loss import SMALLEST, LossScaler, MeanLoss


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank. Gradients times `factor` are the gradients of the mean loss over
    the step's labels."""

    loss: float  # mean over the labels of the global batch
    grad_norm: float  # before clipping; where replicas train apart, the root of the mean square of their norms
    tokens: int  # that have a label
    factor: float
    own_norm: float  # the norm by which this rank's replica clips; grad_norm where the replicas are one run
    is_asked_to_stop: bool  # some rank received SIGTERM
    lr: float
    loss_scale: float | None  # None: training is not in float16
    left_out: str | None = None  # why a hook has left the step out, for the user to read

    @property
    def is_finite(self) -> bool:
        """False if the loss or the gradient is not finite, so that the step is left out."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def is_skipped(self) -> bool:
        """True if the optimizer has not stepped: nothing is changed but the number of the step."""
        return not self.is_finite or self.left_out is not None


class StepTotals(NamedTuple):
    """The sums of a step over the mesh, while they are on the device: float64 scalars."""

    loss: Tensor  # mean over the labels
    grad_norm: Tensor
    tokens: Tensor
    votes: Tensor  # how many ranks received SIGTERM; where replicas train apart, on average
    refusals: Tensor  # below 0 where any rank read an id that the vocabulary has not; a dry run answers 1 and goes on


def refusal_of(wrong_id: WrongId | None, like: Tensor) -> Tensor:
    """The vote of a rank on its share of the batch, a scalar: -1 refuses it."""
    return torch.full_like(like, 0.0 if wrong_id is None else -1.0)


def count_labels(labels: Tensor) -> Tensor:
    """The number of labels that are learned, a float64 scalar on the labels' device."""
    return (labels != IGNORED).sum().double()


def refuse_no_labels(step: int, tokens: int, ignored_ids: Sequence[int]) -> None:
    """Raises DataError where no token of a step's global batch has a label."""
    if not tokens:
        raise DataError(
            f"step {step}: no token of the batch has a label; data.ignore_token_ids = {list(ignored_ids)} are not "
            "learned. Try fewer of them"
        )


def refuse_wrong_id(own: WrongId | None, vocab: int) -> NoReturn:
    """Raises the DataError of the first sample of the batch that has an id beyond `vocab`, the same on every rank.
    Every rank calls it, with what it has found itself."""
    everyone: list[WrongId | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found = [wrong for wrong in everyone if wrong is not None]
    first, largest = min(found), max(wrong.largest_id for wrong in found)
    tries = f"model.vocab={largest + 1} or more, or " if largest >= vocab else ""
    raise DataError(
        f"token id {first.token_id} at sample {first.sample}: model.vocab = {vocab} has ids 0 to {vocab - 1}; "
        f"try {tries}the data of this model's tokenizer"
    )


class StepHook:
    """A feature that takes part in each training step. The trainer calls all of its hooks, in their order, at each of
    these moments; a hook overrides the methods that it needs. `step` counts from 1."""

    def before_forward(self, step: int, labels: Tensor, wrong_id: WrongId | None) -> None:
        """Prepares the step; called before the forward with this rank's labels, and a wrong id among them."""

    def combine(self, totals: StepTotals) -> StepTotals:
        """Returns the totals of the whole run, given those of this rank's replica, without reading a number of them."""
        return totals

    def check(self, step: int, totals: StepResult) -> str | None:
        """Called before the optimizer steps, which it does where `totals` are finite and no hook returns a reason to
        leave the step out. The reason is shown as a warning, and is the same on every rank. Raises NonFiniteError to
        end the run."""
        return None

    def after_step(self, step: int) -> None:
        """Called when the optimizer has stepped, before the model computes with the new parameters."""

    def evaluating(self, publish: Callable[[], None]) -> AbstractContextManager[None]:
        """Returns a context in which the model has the parameters to evaluate. `publish` makes the model compute with
        changed parameters."""
        return nullcontext()


class NonFiniteSteps(StepHook):
    """Ends the run at the first loss or gradient that is not finite, or leaves out so many steps in a row as
    `train.nonfinite_in_a_row` says. Where a scaler scales the loss, a step is left out for nothing but an overflow, and
    without a word, until its gradient is not finite at any scale. `suspects` says which rank and parameter it comes
    from; all ranks call it."""

    def __init__(self, loss: MeanLoss, scaler: LossScaler | None, recipe: Recipe, suspects: Callable[[], str]) -> None:
        self._loss, self._scaler, self._suspects = loss, scaler, suspects
        self._most = recipe.train.nonfinite_in_a_row if recipe.train.on_nonfinite == "skip" else 0
        self._steps_in_backward = recipe.optimizer.step_in_backward
        self._in_a_row = 0

    def before_forward(self, step: int, labels: Tensor, wrong_id: WrongId | None) -> None:
        if self._scaler is not None:
            self._loss.scale = self._scaler.scale

    def check(self, step: int, totals: StepResult) -> str | None:
        if self._scaler is not None:
            self._scaler.update(is_finite=totals.is_finite)
        if totals.is_finite:
            self._in_a_row = 0
            return None
        scale = ""
        if self._scaler is not None:
            if self._scaler.scale >= SMALLEST:
                return None
            self._scaler.scale, scale = SMALLEST, f" even at a loss scale of {self._loss.scale:g}"
        self._in_a_row += 1
        found = f"step {step}: loss {totals.loss}, gradient norm {totals.grad_norm}{scale}; {self._suspects()}"
        if self._in_a_row <= self._most:
            return f"{found}; the step is left out, {self._in_a_row} in a row of {self._most} at most"
        left = f"weights are those of step {step - self._in_a_row}"
        if self._steps_in_backward:
            left = "weights have been stepped with it (optimizer.step_in_backward); go on from the last checkpoint"
        raise NonFiniteError(f"{found}; {left}. A lower optimizer.lr or more optimizer.warmup_steps may do")


class CompareReplicas(StepHook):
    """Compares what ranks must hold alike after each `every` steps, and ends the run by a ReplicaError where they do
    not. `compare` does it; all ranks call it."""

    def __init__(self, every: int, compare: Callable[[str], None]) -> None:
        self._every, self._compare = every, compare

    def after_step(self, step: int) -> None:
        if step % self._every == 0:
            self._compare(f"step {step}")


class Spikes(StepHook):
    """Leaves out the update of a step whose loss or gradient norm stands out of the steps before, or only finds it, as
    `train.on_spike` says. Ends the run where too many such steps are in a row."""

    def __init__(self, rule: TrainConfig, *, steps_in_backward: bool) -> None:
        self._rule, self._steps_in_backward = rule, steps_in_backward
        self.history = SpikeHistory()
        self.found: str | None = None  # the spike of the last step, in words

    def check(self, step: int, totals: StepResult) -> str | None:
        self.found, rule = None, self._rule
        if not totals.is_finite:
            return None
        seen = totals.loss, totals.grad_norm
        why = self.history.judge(*seen, rule)
        self.history = self.history.after(step, *seen, rule, is_spike=why is not None)
        if why is None:
            return None
        self.found = f"step {step}: a spike: {why}"
        if rule.on_spike == "warn":
            if self.history.in_a_row > 1:  # told once, however long the numbers stay so high
                self.found = None
            return None
        if self.history.in_a_row > rule.spikes_in_a_row:
            raise SpikeError(
                f"{self.found}; it is number {self.history.in_a_row} in a row, more than train.spikes_in_a_row = "
                f"{rule.spikes_in_a_row}. Go on from a checkpoint with a lower optimizer.lr, or train.on_spike=warn"
            )
        return None if self._steps_in_backward else f"{self.found}; its update is left out"


class CountLabelsFirst(StepHook):
    """Divides the loss by the number of labels in the global batch (in this replica's share of it, where replicas train
    apart). The labels are counted before the backward, because a gradient that is stepped with in the backward cannot
    be corrected after it."""

    def __init__(self, loss: MeanLoss, axes: Mapping[str, Axis], recipe: Recipe, local_sgd: LocalSgd | None) -> None:
        self._loss, self._local_sgd = loss, local_sgd
        self._ignored_ids, self._vocab = recipe.data.ignore_token_ids, recipe.model.vocab
        self._axes = {name: axes[name] for name in ("dp_replicate", "dp_shard")}

    def before_forward(self, step: int, labels: Tensor, wrong_id: WrongId | None) -> None:
        own = count_labels(labels)
        counted, refusals = all_reduce_over(self._axes, torch.stack((own, refusal_of(wrong_id, own)))).unbind()
        shares = torch.stack(((counted > 0).double(), refusals))
        if self._local_sgd is not None:
            shares = self._local_sgd.mean(shares)
        tokens, with_labels, refusals_read = torch.stack((counted, *shares)).tolist()  # the host waits for a GPU
        if refusals_read < 0:
            refuse_wrong_id(wrong_id, self._vocab)
        # Where one replica has no label all of them stop, because the others would wait for it.
        refuse_no_labels(step, round(tokens) if with_labels == 1.0 else 0, self._ignored_ids)
        self._loss.tokens = round(tokens)


class TrainApart(StepHook):
    """Local SGD: each replica's totals are its own until they are combined, and replicas meet after the optimizer's
    step. An evaluation is of the outer parameters, which are what the run leaves behind."""

    def __init__(self, local_sgd: LocalSgd) -> None:
        self._local_sgd = local_sgd
        self._is_evaluating = False

    def combine(self, totals: StepTotals) -> StepTotals:
        """Returns the mean loss over all replicas' labels and the root of the mean square of their gradient norms.
        `tokens` is 0 where any replica has nothing to train on."""
        loss, norm, tokens, votes, refusals = totals
        known = torch.stack((loss * tokens, norm.square(), tokens, votes, refusals, (tokens == 0).double()))
        loss, square, tokens, votes, refusals, empty = self._local_sgd.mean(known).unbind()
        whole = tokens * self._local_sgd.replicas.size * (self._is_evaluating or empty == 0)
        return StepTotals(loss / tokens.clamp(min=1.0), square.sqrt(), whole, votes, refusals)

    def after_step(self, step: int) -> None:
        self._local_sgd.after_step(step)

    @contextmanager
    def evaluating(self, publish: Callable[[], None]) -> Iterator[None]:
        self._is_evaluating = True
        try:
            with self._local_sgd.outer_parameters(publish):
                yield
        finally:
            self._is_evaluating = False
