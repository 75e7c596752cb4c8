"""The trainer: a model on a mesh, and the one function that is a step of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.checkpoint.store import SavedProgress
from parallel3d.config.recipe import Recipe
from parallel3d.data.loader import Batch
from parallel3d.layers.dropout import dropout_key
from parallel3d.mesh import Axis, axes_of, replica_mesh
from parallel3d.optimizers.build import build_optimizer
from parallel3d.parallelize import ModelClass, parallelize
from parallel3d.pipeline.links import Connect, Links
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.schedule import Schedule
from parallel3d.timeline.recorder import Recorder
from parallel3d.training.hooks import (
    CountLabelsFirst,
    LossScaling,
    RefuseNonFinite,
    StepHook,
    StepTotals,
    TrainApart,
    refuse_no_labels,
    sum_totals,
)
from parallel3d.training.local_sgd.replicas import LocalSgd
from parallel3d.training.loss import LossScaler, MeanLoss
from parallel3d.training.update import Observe, build_update, learning_rate


@dataclass(frozen=True)
class StepResult:
    """The result of a step, the same on every rank: the mean loss over the global batch's labels, and the gradient's
    norm before clipping (where replicas train apart, the root of the mean square of their norms)."""

    loss: float
    grad_norm: float
    lr: float
    loss_scale: float | None = None  # None: training is not in float16
    skipped: bool = False  # the gradient overflowed in float16, and nothing was changed
    is_asked_to_stop: bool = False  # some rank received SIGTERM


class Trainer:
    """Trains `model_class` as the recipe says, on `mesh`. Build it on every rank of the mesh at once. `connect`: how
    the ranks of a pipeline reach each other.

    Public methods are `train_step`, `evaluate`, `logits` and `resume`; `training.state` saves and loads a trainer."""

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
        self.skipped_steps = 0  # steps that were left out because their gradients overflowed
        replicas = Axis.of(mesh["dp_replicate"])
        if recipe.local_sgd.sync_every is not None:  # from here on a replica is a run of its own
            recipe, mesh = recipe.of_one_replica, replica_mesh(mesh)
        self.mesh = mesh
        self.axes = axes_of(mesh)
        self.loss = MeanLoss(recipe, mesh["tp"])
        self._schedules: dict[int, Schedule] = {}  # by the number of microbatches
        schedule = self.schedule_of(recipe.microbatches)
        parts = parallelize(model_class, recipe, mesh, device, schedule, self.loss, connect=connect)
        self.parameter_count = parts.parameter_count
        self.pipeline = parts.pipeline
        self.stages = parts.stages
        self.data = parts.data
        self.loss.defer_head(stage.module for stage in parts.stages)
        self.parameters = parts.parameters
        self.tied = parts.tied
        in_backward = recipe.optimizer.step_in_backward
        self.optimizer = build_optimizer(self.parameters, recipe.optimizer, mesh, each=in_backward)
        ends = schedule.placement[0], schedule.placement[-1]
        self.update = build_update(parts, self.optimizer, recipe, mesh, ends)
        self.local_sgd = None
        if recipe.local_sgd.sync_every is not None:
            self.local_sgd = LocalSgd(
                self.parameters, recipe.local_sgd, replicas=replicas, axes=self.axes, steps=recipe.train.steps
            )
        self.scaler = None
        self.hooks: list[StepHook] = []
        if recipe.train.precision == "fp16":
            self.scaler = LossScaler(recipe.loss_scale, scale=recipe.loss_scale.initial)
            self.hooks.append(LossScaling(self.loss, self.scaler))
        else:
            self.hooks.append(RefuseNonFinite(steps_in_backward=in_backward))
        if in_backward:
            self.hooks.append(CountLabelsFirst(self.loss, self.axes, recipe.data.ignore_token_ids, self.local_sgd))
        if self.local_sgd is not None:
            self.hooks.append(TrainApart(self.local_sgd, device))

    def train_step(
        self,
        batch: Batch,
        recorder: Recorder | None = None,
        *,
        observe: Observe | None = None,
        is_asked_to_stop: bool = False,
    ) -> StepResult:
        """Trains one step on `batch`, this data rank's share of a global batch.

        `recorder` is told of each action of the schedule. `observe` is called with each parameter when its gradient is
        complete and before it is scaled and clipped. `is_asked_to_stop` is True if this rank received SIGTERM; the flag
        is summed over the mesh, so all ranks stop together. Raises NonFiniteError where the loss or the gradient is not
        finite (in float16: at any loss scale), with nothing changed but where the optimizer steps in the backward, and
        DataError, with nothing changed, where no rank has a label."""
        step = self.step + 1
        inputs, labels = batch.inputs.to(self.device), batch.labels.to(self.device)
        rate = learning_rate(self.recipe.optimizer, step, self.recipe.train.steps)
        for hook in self.hooks:
            hook.before_forward(step, labels)
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
        for hook in self.hooks:
            hook.check(step, totals)
        if totals.is_finite:
            self.update.apply(totals.factor * self._clipping(totals.own_norm))
        for hook in self.hooks:
            hook.after_step(step)
        self._publish()
        for data in self.data:
            data.clear_gradients()
        self.step = step
        self.tokens += totals.tokens
        self.skipped_steps += not totals.is_finite
        return StepResult(
            totals.loss,
            totals.grad_norm,
            rate,
            loss_scale=None if self.scaler is None else self.loss.scale,
            skipped=not totals.is_finite,
            is_asked_to_stop=totals.is_asked_to_stop,
        )

    def evaluate(self, batch: Batch) -> float:
        """Returns the mean loss over the labels of a global batch of any size, of which `batch` is this data rank's
        share, without training on it; the same on every rank. Where replicas train apart it is the loss of the outer
        parameters, which are what the run will leave behind. Raises DataError where the batch has no label."""
        inputs, labels = batch.inputs.to(self.device), batch.labels.to(self.device)
        with self._evaluating():
            loss = self.pipeline.evaluate(inputs, labels, sizes=self._sizes(inputs))
        return self._totals(loss, labels, torch.zeros((), dtype=torch.float64)).loss

    def logits(self, ids: Tensor) -> list[Tensor]:
        """Returns this tp rank's logits [batch, seq, vocab / tp] for each microbatch of `ids` [microbatches, batch,
        seq] on the ranks of the last stage, and an empty list elsewhere."""
        with self._evaluating():
            outputs = self.pipeline.forward(ids.to(self.device), sizes=self._sizes(ids))
            return [self.loss.logits(output) for output in outputs]

    def resume(self, progress: SavedProgress) -> None:
        """Sets the counters to where a checkpoint's run stood. `training.state` reads the checkpoint's tensors."""
        self.step, self.tokens, self.skipped_steps = progress.step, progress.tokens, progress.skipped_steps
        if self.scaler is not None and progress.loss_scale is not None:
            self.scaler.scale, self.scaler.good_steps = progress.loss_scale, progress.loss_scale_good_steps

    def schedule_of(self, microbatches: int) -> Schedule:
        """The pipeline's schedule for this number of microbatches, of which a warm-up of the batch has several."""
        if microbatches not in self._schedules:
            layout = self.recipe.parallel
            self._schedules[microbatches] = build_schedule(
                layout.schedule, pp=layout.pp, microbatches=microbatches, virtual_stages=layout.virtual_stages
            )
        return self._schedules[microbatches]

    def _sizes(self, ids: Tensor) -> dict[str, int]:
        """The sizes of what crosses between stages, for ids [microbatches, batch, seq]."""
        parts = self.axes["tp"].size if self.recipe.parallel.sequence_parallel else 1
        return {"batch": ids.shape[1], "seq": ids.shape[2] // parts}

    def _keywords(self, batch: Batch) -> list[dict[str, Tensor]] | None:
        """The keyword arguments of each microbatch's forwards: the key of its dropout, if the model has any dropout."""
        model = self.recipe.model
        if not model.dropout and not model.attention_dropout:
            return None
        return [{"key": key} for key in dropout_key(self.recipe.train.seed, self.step, batch.samples)]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Turns dropout off, and lets hooks exchange the parameters. Afterwards the parameters are as between steps,
        which saving and stepping rely on."""
        for stage in self.stages:
            stage.module.eval()
        with ExitStack() as contexts:
            for hook in self.hooks:
                contexts.enter_context(hook.evaluating(self._publish))
            try:
                yield
            finally:
                for stage in self.stages:
                    stage.module.train()
                for data in self.data:
                    data.free_gathered()

    def _publish(self) -> None:
        """Makes the model compute with what is in `parameters` from now on."""
        for data in self.data:
            data.publish()

    def _totals(self, loss: Tensor, labels: Tensor, square: Tensor, *, is_asked_to_stop: bool = False) -> StepTotals:
        totals = sum_totals(self.axes, self.loss, loss, labels, square, is_asked_to_stop=is_asked_to_stop)
        for hook in self.hooks:
            totals = hook.combine(totals)
        refuse_no_labels(self.step + 1, totals.tokens, self.recipe.data.ignore_token_ids)
        return totals

    def _clipping(self, grad_norm: float) -> float:
        """The factor that brings a gradient of this norm down to train.grad_clip; 1 where it is not above it."""
        limit = self.recipe.train.grad_clip
        return 1.0 if limit is None else min(1.0, limit / (grad_norm + 1e-6))
