"""Trainer: a model on a mesh, with methods for a training step, evaluation and logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.build_engine import ModelClass, build_engine
from parallel3d.checkpoint.manifest import Progress
from parallel3d.config.recipe import Recipe
from parallel3d.data.loader import IGNORED, Batch, Documents, WrongId
from parallel3d.data.order import SkippedRanges
from parallel3d.diagnosis.nonfinite import describe_nonfinite
from parallel3d.diagnosis.replicas import copies_of, refuse_differences
from parallel3d.engine import Observe
from parallel3d.errors import ConfigError
from parallel3d.layers.collectives import all_reduce_over
from parallel3d.layers.dropout import dropout_key
from parallel3d.layers.sequence import SequencePart
from parallel3d.mesh import SPLIT_SEQUENCES, Axis, Role, axes_of, layer_axes, replica_mesh
from parallel3d.optimizers.build import build_optimizer
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.schedule import Schedule
from parallel3d.timeline.recorder import Recorder
from parallel3d.training.expert_load import ExpertLoads
from parallel3d.training.guard import Guard
from parallel3d.training.learning_rate import learning_rate
from parallel3d.training.loss import MeanLoss
from parallel3d.training.outer_loop import BuildOuterLoop, OuterLoop
from parallel3d.training.step_result import (
    StepResult,
    StepTotals,
    refuse_no_labels,
    refuse_wrong_id,
)
from parallel3d.watch.heartbeat import phase
from parallel3d.watch.step_clock import timed

_build_schedule = lru_cache(build_schedule)  # A batch-size warmup reuses several schedules.


class Trainer:
    """Trains a model on a mesh as a recipe describes. Collective: all ranks of the mesh create it.

    Use `parallel3d.training.state` to save and load a trainer.

    Args:
        recipe: Complete recipe of the run.
        mesh: Mesh from `build_mesh`. With local SGD, the mesh of all replicas.
        device: Device of this rank.
        model_class: Builds the model, for example `model_class("llama")`.
        initialize: If False, the weights stay uninitialized, and you must load a checkpoint before
            the first step.
        gpu_bytes: Memory of a GPU in bytes. Determines the chunk size of the loss. None on CPU.
        data_fingerprint: Identifies the training data in checkpoints. None: unknown.
        outer_loop: Builds the outer loop of local SGD (`local_sgd.outer_loop_of`). None: replicas
            are synchronous.

    Raises:
        ConfigError: The recipe uses local SGD, but `outer_loop` is None, or the model does not
            support the recipe.

    Example:
        >>> from parallel3d.models import model_class
        >>> mesh = parallel3d.build_mesh(recipe.parallel, "cpu")
        >>> trainer = parallel3d.Trainer(
        ...     recipe, mesh=mesh, device=torch.device("cpu"), model_class=model_class("llama")
        ... )
        >>> trainer.train_step(batch).loss
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        model_class: ModelClass,
        initialize: bool = True,
        gpu_bytes: float | None = None,
        data_fingerprint: tuple[dict[str, Any], ...] | None = None,
        outer_loop: BuildOuterLoop | None = None,
    ) -> None:
        self.recipe = recipe
        self.device = device
        self.mesh = mesh
        own_recipe = recipe
        if outer_loop is not None:  # Each replica trains like a separate run.
            self.mesh = replica_mesh(mesh)
            own_recipe = recipe.of_one_replica
        elif (every := recipe.local_sgd.sync_every) is not None:
            raise ConfigError(
                f"local_sgd.sync_every = {every}: needs an outer loop; try Trainer(recipe, ..., "
                "outer_loop=outer_loop_of(recipe)) of parallel3d.training.local_sgd, or "
                "local_sgd.sync_every=null"
            )
        self.axes = axes_of(self.mesh)
        within_layers = layer_axes(self.mesh, recipe.parallel)
        self.sequence_part = SequencePart(within_layers[SPLIT_SEQUENCES])
        self.loss = MeanLoss(own_recipe, self.axes[Role.SPLIT_TENSORS], gpu_bytes)
        self.engine = build_engine(
            model_class,
            own_recipe,
            self.mesh,
            device,
            self.schedule_of(own_recipe.microbatches),
            self.loss,
            within_layers,
            initialize=initialize,
        )
        self.pipeline = self.engine.pipeline
        self.stages = [*self.pipeline.stages.values()]
        self.parameters = self.engine.parameters
        self.loss.use_head(stage.module for stage in self.stages)
        self.experts: ExpertLoads | None = None
        if recipe.model.experts is not None:
            modules = [stage.module for stage in self.stages]
            self.experts = ExpertLoads(modules, self.axes, recipe.parallel.expert_ranks)
        self.optimizer = build_optimizer(self.engine.trained, recipe.optimizer, self.mesh)
        self.guard = Guard(recipe)
        self.outer_loop = OuterLoop()
        if outer_loop is not None:
            self.outer_loop = outer_loop(self, Axis.of(mesh[Role.REPLICATE]))
        self.progress = Progress(
            step=0,
            tokens=0,
            seed=recipe.train.seed,
            global_batch_size=recipe.train.global_batch_size,
            seq_len=recipe.train.seq_len,
            parameters=self.engine.parameter_count,
            parallel=asdict(recipe.parallel),
            skip=recipe.data.skip,
            loss_scale=recipe.loss_scale.initial if recipe.train.precision == "fp16" else None,
            optimizer=self.optimizer.label,
            data_fingerprint=data_fingerprint,
        )

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.progress.step

    @property
    def skipped_ranges(self) -> SkippedRanges:
        """Ranges of sequences that the run skips."""
        return SkippedRanges.merge((*self.recipe.data.skip, *self.progress.skipped_by_rollbacks))

    def train_step(
        self,
        batch: Batch,
        recorder: Recorder | None = None,
        *,
        observe: Observe | None = None,
        is_asked_to_stop: bool = False,
    ) -> StepResult:
        """Runs one training step: forward and backward passes, then the optimizer. Collective.

        The optimizer does not apply a step with a non-finite loss or gradient. The step is skipped
        or raises, as `train.on_nonfinite` says. If a lower loss scale may help, it is skipped.

        Args:
            batch: Share of the global batch for this data-parallel rank: inputs and labels
                [microbatches, batch, seq].
            recorder: Records the start and end of each action of the schedule.
            observe: Called with each trainable parameter once the gradients are complete, before
                scaling and clipping.
            is_asked_to_stop: True if this rank has a request to stop or save, or a failed save.
                Summed over the mesh, so that all ranks respond after the same step.

        Returns:
            Loss, gradient norm, learning rate and more, equal on all ranks.

        Raises:
            DataError: The global batch has no target tokens, or an id is outside the vocabulary.
                The weights have not changed then.
            NonFiniteError: Loss or gradient is not finite, and the step cannot be skipped.
            SpikeError: Too many spikes in a row.
        """
        step = self.step + 1
        recipe = self.recipe
        labels = self._own(batch.labels)
        rate = learning_rate(recipe.optimizer, step, recipe.train.steps)
        for group in self.optimizer.param_groups:
            # Muon can use a different learning rate for its matrices.
            group["lr"] = rate * group.get("lr_ratio", 1.0)
        self.loss.scale = self.progress.loss_scale or 1.0
        loss = self.pipeline.run(
            self._own(batch.inputs),
            labels,
            sizes=self._sizes(labels),
            recorder=recorder,
            keywords=self._keywords(batch.documents, batch.samples),
            schedule=self.schedule_of(len(labels)),
        )
        self.engine.finish_gradients(observe)
        with timed("optimizer"):
            square = self.engine.squared_norm_share()
        result = self._reduce_totals(
            loss, labels, square, batch.wrong_id, rate=rate, is_asked_to_stop=is_asked_to_stop
        )
        refuse_no_labels(step, result.tokens, recipe.data.ignore_token_ids)
        name_cause = partial(describe_nonfinite, loss, self.parameters, recipe.parallel, self.mesh)
        result, progress = self.guard.check(step, result, self.progress, name_cause)
        if self.experts is not None:
            result = replace(result, expert_load=self.experts.collect(self.device))
        if not result.is_skipped:
            limit = recipe.train.grad_clip or math.inf
            with phase("optimizer"), timed("optimizer"):
                clip = min(1.0, limit / (result.own_norm + 1e-6))
                self.engine.scale_gradients(result.factor * clip)
                self.optimizer.step()
            if self.experts is not None:
                self.experts.balance()
        with timed("optimizer"):
            self.outer_loop.after_step(step, is_last=False)
        self.engine.publish()
        self.engine.clear_gradients()
        self.progress = replace(
            progress,
            step=step,
            tokens=progress.tokens + result.tokens,
            skipped_steps=progress.skipped_steps + result.is_skipped,
            val_loss=None,
        )
        return result

    def compare_replicas(self, when: str) -> None:
        """Compares the parameters and optimizer states that ranks hold in common. Collective.

        Raises ReplicaError on all ranks if any differ.

        Args:
            when: Beginning of the error message, such as "step 100".
        """
        copies = copies_of(self.parameters, self.optimizer.state)
        copies += self.engine.copies(self.optimizer.state) + self.outer_loop.copies()
        advice = "resume from a checkpoint that is not newer than the last comparison"
        refuse_differences(copies, self.recipe.parallel, self.device, when=when, advice=advice)

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Returns the mean cross-entropy of all target tokens in nats. Collective.

        With local SGD it evaluates the outer parameters, which are the result of the run.

        Args:
            batches: This data-parallel rank's shares of global batches of any size.

        Raises:
            DataError: No batch has a target token, or an id is outside the vocabulary.
        """
        results = []
        with self._evaluating():
            for batch in batches:
                labels = self._own(batch.labels)
                loss = self.pipeline.evaluate(
                    self._own(batch.inputs),
                    labels,
                    sizes=self._sizes(labels),
                    keywords=self._keywords(batch.documents),
                )
                square = torch.zeros_like(loss)
                results.append(self._reduce_totals(loss, labels, square, batch.wrong_id))
        tokens = sum(result.tokens for result in results)
        refuse_no_labels(self.step + 1, tokens, self.recipe.data.ignore_token_ids)
        return sum(result.loss * (result.tokens / tokens) for result in results)

    def logits(self, ids: Tensor, documents: Documents = None) -> list[Tensor]:
        """Returns the logits of each microbatch. Collective.

        Args:
            ids: Token ids [microbatches, batch, seq].
            documents: Document masks of packed sequences, one per microbatch. None: no mask.

        Returns:
            [batch, seq / cp, vocab / tp] per microbatch on the ranks of the last stage, or [batch,
            seq / cp, vocab] if the model gathers its logits. An empty list on other ranks. The
            positions are those of the rank's `sequence_part`.
        """
        own = self._own(ids)
        with self._evaluating():
            outputs = self.pipeline.forward(
                own, sizes=self._sizes(own), keywords=self._keywords(documents)
            )
            return [self.loss.logits(output) for output in outputs]

    def schedule_of(self, microbatches: int) -> Schedule:
        """Returns the schedule for a number of microbatches. A batch-size warmup uses several."""
        layout = self.recipe.parallel
        return _build_schedule(
            layout.schedule,
            pp=layout.pp,
            microbatches=microbatches,
            virtual_stages=layout.virtual_stages,
        )

    def _on_device(self, x: Tensor) -> Tensor:
        """Copies a host tensor to the device, without blocking if it is in pinned memory."""
        return x.to(self.device, non_blocking=True)

    def _own(self, tokens: Tensor) -> Tensor:
        """Copies this rank's part of the sequences in `tokens` [..., seq] to the device."""
        return self._on_device(self.sequence_part.take(tokens, tokens.ndim - 1))

    def _keywords(
        self, documents: Documents, samples: Tensor | None = None
    ) -> list[dict[str, Any]] | None:
        """Returns the keyword arguments of the stages for each microbatch, or None if unused.

        They hold the document mask of packed sequences, and in training the dropout key of the
        `samples`.
        """
        keywords: list[dict[str, Any]] = []
        for packed in documents or ():
            keywords.append({"documents": packed.moved(self._on_device)})
        model = self.recipe.model
        if samples is not None and (model.dropout or model.attention_dropout):
            keys = self._on_device(dropout_key(self.recipe.train.seed, self.step, samples))
            keywords = keywords or [{} for _ in keys]
            for each, key in zip(keywords, keys, strict=True):
                each["key"] = key
        return keywords or None

    def _sizes(self, ids: Tensor) -> dict[str, int]:
        """Returns the named sizes of the boundaries for `ids` [microbatches, batch, seq / cp]."""
        parts = self.axes[Role.SPLIT_TENSORS].size if self.recipe.parallel.sequence_parallel else 1
        return {"batch": ids.shape[1], "seq": ids.shape[2] // parts}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Context manager that disables dropout and z-loss and sets the parameters to evaluate."""
        self.loss.is_plain = True
        for stage in self.stages:
            stage.module.eval()
        with self.outer_loop.evaluating():
            try:
                yield
            finally:
                self.loss.is_plain = False
                for stage in self.stages:
                    stage.module.train()
                self.engine.free_gathered()

    def _reduce_totals(
        self,
        loss: Tensor,
        labels: Tensor,
        square: Tensor,
        wrong_id: WrongId | None,
        *,
        rate: float = 0.0,
        is_asked_to_stop: bool = False,
    ) -> StepResult:
        """Reduces the totals of a step over the mesh, with one all-reduce per axis.

        It sums the loss, the target tokens, this rank's share `square` of the squared gradient
        norm, the requests to stop, and the votes to refuse the batch. The loss is equal on all tp
        ranks, so each adds its share. Labels are equal along tp and pp, so only the first rank of
        both axes counts them.

        All arithmetic is in float64 on the device. Reading the results synchronizes the host with
        the GPU, once per step. Raises DataError on all ranks if an id is outside the vocabulary.
        """
        tp = self.axes[Role.SPLIT_TENSORS]
        pp = self.axes[Role.SPLIT_LAYERS]
        counted = (labels != IGNORED).sum().double()
        if tp.rank or pp.rank:
            counted = torch.zeros_like(counted)
        vote = torch.full_like(counted, float(is_asked_to_stop))
        # Negative, because a dry run on fake tensors reads 1 from each element.
        refusal = torch.full_like(counted, -float(wrong_id is not None))
        own = torch.stack((loss / tp.size, square, counted, vote, refusal))
        nominal_loss, total_square, tokens, *votes = all_reduce_over(self.axes, own).unbind()
        # A tensor, not a float: torch would multiply by the reciprocal, which rounds differently.
        factor = torch.full_like(tokens, self.loss.tokens) / tokens.clamp(min=1.0) / self.loss.scale
        own_norm = total_square.sqrt() * factor
        totals = StepTotals(nominal_loss * factor, own_norm, tokens, *votes)
        totals = self.outer_loop.combine(totals)
        with phase("forward or backward", waits=True):  # Waits for the GPU, and so for other ranks.
            numbers = torch.stack((*totals, factor, own_norm)).tolist()
        mean_loss, grad_norm, labels_seen, stops, refused, own_factor, norm = numbers
        if refused < 0:
            refuse_wrong_id(wrong_id, self.recipe.model.vocab)
        return StepResult(
            loss=mean_loss,
            grad_norm=grad_norm,
            tokens=round(labels_seen),
            is_asked_to_stop=stops > 0,
            factor=own_factor,
            own_norm=norm,
            lr=rate,
            loss_scale=self.progress.loss_scale,
        )
