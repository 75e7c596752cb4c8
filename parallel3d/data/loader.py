"""Batches of a token stream: its windows in the order of `order.py`, cut into each rank's microbatches. A window is
seq_len + 1 tokens at stride seq_len: the inputs and, one token later, the labels."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from einops import rearrange
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from parallel3d.config.recipe import BatchSizes
from parallel3d.data.corpus import TokenIds
from parallel3d.data.order import window_order
from parallel3d.errors import ConfigError, DataError

IGNORED = -100  # the label of a token that is not learned, as in torch's cross-entropy


@dataclass(frozen=True, eq=False)
class Batch:
    """One dp rank's share of a global batch, on the CPU."""

    inputs: Tensor  # int64 [microbatches, microbatch_size, seq]
    labels: Tensor  # int64 [microbatches, microbatch_size, seq]: the token after each input; IGNORED: none is learned
    samples: Tensor  # int64 [microbatches, microbatch_size]: each sequence's number in the whole run

    def pinned(self) -> Batch:
        """Returns the batch in pinned memory, from which it is copied to a GPU while the host goes on."""
        return Batch(self.inputs.pin_memory(), self.labels.pin_memory(), self.samples)


@dataclass(frozen=True, eq=False)
class BatchLoader:
    """Gives dp rank `dp_rank` its share of any step's global batch, shuffled by `seed` (None: in order).

    A step's samples follow those of the steps before it: they begin at step * global_batch_size, or earlier where the
    batch warms up. Rank r has the r-th of `dp_size` equal runs of them, so the global batch has the same sequences
    whatever the layout. Past the last window the samples go on with the next epoch. Labels among `ignored_ids` are not
    learned. Raises DataError where `tokens` are fewer than one window, ConfigError where the batch does not divide.
    """

    tokens: TokenIds
    _: KW_ONLY
    seq_len: int
    global_batch_size: int
    microbatch_size: int
    dp_rank: int
    dp_size: int
    vocab: int
    seed: int | None
    sizes: BatchSizes | None = None  # the global batch's sizes where it warms up
    ignored_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"dp_rank = {self.dp_rank}: must lie in 0 to {self.dp_size - 1}")
        unit = self.dp_size * self.microbatch_size
        if self.global_batch_size < 1 or self.global_batch_size % unit:
            would_do = max(-(-self.global_batch_size // unit), 1) * unit
            raise ConfigError(
                f"train.global_batch_size = {self.global_batch_size}: must be a multiple of dp = {self.dp_size} times "
                f"parallel.microbatch_size = {self.microbatch_size}; try {would_do}"
            )
        if self.windows < 1:
            raise DataError(
                f"the corpus has {len(self.tokens)} tokens, fewer than train.seq_len + 1 = {self.seq_len + 1}; "
                "try a smaller train.seq_len or more text"
            )

    @property
    def windows(self) -> int:
        """The number of sequences in one epoch."""
        return (len(self.tokens) - 1) // self.seq_len

    def batch(self, step: int) -> Batch:
        """Returns this rank's share of the global batch of `step`, which counts from 0. Raises DataError for an id
        beyond `vocab`."""
        sizes = self.sizes or BatchSizes(full=self.global_batch_size, start=self.global_batch_size)
        first = sizes.before(step)
        samples = np.arange(first, first + sizes.at(step), dtype=np.int64)
        every_window = sliding_window_view(self.tokens, self.seq_len + 1)[:: self.seq_len]  # a view: nothing is copied
        drawn = every_window[window_order(samples, windows=self.windows, seed=self.seed)]  # [global_batch, seq + 1]
        # The whole global batch is checked, so that all ranks stop at once, with one message, and no rank hangs.
        if drawn.max() >= self.vocab or drawn.min() < 0:
            row, column = np.argwhere((drawn >= self.vocab) | (drawn < 0))[0]
            raise DataError(
                f"token id {drawn[row, column]} at sample {first + row}: model.vocab = {self.vocab} has ids 0 to "
                f"{self.vocab - 1}; try model.vocab={drawn.max() + 1} or more, or the data of this model's tokenizer"
            )
        by_rank = rearrange(drawn, "(rank m b) s -> rank m b s", rank=self.dp_size, b=self.microbatch_size)
        tokens = torch.from_numpy(by_rank[self.dp_rank].astype(np.int64))
        inputs, labels = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        if self.ignored_ids:
            labels.masked_fill_(torch.isin(labels, torch.tensor(self.ignored_ids)), IGNORED)
        own = torch.from_numpy(samples).view(self.dp_size, -1, self.microbatch_size)[self.dp_rank]
        return Batch(inputs, labels, own)


def batches_ahead(loader: BatchLoader, steps: range, device: torch.device) -> Generator[Batch, None, None]:
    """Yields the batches of `steps` in their order, each made by a thread while the caller has the one before; for a
    GPU they are in pinned memory. No batch is made further ahead. An error of the loader is raised when its batch is
    asked for. The thread ends with the generator, so close the generator where you may leave it early."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="next_batch") as thread:
        coming: Future[Batch] | None = None
        for step in steps:
            batch = (coming or thread.submit(loader.batch, step)).result()
            coming = thread.submit(loader.batch, step + 1) if step + 1 in steps else None
            # Pinned by the caller's thread, because CUDA may wait for the whole device to give pinned memory, which it
            # must not do in the middle of a pipeline's step.
            yield batch.pinned() if device.type == "cuda" else batch
