"""The trainer: a model on a mesh, and the one function that is a step of training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.checkpoint.store import SavedProgress
from parallel3d.config.recipe import Recipe
from parallel3d.data.loader import IGNORED, Batch
from parallel3d.errors import DataError, NonFiniteError
from parallel3d.layers.dropout import dropout_key
from parallel3d.mesh import Axis, axes_of, replica_mesh
from parallel3d.optimizers.build import build_optimizer
from parallel3d.parallelize import ModelClass, parallelize
from parallel3d.pipeline.links import Connect, Links
from parallel3d.schedules.builders import build_schedule
from parallel3d.schedules.schedule import Schedule
from parallel3d.timeline.recorder import Recorder
from parallel3d.training.gradients import GradientSync, sum_over_mesh
from parallel3d.training.learning_rate import learning_rate
from parallel3d.training.local_sgd.replicas import LocalSgd
from parallel3d.training.loss import MeanLoss
from parallel3d.training.loss_scale import LossScaler
from parallel3d.training.update import Observe, Update, UpdateAfterBackward, UpdateInBackward, step_with


@dataclass(frozen=True)
class StepResult:
    """The same on every rank: the mean loss over the global batch's real tokens, and the gradient's norm before
    clipping (of replicas that train apart, the root of the mean square of each one's)."""

    loss: float
    grad_norm: float
    lr: float
    loss_scale: float | None = None  # None: not in float16
    skipped: bool = False  # the gradient overflowed in float16, and nothing was changed
    is_asked_to_stop: bool = False  # some rank is


@dataclass(frozen=True)
class Totals:
    """Of a step, over all ranks. Gradients times `factor` are those of the mean loss over its real tokens."""

    loss: float
    grad_norm: float
    tokens: int  # with a label
    factor: float
    own_norm: float  # of the gradient of this rank's replica, which clips it; where replicas are one run, grad_norm
    is_asked_to_stop: bool

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Trainer:
    """Trains `model_class` as the recipe says, on `mesh`. Build it on every rank of the mesh at once. `connect`: how
    the ranks of a pipeline reach each other."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        model_class: ModelClass,
        connect: Connect = Links,
    ) -> None:
        self.recipe = recipe
        self.device = device
        self.step = 0  # steps done
        self.tokens = 0  # labels seen in them
        self.skipped_steps = 0  # of them, by the loss scaler
        self.scaler = None
        if recipe.train.precision == "fp16":
            self.scaler = LossScaler(recipe.loss_scale, scale=recipe.loss_scale.initial)
        replicas = Axis.of(mesh["dp_replicate"])
        if recipe.local_sgd.sync_every is not None:  # from here on a replica is a run of its own
            recipe, mesh = recipe.of_one_replica, replica_mesh(mesh)
        self.mesh = mesh
        self.axes = axes_of(mesh)
        self.loss = MeanLoss(recipe, mesh["tp"])
        self._schedules: dict[int, Schedule] = {}
        schedule = self.schedule_of(recipe.microbatches)
        parts = parallelize(model_class, recipe, mesh, device, schedule, self.loss, connect=connect)
        self.parameter_count = parts.parameter_count
        self.pipeline = parts.pipeline
        self.stages = parts.stages
        self.data = parts.data
        self.loss.take_over(stage.module for stage in parts.stages)
        self.parameters = parts.parameters
        self.tied = parts.tied
        self.optimizer = build_optimizer(
            self.parameters, recipe.optimizer, mesh, each=recipe.optimizer.step_in_backward
        )
        self.update = self._update_of(recipe, schedule)
        self.local_sgd = None
        if recipe.local_sgd.sync_every is not None:
            self.local_sgd = LocalSgd(
                self.parameters, recipe.local_sgd, replicas=replicas, axes=self.axes, steps=recipe.train.steps
            )

    def train_step(
        self,
        batch: Batch,
        recorder: Recorder | None = None,
        *,
        observe: Observe | None = None,
        is_asked_to_stop: bool = False,
    ) -> StepResult:
        """One step on this data rank's share of a global batch; `recorder` is told of each action, and `observe` called
        with each parameter when its gradient is complete and before it is scaled and clipped. `is_asked_to_stop`: this
        rank, of which all hear. Raises NonFiniteError
        where the loss or the gradient is not finite (in float16: at any loss scale), with nothing changed but where the
        optimizer steps in the backward, and DataError, with nothing changed, where no rank has a label."""
        inputs, labels = batch.inputs.to(self.device), batch.labels.to(self.device)
        rate = learning_rate(self.recipe.optimizer, self.step + 1, self.recipe.train.steps)
        self.loss.scale = 1.0 if self.scaler is None else self.scaler.scale
        if self.update.is_in_backward:
            self.loss.tokens = self._count(labels)
        self.update.begin(self.step, rate, observe)
        loss = self.pipeline.run(
            inputs,
            labels,
            sizes=self._sizes(inputs),
            recorder=recorder,
            keywords=self._keywords(batch),
            schedule=self.schedule_of(len(inputs)),
        )
        for data in self.data:
            data.finish_gradients()
        totals = self._totals(loss, labels, self.update.complete(), is_asked_to_stop=is_asked_to_stop)
        self._check(totals)
        if totals.is_finite:
            self.update.apply(totals.factor * self._clipping(totals.own_norm))
        if self.local_sgd is not None:
            self.local_sgd.after_step(self.step + 1)
        self._publish()
        for data in self.data:
            data.clear_gradients()
        self.step += 1
        self.tokens += totals.tokens
        self.skipped_steps += not totals.is_finite
        scale = None if self.scaler is None else self.loss.scale
        return StepResult(
            totals.loss,
            totals.grad_norm,
            rate,
            scale,
            skipped=not totals.is_finite,
            is_asked_to_stop=totals.is_asked_to_stop,
        )

    def evaluate(self, batch: Batch) -> float:
        """The mean loss over the real tokens of a global batch of any size, of which `batch` is this data rank's share,
        without training on it; the same on every rank. Where replicas train apart it is the loss of the outer
        parameters, which are what the run will leave behind. Raises DataError where there are none."""
        inputs, labels = batch.inputs.to(self.device), batch.labels.to(self.device)
        with self._evaluating():
            loss = self.pipeline.evaluate(inputs, labels, sizes=self._sizes(inputs))
        return self._totals(loss, labels, torch.zeros((), dtype=torch.float64)).loss

    def logits(self, ids: Tensor) -> list[Tensor]:
        """This tp rank's logits [batch, seq, vocab / tp] for each microbatch of `ids` [microbatches, batch, seq] on the
        ranks of the last stage; an empty list elsewhere."""
        with self._evaluating():
            outputs = self.pipeline.forward(ids.to(self.device), sizes=self._sizes(ids))
            return [self.loss.logits(output) for output in outputs]

    def resume(self, progress: SavedProgress) -> None:
        """Goes on from where a checkpoint's run stood; its tensors are read by others."""
        self.step, self.tokens, self.skipped_steps = progress.step, progress.tokens, progress.skipped_steps
        if self.scaler is not None and progress.loss_scale is not None:
            self.scaler.scale, self.scaler.good_steps = progress.loss_scale, progress.loss_scale_good_steps

    def schedule_of(self, microbatches: int) -> Schedule:
        """The pipeline's for so many microbatches; a warm-up of the batch has several."""
        if microbatches not in self._schedules:
            how = self.recipe.parallel
            self._schedules[microbatches] = build_schedule(
                how.schedule, pp=how.pp, microbatches=microbatches, virtual_stages=how.virtual_stages
            )
        return self._schedules[microbatches]

    def _update_of(self, recipe: Recipe, schedule: Schedule) -> Update:
        step = step_with(recipe.train.seed if recipe.optimizer.stochastic_rounding else None)
        if recipe.optimizer.step_in_backward:
            return UpdateInBackward(self.parameters, self.optimizer, self.axes, step)
        ends = schedule.placement[0], schedule.placement[-1]
        gradients = GradientSync(self.parameters, self.mesh, self.tied, ends)
        return UpdateAfterBackward(self.parameters, self.optimizer, gradients, self.axes, step)

    def _sizes(self, ids: Tensor) -> dict[str, int]:
        """Of what crosses between stages, for ids [microbatches, batch, seq]."""
        parts = self.axes["tp"].size if self.recipe.parallel.sequence_parallel else 1
        return {"batch": ids.shape[1], "seq": ids.shape[2] // parts}

    def _keywords(self, batch: Batch) -> list[dict[str, Tensor]] | None:
        """What each microbatch's forwards get by name: the key of its dropout, where the model has any."""
        model = self.recipe.model
        if not model.dropout and not model.attention_dropout:
            return None
        return [{"key": key} for key in dropout_key(self.recipe.train.seed, self.step, batch.samples)]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Without dropout, and with the outer parameters where replicas train apart. Afterwards parameters are as
        between steps: what saves or steps them relies on it."""
        for stage in self.stages:
            stage.module.eval()
        with nullcontext() if self.local_sgd is None else self.local_sgd.outer_parameters(self._publish):
            try:
                yield
            finally:
                for stage in self.stages:
                    stage.module.train()
                for data in self.data:
                    data.free_gathered()

    def _publish(self) -> None:
        """The model computes from now on with what is in `parameters`."""
        for data in self.data:
            data.publish()

    def _totals(self, loss: Tensor, labels: Tensor, square: Tensor, *, is_asked_to_stop: bool = False) -> Totals:
        """Loss, labels and squared norm summed over the mesh in one go. The loss is equal on all tp ranks, so each
        counts for its share; the labels of a data rank are the same along tp and pp, where the first ones count."""
        tp, pp = self.axes["tp"], self.axes["pp"]
        real = self._own_count(labels) * (tp.rank == 0 and pp.rank == 0)
        asked = torch.full_like(real, float(is_asked_to_stop))
        sums = sum_over_mesh(torch.stack((loss.double() / tp.size, square.to(self.device), real, asked)), self.axes)
        nominal_loss, total_square, tokens, asking = sums.tolist()
        factor = self.loss.tokens / max(tokens, 1.0) / self.loss.scale
        norm = total_square**0.5 * factor
        own = Totals(nominal_loss * factor, norm, round(tokens), factor, own_norm=norm, is_asked_to_stop=asking > 0)
        totals = own if self.local_sgd is None else self._over_replicas(own, self.local_sgd)
        self._check_labels(totals.tokens)
        return totals

    def _own_count(self, labels: Tensor) -> Tensor:
        return (labels != IGNORED).sum().double()

    def _count(self, labels: Tensor) -> int:
        """The labels of the global batch (of this replica's, where they train apart), known before the backward."""
        data = {name: self.axes[name] for name in ("dp_replicate", "dp_shard")}
        tokens = round(sum_over_mesh(self._own_count(labels), data).item())
        share = float(tokens > 0)  # of the replicas that have any: all of them stop, or none
        if self.local_sgd is not None:
            share = self.local_sgd.mean(torch.tensor(share, device=self.device)).item()
        self._check_labels(tokens if share == 1.0 else 0)
        return tokens

    def _check_labels(self, tokens: int) -> None:
        if not tokens:
            raise DataError(
                f"step {self.step + 1}: no token of the batch has a label; data.ignore_token_ids = "
                f"{list(self.recipe.data.ignore_token_ids)} are not learned. Try fewer of them"
            )

    def _over_replicas(self, own: Totals, local_sgd: LocalSgd) -> Totals:
        """Of replicas that train apart, each of which knows its `own`; no tokens where one of them has none."""
        flags = float(own.tokens == 0), float(own.is_asked_to_stop)
        known = (own.loss * own.tokens, own.grad_norm**2, float(own.tokens), *flags)
        loss, square, tokens, empty, asking = local_sgd.mean(
            torch.tensor(known, dtype=torch.float64, device=self.device)
        ).tolist()
        whole = 0 if empty else round(tokens * local_sgd.replicas.size)
        return replace(
            own, loss=loss / max(tokens, 1.0), grad_norm=square**0.5, tokens=whole, is_asked_to_stop=asking > 0
        )

    def _check(self, totals: Totals) -> None:
        """Lowers or raises the loss scale. Raises NonFiniteError where what is not finite cannot be skipped."""
        if self.scaler is not None:
            self.scaler.update(is_finite=totals.is_finite)
        if totals.is_finite or (self.scaler is not None and not self.scaler.has_failed):
            return
        at_scale = "" if self.scaler is None else f" even at a loss scale of {self.loss.scale:g}"
        left = f"weights are those of step {self.step}"
        if self.update.is_in_backward:
            left = "weights have been stepped with it (optimizer.step_in_backward); go on from the last checkpoint"
        raise NonFiniteError(
            f"step {self.step + 1}: loss {totals.loss}, gradient norm {totals.grad_norm}{at_scale}; {left}. "
            "A lower optimizer.lr or more optimizer.warmup_steps may do"
        )

    def _clipping(self, grad_norm: float) -> float:
        limit = self.recipe.train.grad_clip
        return 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6))
