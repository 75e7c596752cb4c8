"""The trainer: a model on a mesh, and the one function that is a step of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_

from parallel3d.config import Recipe
from parallel3d.data.loader import Batch
from parallel3d.errors import NonFiniteError
from parallel3d.layers.dropout import dropout_key
from parallel3d.layers.loss import vocab_parallel_cross_entropy
from parallel3d.mesh import axes_of
from parallel3d.parallelize import ModelClass, parallelize
from parallel3d.pipeline.links import Connect, Links
from parallel3d.pipeline.recorder import Recorder
from parallel3d.pipeline.schedules import build_schedule
from parallel3d.training.gradients import GradientSync, local_parameters, squared_norm, sum_over_mesh
from parallel3d.training.optimizer import build_optimizer, learning_rate, set_learning_rate


@dataclass(frozen=True)
class StepResult:
    """The same on every rank: the mean loss over the global batch's tokens, and the gradient's norm before clipping."""

    loss: float
    grad_norm: float
    lr: float


class Trainer:
    """Trains `model_class` as the recipe says, on `mesh`. Build it on every rank of the mesh at once. `connect`: how the
    ranks of a pipeline reach each other."""

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
        self.mesh = mesh
        self.axes = axes_of(mesh)
        self.device = device
        self.step = 0  # steps done
        tokens = recipe.train.global_batch_size * recipe.train.seq_len
        loss_fn = partial(_share_of_mean_loss, tp=mesh["tp"], tokens=tokens)
        schedule = build_schedule(
            recipe.parallel.schedule,
            pp=recipe.parallel.pp,
            microbatches=recipe.microbatches,
            virtual_stages=recipe.parallel.virtual_stages,
        )
        parts = parallelize(model_class, recipe, mesh, device, schedule, loss_fn, connect=connect)
        self.parameter_count = parts.parameter_count
        self.pipeline = parts.pipeline
        self.stages = parts.stages
        self.data = parts.data
        self.parameters = local_parameters(parts.parameters)
        self.tied = parts.tied
        ends = schedule.placement[0], schedule.placement[-1]
        self._gradients = GradientSync(self.parameters, mesh, parts.tied, ends)
        self.optimizer = build_optimizer(self.parameters, recipe.optimizer)

    def train_step(
        self, batch: Batch, recorder: Recorder | None = None, *, observe: Callable[[], None] | None = None
    ) -> StepResult:
        """One step on this data rank's share of a global batch; `recorder` is told of each action, and `observe` called
        once the gradients in `parameters` are complete and before they are clipped. Raises NonFiniteError, with nothing
        changed, where the loss or the gradient is not finite."""
        inputs, labels = batch.inputs.to(self.device), batch.labels.to(self.device)
        keywords = self._keywords(batch)
        loss = self.pipeline.run(inputs, labels, sizes=self._sizes(inputs), recorder=recorder, keywords=keywords)
        for data in self.data:
            data.finish_gradients()
        for parameter in self.parameters:
            parameter.refresh()
        self._gradients.complete()
        mean_loss, grad_norm = self._global_loss_and_norm(loss)
        if observe is not None:
            observe()
        self._clip(grad_norm)
        rate = learning_rate(self.recipe.optimizer, self.step + 1, self.recipe.train.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        for data in self.data:
            data.publish()
            data.clear_gradients()
        self.step += 1
        return StepResult(mean_loss, grad_norm, rate)

    def evaluate(self, batch: Batch) -> float:
        """The mean loss over the tokens of a global batch of any size, of which `batch` is this data rank's share,
        without training on it; the same on every rank."""
        inputs, labels = batch.inputs.to(self.device), batch.labels.to(self.device)
        with self._evaluating():
            loss = self.pipeline.evaluate(inputs, labels, sizes=self._sizes(inputs))
        as_if_tokens = self.recipe.train.global_batch_size * self.recipe.train.seq_len  # what the loss is divided by
        tokens = batch.inputs.numel() * self.recipe.parallel.dp
        share = loss.double() * as_if_tokens / (tokens * self.axes["tp"].size)
        return sum_over_mesh(share, self.axes).item()

    def logits(self, ids: Tensor) -> list[Tensor]:
        """This tp rank's logits [batch, seq, vocab / tp] for each microbatch of `ids` [microbatches, batch, seq] on the
        ranks of the last stage; an empty list elsewhere."""
        with self._evaluating():
            return self.pipeline.forward(ids.to(self.device), sizes=self._sizes(ids))

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
        """Without dropout. Afterwards parameters are as between steps: what saves or steps them relies on it."""
        for stage in self.stages:
            stage.module.eval()
        try:
            yield
        finally:
            for stage in self.stages:
                stage.module.train()
            for data in self.data:
                data.free_gathered()

    def _global_loss_and_norm(self, loss: Tensor) -> tuple[float, float]:
        """Both summed over the mesh in one go. The loss is equal on all tp ranks, so each counts for its share."""
        square = squared_norm(self.parameters, self.axes).to(self.device)
        sums = torch.stack((loss.double() / self.axes["tp"].size, square))
        mean_loss, total_square = sum_over_mesh(sums, self.axes).tolist()
        grad_norm = total_square**0.5
        if not torch.isfinite(sums).all():
            raise NonFiniteError(
                f"step {self.step + 1}: loss {mean_loss}, gradient norm {grad_norm}; weights are those of step "
                f"{self.step}. A lower optimizer.lr or more optimizer.warmup_steps may do"
            )
        return mean_loss, grad_norm

    def _clip(self, grad_norm: float) -> None:
        if self.recipe.train.grad_clip is not None:
            norm = torch.tensor(grad_norm, device=self.device)
            clip_grads_with_norm_([p.local for p in self.parameters], self.recipe.train.grad_clip, norm)


def _share_of_mean_loss(logits: Tensor, labels: Tensor, *, tp: DeviceMesh, tokens: int) -> Tensor:
    """A microbatch's part of the mean over `tokens` tokens."""
    return vocab_parallel_cross_entropy(logits, labels, tp, overwrite_logits=True).sum() / tokens
