"""Loads batches: draws the sequences of a step from a window source, and divides them among
data-parallel ranks and microbatches."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from math import ceil, inf

import numpy as np
import torch
from torch import Tensor

from parallel3d.config.recipe import BatchSizes
from parallel3d.data.order import SkippedRanges
from parallel3d.data.windows import WindowSource
from parallel3d.errors import ConfigError
from parallel3d.layers.positions import PackedDocuments

IGNORED = -100  # Label that the loss ignores, as in torch's cross_entropy.
# Document boundaries of each microbatch, or None if attention crosses documents.
Documents = Sequence[PackedDocuments] | None


@dataclass(frozen=True, order=True)
class WrongId:
    """A token ID outside the model's vocabulary."""

    sample: int  # Index of the sample that contains the ID.
    token_id: int
    largest_id: int  # Largest token ID in this rank's share of the batch.


@dataclass(frozen=True, eq=False)
class Batch:
    """One data-parallel rank's share of a global batch, on the CPU."""

    inputs: Tensor  # int64 [microbatches, microbatch_size, seq]
    # int64 [microbatches, microbatch_size, seq]: the token after each input, or IGNORED
    labels: Tensor
    # int64 [microbatches, microbatch_size]: sample index of each sequence
    samples: Tensor
    # First invalid token ID in the share, or None. Invalid IDs are replaced by 0, and the trainer
    # ends the run.
    wrong_id: WrongId | None = None
    documents: Documents = None  # None unless data.documents = mask.

    def pinned(self) -> Batch:
        """Returns the batch in pinned memory, so that copies to a GPU are asynchronous. `samples`
        stays pageable."""
        documents = self.documents and [each.moved(Tensor.pin_memory) for each in self.documents]
        return replace(
            self,
            inputs=self.inputs.pin_memory(),
            labels=self.labels.pin_memory(),
            documents=documents,
        )


@dataclass(frozen=True, eq=False)
class BatchLoader:
    """Loads the share of data-parallel rank `dp_rank` of any global batch. Reads only the sequences
    of this share from `source`.

    The sequences of a step follow those of the step before. Sequence i of the run is sample i, or a
    later one if it skips samples before it. Rank r gets the r-th of `dp_size` equal ranges
    of a step's sequences, so the global batch is the same in every layout.

    Args:
        source: Windows to draw from.
        global_batch_size: Number of sequences in a global batch.
        microbatch_size: Number of sequences in a microbatch.
        dp_rank: Index of this data-parallel rank.
        dp_size: Number of data-parallel ranks.
        vocab: Vocabulary size of the model.
        sizes: Global batch sizes of a batch warmup. Default: `global_batch_size` in every step.
        skipped: Samples that the run does not use.
        ignored_ids: Token IDs that the loss ignores as labels.
        stop: Number of samples. Later samples only pad the last batch: their labels are ignored.
        document_end: Token ID that ends a document, or None if attention crosses documents.

    Raises:
        ConfigError: `global_batch_size` is not a positive multiple of `dp_size * microbatch_size`.
    """

    source: WindowSource
    _: KW_ONLY
    global_batch_size: int
    microbatch_size: int
    dp_rank: int
    dp_size: int
    vocab: int
    sizes: BatchSizes | None = None
    skipped: SkippedRanges = SkippedRanges()
    ignored_ids: tuple[int, ...] = ()
    stop: float = inf
    document_end: int | None = None

    def __post_init__(self) -> None:
        unit = self.dp_size * self.microbatch_size
        if self.global_batch_size < 1 or self.global_batch_size % unit:
            would_do = max(ceil(self.global_batch_size / unit), 1) * unit
            raise ConfigError(
                f"train.global_batch_size = {self.global_batch_size}: must be a multiple of "
                f"{self.dp_size} data-parallel ranks x parallel.microbatch_size "
                f"{self.microbatch_size}; try {would_do}"
            )

    def evaluating(
        self, source: WindowSource, global_batch_size: int, *, stop: float = inf
    ) -> BatchLoader:
        """Returns a loader for evaluation in this layout, without batch warmup or skips."""
        return replace(
            self,
            source=source,
            global_batch_size=global_batch_size,
            sizes=None,
            skipped=SkippedRanges(),
            stop=stop,
        )

    def batch(self, step: int) -> Batch:
        """Returns this rank's share of the global batch of `step`. Steps count from 0."""
        sizes = self.sizes or BatchSizes(full=self.global_batch_size, start=self.global_batch_size)
        share = sizes.at(step) // self.dp_size
        first = sizes.before(step) + self.dp_rank * share
        samples = self.skipped.samples(np.arange(first, first + share))
        is_beyond = samples >= self.stop
        drawn = self.source.draw(np.where(is_beyond, 0, samples))  # [share, seq + 1]
        wrong_id = None
        largest = int(np.max(drawn))
        if largest >= self.vocab or np.min(drawn) < 0:
            is_wrong = (drawn >= self.vocab) | (drawn < 0)
            row, column = np.argwhere(is_wrong)[0]
            wrong_id = WrongId(int(samples[row]), int(drawn[row, column]), largest)
            drawn = np.where(is_wrong, 0, drawn)
        ids = torch.from_numpy(drawn.astype(np.int64))
        # contiguous() would not copy the slices of a single sequence. They would share memory.
        inputs = ids[:, :-1].clone(memory_format=torch.contiguous_format)
        labels = ids[:, 1:].clone(memory_format=torch.contiguous_format)
        labels[torch.from_numpy(is_beyond)] = IGNORED
        if self.ignored_ids:
            labels[torch.isin(labels, torch.tensor(self.ignored_ids))] = IGNORED
        microbatches = (-1, self.microbatch_size)
        inputs = inputs.unflatten(0, microbatches)
        return Batch(
            inputs,
            labels.unflatten(0, microbatches),
            torch.from_numpy(samples).unflatten(0, microbatches),
            wrong_id,
            documents_ended_by(self.document_end, inputs),
        )


def documents_ended_by(end_of_text: int | None, ids: Tensor) -> Documents:
    """Returns the document boundaries of each microbatch of `ids` [microbatches, batch, seq], where
    `end_of_text` ends a document. Returns None if `end_of_text` is None."""
    if end_of_text is None:
        return None
    return [PackedDocuments.ended_by(end_of_text, each) for each in ids]


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """An evaluation set in global batches of equal size, and this data-parallel rank's shares."""

    name: str
    loader: BatchLoader
    steps: int = 1  # Number of batches.

    @classmethod
    def build(
        cls, name: str, like: BatchLoader, source: WindowSource, sequences: int | None
    ) -> EvaluationSet:
        """Builds a set from the first `sequences` of `source`, or from all if it is None.

        It has the data-parallel layout of the loader `like`, and its global batches are at most as
        large. The last batch is padded with sequences whose labels are ignored."""
        wanted = source.windows if sequences is None else sequences
        steps = ceil(wanted / like.global_batch_size)
        unit = like.dp_size * like.microbatch_size
        size = ceil(wanted / (steps * unit)) * unit
        return cls(name, like.evaluating(source, size, stop=wanted), steps)

    @property
    def batches(self) -> Iterator[Batch]:
        """Batches of this data-parallel rank, loaded one by one."""
        return (self.loader.batch(step) for step in range(self.steps))


def batches_ahead(
    loader: BatchLoader, steps: range, device: torch.device
) -> Generator[Batch, None, None]:
    """Yields the batches of `steps` in order, and loads the next one in a thread.

    If `device` is a GPU, batches are in pinned memory. An error in the thread is raised when its
    batch is requested. Close the generator if you do not exhaust it, so that the thread ends."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="next_batch") as thread:
        coming: Future[Batch] | None = None
        for step in steps:
            batch = (coming or thread.submit(loader.batch, step)).result()
            coming = thread.submit(loader.batch, step + 1) if step + 1 in steps else None
            # Pin here, not in the thread. Allocating pinned memory may make CUDA wait for the GPU,
            # which must not happen during a pipeline step.
            if device.type == "cuda":
                batch = batch.pinned()
            yield batch
