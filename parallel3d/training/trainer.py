"""The trainer: a model on a mesh, and the one function that is a step of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import Recipe, SequenceRange
from parallel3d.data.loader import Batch, Documents, WrongId
from parallel3d.data.order import LeftOut
from parallel3d.diagnosis.replicas import copies_of, refuse_differences
from parallel3d.diagnosis.suspects import name_suspects
from parallel3d.layers.collectives import all_reduce_over
from parallel3d.layers.dropout import dropout_key
from parallel3d.mesh import Axis, axes_of, replica_mesh
from parallel3d.optimizers.build import build_optimizer
from parallel3d.parallelize import ModelClass, block_weights_of, parallelize
from parallel3d.pipeline.links import Connect, Links
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.schedule import Schedule
from parallel3d.timeline.recorder import Recorder
from parallel3d.training import hooks
from parallel3d.training.hooks import StepResult, StepTotals
from parallel3d.training.local_sgd.replicas import LocalSgd
from parallel3d.training.loss import LossScaler, MeanLoss
from parallel3d.training.update import Observe, Update, UpdateInBackward, learning_rate


class Trainer:
    """Trains `model_class` as the recipe says, on `mesh`. Build it on every rank of the mesh at once. `connect` makes
    the links between the ranks of a pipeline. `training.state` saves and loads a trainer. Without `initialize` no
    weights are drawn: a checkpoint must be loaded before the first step. `gpu_bytes`, the memory of a GPU, decides how
    much of it the loss takes."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        model_class: ModelClass,
        connect: Connect = Links,
        initialize: bool = True,
        gpu_bytes: float | None = None,
    ) -> None:
        self.recipe, self.device = recipe, device
        self.step = 0  # steps done
        self.tokens = 0  # labels seen in them
        self.skipped_by_rollbacks: tuple[SequenceRange, ...] = ()  # sequences left out beside those of data.skip
        self.skipped_steps = 0  # steps that were left out: their loss or gradient was not finite, or a hook refused it
        self._own_loss: Tensor | None = None  # this rank's share of the loss of the step under way
        # What identifies the data that it is trained on (parallel3d/data/fingerprint.py); None: not known.
        self.data_fingerprint: tuple[dict[str, Any], ...] | None = None
        replicas = Axis.of(mesh["dp_replicate"])
        if recipe.local_sgd.sync_every is not None:  # from here on a replica is a run of its own
            recipe, mesh = recipe.of_one_replica, replica_mesh(mesh)
        self.mesh, self.axes = mesh, axes_of(mesh)
        self.loss = MeanLoss(recipe, mesh["tp"], gpu_bytes)
        self._schedules: dict[int, Schedule] = {}  # by the number of microbatches
        schedule = self.schedule_of(recipe.microbatches)
        parts = parallelize(
            model_class, recipe, mesh, device, schedule, self.loss, connect=connect, initialize=initialize
        )
        self.pipeline, self.stages, self.data = parts.pipeline, parts.stages, parts.data
        self.parameters, self.parameter_count, self.tied = parts.parameters, parts.parameter_count, parts.tied
        self.block_weights = block_weights_of(model_class, recipe.model)
        self.loss.use_head(stage.module for stage in parts.stages)
        in_backward = recipe.optimizer.step_in_backward
        self.optimizer = build_optimizer(parts.trained, recipe.optimizer, mesh, each=in_backward)
        update_class = UpdateInBackward if in_backward else Update
        self.update = update_class(parts, self.optimizer, recipe, mesh)
        self.scaler = None
        if recipe.train.precision == "fp16":
            self.scaler = LossScaler(recipe.loss_scale, scale=recipe.loss_scale.initial)
        self.local_sgd = None
        if recipe.local_sgd.sync_every is not None:
            self.local_sgd = LocalSgd(
                self.parameters, recipe.local_sgd, replicas=replicas, axes=self.axes, steps=recipe.train.steps
            )
        self.spikes = hooks.Spikes(recipe.train, steps_in_backward=in_backward)
        not_finite = hooks.NonFiniteSteps(self.loss, self.scaler, recipe, self._suspects)
        self.hooks: list[hooks.StepHook] = [not_finite, self.spikes]
        if in_backward:
            self.hooks.append(hooks.CountLabelsFirst(self.loss, self.axes, recipe, self.local_sgd))
        if self.local_sgd is not None:
            self.hooks.append(hooks.TrainApart(self.local_sgd))
        if recipe.train.compare_replicas_every is not None:
            self.hooks.append(hooks.CompareReplicas(recipe.train.compare_replicas_every, self.compare_replicas))

    @property
    def left_out(self) -> LeftOut:
        """The samples that the run leaves out."""
        return LeftOut.of((*self.recipe.data.skip, *self.skipped_by_rollbacks))

    def train_step(
        self,
        batch: Batch,
        recorder: Recorder | None = None,
        *,
        observe: Observe | None = None,
        is_asked_to_stop: bool = False,
    ) -> StepResult:
        """Trains one step on `batch`, this data rank's share of a global batch. `recorder` is told of each action of
        the schedule. `observe` is called with each parameter when its gradient is complete and before it is scaled and
        clipped. `is_asked_to_stop` is True if this rank received SIGTERM; the flag is summed over the mesh, so all
        ranks stop together. Where the loss or the gradient is not finite (in float16: at any loss scale), nothing is
        changed but where the optimizer steps in the backward, and the step is left out or NonFiniteError raised, as
        `train.on_nonfinite` says. Raises DataError, with nothing changed, where no rank has a label or any a wrong id.
        """
        step, model = self.step + 1, self.recipe.model
        inputs, labels = self._on_device(batch.inputs), self._on_device(batch.labels)
        rate = learning_rate(self.recipe.optimizer, step, self.recipe.train.steps)
        keywords = self._documents(batch.documents)
        if model.dropout or model.attention_dropout:
            keys = self._on_device(dropout_key(self.recipe.train.seed, self.step, batch.samples))
            keywords = [{**each, "key": key} for each, key in zip(keywords or [{}] * len(keys), keys, strict=True)]
        for hook in self.hooks:
            hook.before_forward(step, labels, batch.wrong_id)
        self.update.begin(self.step, rate, observe)
        sizes, schedule = self._sizes(inputs), self.schedule_of(len(inputs))
        loss = self.pipeline.run(inputs, labels, sizes=sizes, recorder=recorder, keywords=keywords, schedule=schedule)
        self._own_loss = loss
        for data in self.data:
            data.finish_gradients()
        square = self.update.complete()
        result = self._result(loss, labels, square, batch.wrong_id, rate=rate, is_asked_to_stop=is_asked_to_stop)
        hooks.refuse_no_labels(step, result.tokens, self.recipe.data.ignore_token_ids)
        reasons = [reason for hook in self.hooks if (reason := hook.check(step, result)) is not None]
        result = replace(result, left_out="; ".join(reasons) or None)
        if not result.is_skipped:
            limit = self.recipe.train.grad_clip
            clip = 1.0 if limit is None else min(1.0, limit / (result.own_norm + 1e-6))
            self.update.apply(result.factor * clip)
        for hook in self.hooks:
            hook.after_step(step)
        self._publish()
        for data in self.data:
            data.clear_gradients()
        self.step = step
        self.tokens += result.tokens
        self.skipped_steps += result.is_skipped
        return result

    def end_early(self) -> None:
        """Makes the step that is done the run's last: replicas that train apart come together; every rank calls it."""
        if self.local_sgd is not None:
            self.local_sgd.merge(self.step)
            self._publish()

    def compare_replicas(self, when: str) -> None:
        """Raises ReplicaError, on all ranks, where the parameters or optimizer states of ranks that must hold the same
        ones differ; every rank calls it. `when` begins the message."""
        states = self.optimizer.state
        copies = [*copies_of(self.parameters, states, self.axes), *self.update.gradients.copies(states)]
        if self.local_sgd is not None:
            copies.append(self.local_sgd.copies)
        advice = "go on from a checkpoint that is not newer than the last comparison"
        refuse_differences(copies, self.recipe.parallel, self.device, when=when, advice=advice)

    def evaluate(self, batch: Batch) -> float:
        """Returns the mean cross-entropy over the labels of one global batch, as `evaluate_all` does of several."""
        return self.evaluate_all([batch])

    def evaluate_all(self, batches: Iterable[Batch]) -> float:
        """Returns the mean cross-entropy over all labels of global batches of any size, of each of which this data rank
        has its share, without training on them; the same on every rank. Where replicas train apart it is the loss of
        the outer parameters, which are what the run will leave behind. Raises DataError where no batch has a label, or
        any rank a wrong id."""
        results = []
        with self._evaluating():
            for batch in batches:
                inputs, labels = self._on_device(batch.inputs), self._on_device(batch.labels)
                keywords = self._documents(batch.documents)
                loss = self.pipeline.evaluate(inputs, labels, sizes=self._sizes(inputs), keywords=keywords)
                square = loss.new_zeros((), dtype=torch.float64)
                results.append(self._result(loss, labels, square, batch.wrong_id))
        tokens = sum(result.tokens for result in results)
        hooks.refuse_no_labels(self.step + 1, tokens, self.recipe.data.ignore_token_ids)
        return sum(result.loss * (result.tokens / tokens) for result in results)

    def logits(self, ids: Tensor, documents: Documents = None) -> list[Tensor]:
        """Returns this tp rank's logits [batch, seq, vocab / tp] for each microbatch of `ids` [microbatches, batch,
        seq], packed of `documents`, on the ranks of the last stage, and an empty list elsewhere."""
        with self._evaluating():
            keywords = self._documents(documents)
            outputs = self.pipeline.forward(self._on_device(ids), sizes=self._sizes(ids), keywords=keywords)
            return [self.loss.logits(output) for output in outputs]

    def schedule_of(self, microbatches: int) -> Schedule:
        """The pipeline's schedule for this number of microbatches, of which a warm-up of the batch has several."""
        if microbatches not in self._schedules:
            layout = self.recipe.parallel
            self._schedules[microbatches] = build_schedule(
                layout.schedule, pp=layout.pp, microbatches=microbatches, virtual_stages=layout.virtual_stages
            )
        return self._schedules[microbatches]

    def _on_device(self, x: Tensor) -> Tensor:
        """Copies a tensor of the host's to a GPU, without waiting if it is in pinned memory."""
        return x.to(self.device, non_blocking=True)

    def _documents(self, documents: Documents) -> list[dict[str, Any]] | None:
        """What every stage's forward of each microbatch is told of its documents; None where they are joined."""
        return None if documents is None else [{"documents": each.moved(self._on_device)} for each in documents]

    def _sizes(self, ids: Tensor) -> dict[str, int]:
        """The sizes of what crosses between stages, for ids [microbatches, batch, seq]."""
        parts = self.axes["tp"].size if self.recipe.parallel.sequence_parallel else 1
        return {"batch": ids.shape[1], "seq": ids.shape[2] // parts}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Turns dropout, label smoothing and z-loss off, and lets hooks exchange the parameters. Afterwards the
        parameters are as between steps, which saving and stepping rely on."""
        self.loss.is_plain = True
        for stage in self.stages:
            stage.module.eval()
        with ExitStack() as contexts:
            for hook in self.hooks:
                contexts.enter_context(hook.evaluating(self._publish))
            try:
                yield
            finally:
                self.loss.is_plain = False
                for stage in self.stages:
                    stage.module.train()
                for data in self.data:
                    data.free_gathered()

    def _suspects(self) -> str:
        """Says which rank, and which parameter, has made a loss or a gradient that is not finite."""
        assert self._own_loss is not None
        is_apart = self.local_sgd is not None
        return name_suspects(self._own_loss, self.update.squares(), self.recipe.parallel, replicas_train_apart=is_apart)

    def _publish(self) -> None:
        """Makes the model compute with what is in `parameters` from now on."""
        for data in self.data:
            data.publish()

    def _result(
        self,
        loss: Tensor,
        labels: Tensor,
        square: Tensor,
        wrong_id: WrongId | None,
        *,
        rate: float = 0.0,
        is_asked_to_stop: bool = False,
    ) -> StepResult:
        """Sums this rank's loss, labels, share `square` of the squared gradient norm, and votes to stop and to refuse
        the batch over the mesh, in one all-reduce an axis, and lets the hooks combine the replicas. The loss is equal
        on all tp ranks, so each adds its share of it. The labels of a data rank are the same along tp, and the ranks
        between the ends of a pipeline need none, so the first rank of both axes adds them. All arithmetic is on the
        device, in float64, and all results are read at once: this is where the host waits for a GPU, once a step.
        Raises DataError, on all ranks, where any has a wrong id."""
        tp, pp = self.axes["tp"], self.axes["pp"]
        real = hooks.count_labels(labels) * (tp.rank == 0 and pp.rank == 0)
        vote = torch.full_like(real, float(is_asked_to_stop))
        parts = torch.stack((loss.double() / tp.size, square, real, vote, hooks.refusal_of(wrong_id, real)))
        nominal_loss, total_square, tokens, votes, refusals = all_reduce_over(self.axes, parts).unbind()
        # The nominal number is a tensor, because torch multiplies a Python number by the divisor's reciprocal.
        factor = torch.full_like(tokens, self.loss.tokens) / tokens.clamp(min=1.0) / self.loss.scale
        norm = total_square.sqrt() * factor
        totals = StepTotals(nominal_loss * factor, norm, tokens, votes, refusals)
        for hook in self.hooks:
            totals = hook.combine(totals)
        read = torch.stack((*totals, factor, norm)).tolist()
        if read[4] < 0:
            hooks.refuse_wrong_id(wrong_id, self.recipe.model.vocab)
        result = StepResult(
            loss=read[0],
            grad_norm=read[1],
            tokens=round(read[2]),
            is_asked_to_stop=read[3] > 0,
            factor=read[5],
            own_norm=read[6],
            lr=rate,
            loss_scale=None if self.scaler is None else self.loss.scale,
        )
        return result
