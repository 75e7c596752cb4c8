"""Loss of a microbatch: its share of the mean loss over the global batch."""

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
    """Loss of the trainer: sum of the token losses of a microbatch * scale / tokens.

    Call it with the output of the last stage and the labels. Each tensor-parallel rank may pass its
    shard of the logits or all of them. Any other number of logits raises ConfigError.

    `tokens` is the nominal number of tokens in the global batch. The number of non-ignored labels
    is known only after the step, when the trainer corrects loss and gradients by one factor.
    `scale` is the loss scale for float16, else 1. The loss includes the z-loss of the recipe. While
    `is_plain` is True, for validation, it is only the cross-entropy.

    For large logits, or if the recipe asks for it, `use_head` defers the matmul of the head to the
    loss. The loss then takes hidden states and computes the logits of `chunk_tokens` tokens at a
    time. A model that may change the output of its head computes all logits, and only the
    temporaries of the loss are chunked.
    """

    def __init__(self, recipe: Recipe, tp: Axis, gpu_bytes: float | None = None) -> None:
        self.tokens = recipe.train.global_batch_size * recipe.train.seq_len
        self.scale = 1.0
        self.is_plain = False
        self.chunk_tokens = tokens_at_a_time(
            recipe.train.loss_chunk_tokens,
            tokens=recipe.parallel.microbatch_size * recipe.own_seq_len,
            vocab=recipe.model.vocab,
            tp=recipe.parallel.tp,
            gpu_bytes=gpu_bytes,
        )  # None: all logits of a microbatch exist at once.
        self._tp = tp
        self._recipe = recipe
        self._vocab = recipe.model.vocab
        # Head whose output reaches the loss unchanged. None if there is no such head on this rank.
        self._head: VocabParallelHead | None = None
        # Head that gives each tensor-parallel rank a shard of the vocabulary.
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
            # The model may have changed the -inf with which a head pads its logits, so drop the
            # padding.
            if self._head is None:
                output = output[..., : len(axis.rows(self._vocab))]
            terms = TokenLoss(axis, self._vocab, z_loss=z_loss, chunk_tokens=self.chunk_tokens)
            # Logits that come straight from the head can be overwritten, because autograd has not
            # saved them.
            losses = token_losses(output, labels, terms, overwrite_logits=self._head is not None)
        return losses.sum() / (self.tokens / self.scale)

    def use_head(self, modules: Iterable[nn.Module]) -> None:
        """Finds the head among the modules of the stages. Can be called again.

        Defers the head's matmul if `chunk_tokens` is set and the loss gets its output unchanged.
        """
        for module in modules:
            for part in module.modules():
                if isinstance(part, VocabParallelHead) and part.out_features == self._vocab:
                    self._split_head = part
            self._head = head_at_end(module) or self._head
        if self._head is not None and self._head is self._split_head:
            self._head.is_deferred = self.chunk_tokens is not None

    @torch.no_grad()
    def logits(self, output: Tensor) -> Tensor:
        """Returns this rank's logits [..., vocab / tp], or [..., vocab] if they are gathered."""
        if self._head is not None and self._head.is_deferred:
            output = self._head.logits(output)
        if self._is_split(output):
            output = output[..., : largest_shard(self._vocab, self._tp.size)]
        return output

    def _is_split(self, logits: Tensor) -> bool:
        """Returns True for the width of a tensor-parallel shard, False for the full vocabulary.

        Raises ConfigError for any other width.
        """
        largest = largest_shard(self._vocab, self._tp.size)
        width = logits.shape[-1]
        is_padded = self._split_head is not None and width == self._split_head.padded_width
        is_split = width == largest or is_padded
        if not is_split and width != self._vocab:
            widths = " or ".join(f"{each}" for each in sorted({largest, self._vocab}))
            raise ConfigError(
                f"model.architecture = {self._recipe.model.architecture}: returns "
                f"{width} logits per token; with model.vocab = {self._vocab} and parallel.tp = "
                f"{self._tp.size} it must return {widths}; try the head "
                "VocabParallelHead(config.hidden, config.vocab, tp=placement)"
            )
        return is_split
