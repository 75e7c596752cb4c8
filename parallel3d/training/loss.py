"""The loss that the trainer differentiates: a microbatch's share of the mean over the global
batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parallel3d.config.recipe import Recipe
from parallel3d.errors import ConfigError
from parallel3d.layers.loss import TokenLoss, token_losses
from parallel3d.layers.vocabulary import VocabParallelHead, head_at_end, head_cross_entropy
from parallel3d.mesh import ONE_RANK, Axis
from parallel3d.shard_sizes import largest_shard
from parallel3d.training.loss_chunks import tokens_at_a_time


class MeanLoss:
    """(output of the last stage, labels) -> sum of the tokens' losses * scale / tokens.

    `tokens` is the nominal number of tokens of the recipe's whole batch; how many of them have a
    label is known only after the step, and the trainer then corrects loss and gradients by one
    factor. `scale` is the loss scale of float16 training, else 1. The loss has the recipe's
    z-loss; while `is_plain` is set, which is for validation, it is the cross-entropy
    alone. If the logits are large, or the recipe asks for it, `use_head` makes the head of the
    model leave its matmul to the loss, which then computes the logits of `chunk_tokens` tokens at a
    time. A model that may change the output of its head computes all logits; only the temporaries
    of the loss come in chunks. Each tp rank may have all logits or its part of them; a model that
    returns another number raises ConfigError.
    """

    def __init__(self, recipe: Recipe, tp: Axis, gpu_bytes: float | None = None) -> None:
        self.tokens = recipe.train.global_batch_size * recipe.train.seq_len
        self.scale = 1.0
        self.is_plain = False
        self.chunk_tokens = tokens_at_a_time(
            recipe.train.loss_chunk_tokens,
            tokens=recipe.parallel.microbatch_size * recipe.train.seq_len,
            vocab=recipe.model.vocab,
            tp=recipe.parallel.tp,
            gpu_bytes=gpu_bytes,
        )  # None: the logits of a whole microbatch exist at once
        self._tp = tp
        self._recipe = recipe
        self._vocab = recipe.model.vocab
        # the head whose output reaches the loss unchanged
        self._head: VocabParallelHead | None = None
        # the head that gives each tp rank its part of the vocabulary
        self._split_head: VocabParallelHead | None = None

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        z_loss = 0.0 if self.is_plain else self._recipe.train.z_loss
        if self._head is not None and self._head.is_deferred:
            assert self.chunk_tokens is not None
            losses = head_cross_entropy(
                output, labels, self._head, chunk_tokens=self.chunk_tokens, z_loss=z_loss
            )
        else:
            axis = self._tp if self._is_split(output) else ONE_RANK
            # the model may have changed the -inf that a head fills up its logits with
            if self._head is None:
                output = output[..., : len(axis.rows(self._vocab))]
            terms = TokenLoss(axis, self._vocab, z_loss=z_loss, chunk_tokens=self.chunk_tokens)
            # No operation has saved logits that come straight from the head.
            losses = token_losses(output, labels, terms, overwrite_logits=self._head is not None)
        return losses.sum() / (self.tokens / self.scale)

    def use_head(self, modules: Iterable[nn.Module]) -> None:
        """Finds the head among the stages `modules`, and defers it if chunks are wanted and the
        loss receives its output unchanged. May be called again."""
        for module in modules:
            for part in module.modules():
                if isinstance(part, VocabParallelHead) and part.out_features == self._vocab:
                    self._split_head = part
            self._head = head_at_end(module) or self._head
        if self._head is not None and self._head is self._split_head:
            self._head.is_deferred = self.chunk_tokens is not None

    @torch.no_grad()
    def logits(self, output: Tensor) -> Tensor:
        """Returns this rank's logits [..., vocab / tp] for the last stage's output, or all of them
        if the model gathers them."""
        if self._head is not None and self._head.is_deferred:
            output = self._head.logits(output)
        if self._is_split(output):
            output = output[..., : largest_shard(self._vocab, self._tp.size)]
        return output

    def _is_split(self, logits: Tensor) -> bool:
        """Returns False if each tp rank has the logits of the full vocabulary."""
        largest = largest_shard(self._vocab, self._tp.size)
        width = logits.shape[-1]
        is_padded = self._split_head is not None and width == self._split_head.padded_width
        is_split = width == largest or is_padded
        if not is_split and width != self._vocab:
            raise ConfigError(
                f"model.architecture = {self._recipe.model.architecture}: each tp rank gets "
                f"{width} logits for a token; with model.vocab = {self._vocab} and parallel.tp = "
                f"{self._tp.size} it must get {largest}, or all {self._vocab}; try the head "
                "VocabParallelHead(config.hidden, config.vocab, tp=placement)"
            )
        return is_split
