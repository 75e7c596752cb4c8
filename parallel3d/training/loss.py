"""The loss that the trainer differentiates, a microbatch's share of the mean over the global batch, and its scale.

float16 has no number between 0 and 6e-8, and gradients are often smaller: the loss is multiplied by a scale before the
backward, and the gradients are divided by it after (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). A step
whose gradients overflow is left out and the scale is lowered; after many good steps it is raised, by the rule of
torch.amp.GradScaler. All ranks know whether all gradients are finite, so their scales stay equal without being sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import LossScaleConfig, Recipe
from parallel3d.layers.loss import TokenLoss, token_losses
from parallel3d.layers.vocabulary import VocabParallelHead, head_cross_entropy
from parallel3d.mesh import Axis
from parallel3d.training.loss_chunks import tokens_at_a_time

SMALLEST = 1.0  # a loss that overflows unscaled has diverged
LARGEST = 2.0**127  # the largest power of two in float32, in which losses are multiplied


class MeanLoss:
    """(output of the last stage, labels) -> sum of the tokens' losses * scale / tokens.

    `tokens` is the nominal number of tokens of the recipe's whole batch; how many of them have a label is known only
    after the step, and the trainer then corrects loss and gradients by one factor. `scale` is the loss scale of float16
    training, else 1. The loss has the recipe's label smoothing and z-loss; while `is_plain` is set, which is for
    validation, it is the cross-entropy alone. Where the logits are large, or the recipe asks for it, `defer_head` makes
    the model's head leave its product to the loss, which then makes the logits of `chunk_tokens` tokens at a time.
    """

    def __init__(self, recipe: Recipe, tp: DeviceMesh | None, gpu_bytes: float | None = None) -> None:
        self.tokens = recipe.train.global_batch_size * recipe.train.seq_len
        self.scale = 1.0
        self.is_plain = False
        self._smoothing, self._z_loss = recipe.train.label_smoothing, recipe.train.z_loss
        self.chunk_tokens = tokens_at_a_time(
            recipe.train.loss_chunk_tokens,
            tokens=recipe.parallel.microbatch_size * recipe.train.seq_len,
            vocab=recipe.model.vocab,
            tp=recipe.parallel.tp,
            gpu_bytes=gpu_bytes,
        )  # None: the logits of a whole microbatch exist at once
        self._tp, self._vocab = Axis.of(tp), recipe.model.vocab
        self._head: VocabParallelHead | None = None
        self._columns: int | None = None  # the logits of this rank without those that a head has filled up; None: all

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        smoothing, z_loss = (0.0, 0.0) if self.is_plain else (self._smoothing, self._z_loss)
        if self._head is not None:
            assert self.chunk_tokens is not None
            losses = head_cross_entropy(
                output, labels, self._head, chunk_tokens=self.chunk_tokens, label_smoothing=smoothing, z_loss=z_loss
            )
        else:
            terms = TokenLoss(
                self._tp, self._vocab, label_smoothing=smoothing, z_loss=z_loss, chunk_tokens=self.chunk_tokens
            )
            losses = token_losses(output, labels, terms, overwrite_logits=True)
        return losses.sum() / (self.tokens / self.scale)

    def defer_head(self, modules: Iterable[nn.Module]) -> None:
        """Makes the head among `modules` leave its product to the loss, if chunks are wanted. A head with a bias, or
        whose output is gathered, still makes whole logits, and only the loss's own tensors come in chunks."""
        for head in (part for module in modules for part in module.modules() if isinstance(part, VocabParallelHead)):
            if not head.gather_output:
                self._columns = head.rows_each
                head.is_deferred = self.chunk_tokens is not None and head.bias is None
                self._head = head if head.is_deferred else None

    @torch.no_grad()
    def logits(self, output: Tensor) -> Tensor:
        """Returns this rank's logits [..., vocab / tp] for the last stage's output."""
        return (output if self._head is None else self._head.logits(output))[..., : self._columns]


@dataclass
class LossScaler:
    """The scale of the next step, and how many good steps in a row have had it."""

    config: LossScaleConfig
    scale: float
    good_steps: int = 0

    def update(self, *, is_finite: bool) -> None:
        """Sets the next step's scale; `is_finite` says whether this step's loss and gradients were finite."""
        self.good_steps = self.good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale *= self.config.backoff
        elif self.good_steps == self.config.interval:
            self.good_steps = 0
            if self.scale * self.config.growth <= LARGEST:
                self.scale *= self.config.growth
