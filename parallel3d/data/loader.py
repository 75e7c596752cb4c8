"""Batches: the sequences of a step, drawn from a window source and cut into the microbatches of
each data rank."""

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

IGNORED = -100  # the label of a token that is not learned, as in torch's cross-entropy
# of each microbatch; None: a token sees all before it in its sequence
Documents = Sequence[PackedDocuments] | None


@dataclass(frozen=True, order=True)
class WrongId:
    """A token id that the model's vocabulary has not."""

    sample: int
    token_id: int
    largest_id: int  # the largest one of the share that it is in


@dataclass(frozen=True, eq=False)
class Batch:
    """One dp rank's share of a global batch, on the CPU."""

    inputs: Tensor  # int64 [microbatches, microbatch_size, seq]
    # int64 [microbatches, microbatch_size, seq]: the token after each input; IGNORED: none is
    # learned
    labels: Tensor
    # int64 [microbatches, microbatch_size]: each sequence's number in the order of the whole run
    samples: Tensor
    # the first one of the share, in whose place is 0; the trainer ends the run by it
    wrong_id: WrongId | None = None
    documents: Documents = None  # with data.documents = mask alone

    def pinned(self) -> Batch:
        """Returns the batch in pinned memory, from which it is copied to a GPU while the host goes
        on."""
        documents = self.documents and [each.moved(Tensor.pin_memory) for each in self.documents]
        return replace(
            self,
            inputs=self.inputs.pin_memory(),
            labels=self.labels.pin_memory(),
            documents=documents,
        )


@dataclass(frozen=True, eq=False)
class BatchLoader:
    """Gives dp rank `dp_rank` its share of any step's global batch, and draws no other from
    `source`.

    A step's sequences follow those of the steps before it: they begin at step * global_batch_size,
    or earlier where the batch warms up. Sequence i of the run is sample i, or a later one where
    samples before it are `left_out`. Rank r has the r-th of `dp_size` equal runs of a step's
    sequences, so the global batch is the same whatever the layout. Labels among `ignored_ids` are
    not learned, nor are those of the samples from `stop` on. Raises ConfigError where the
    batch does not divide.
    """

    source: WindowSource
    _: KW_ONLY
    global_batch_size: int
    microbatch_size: int
    dp_rank: int
    dp_size: int
    vocab: int
    sizes: BatchSizes | None = None  # the global batch's sizes where it warms up
    left_out: SkippedRanges = SkippedRanges()
    ignored_ids: tuple[int, ...] = ()
    stop: float = inf  # samples that there are, where a last batch is to be filled up
    # the id that ends a document, if batches are to tell documents apart
    document_end: int | None = None

    def __post_init__(self) -> None:
        unit = self.dp_size * self.microbatch_size
        if self.global_batch_size < 1 or self.global_batch_size % unit:
            would_do = max(ceil(self.global_batch_size / unit), 1) * unit
            raise ConfigError(
                f"train.global_batch_size = {self.global_batch_size}: must be a multiple of dp = "
                f"{self.dp_size} times parallel.microbatch_size = {self.microbatch_size}; try "
                f"{would_do}"
            )

    def evaluating(
        self, source: WindowSource, global_batch_size: int, *, stop: float = inf
    ) -> BatchLoader:
        """Returns a loader of an evaluation's batches in the layout of this one."""
        return replace(
            self,
            source=source,
            global_batch_size=global_batch_size,
            sizes=None,
            left_out=SkippedRanges(),
            stop=stop,
        )

    def batch(self, step: int) -> Batch:
        """Returns this rank's share of the global batch of `step`, which counts from 0."""
        sizes = self.sizes or BatchSizes(full=self.global_batch_size, start=self.global_batch_size)
        share = sizes.at(step) // self.dp_size
        first = sizes.before(step) + self.dp_rank * share
        samples = self.left_out.samples(np.arange(first, first + share))
        is_beyond = samples >= self.stop
        drawn = self.source.draw(np.where(is_beyond, 0, samples))  # [share, seq + 1]
        wrong_id = None
        largest = int(drawn.max())
        if largest >= self.vocab or drawn.min() < 0:
            is_wrong = (drawn >= self.vocab) | (drawn < 0)
            row, column = np.argwhere(is_wrong)[0]
            wrong_id = WrongId(int(samples[row]), int(drawn[row, column]), largest)
            drawn = np.where(is_wrong, 0, drawn)
        ids = torch.from_numpy(drawn.astype(np.int64))
        # Copies: of a single sequence both slices are contiguous, and would share their memory.
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
    """Returns the documents that microbatches of ids [microbatches, batch, seq] are packed of, each
    ended by `end_of_text`; None where there is no such id."""
    if end_of_text is None:
        return None
    return [PackedDocuments.ended_by(end_of_text, each) for each in ids]


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """Some sequences on which a run is evaluated, as this data rank's shares of equally large
    global batches."""

    name: str
    loader: BatchLoader
    steps: int = 1  # batches

    @classmethod
    def build(
        cls, name: str, like: BatchLoader, source: WindowSource, sequences: int | None
    ) -> EvaluationSet:
        """Returns the first `sequences` of `source` (None: all) in batches for the layout of
        `like` that are no larger than its own. Sequences that only fill up the last batch have
        no labels."""
        wanted = source.windows if sequences is None else sequences
        steps = ceil(wanted / like.global_batch_size)
        unit = like.dp_size * like.microbatch_size
        size = ceil(wanted / (steps * unit)) * unit
        return cls(name, like.evaluating(source, size, stop=wanted), steps)

    @property
    def batches(self) -> Iterator[Batch]:
        """This data rank's batches, made one by one."""
        return (self.loader.batch(step) for step in range(self.steps))


def batches_ahead(
    loader: BatchLoader, steps: range, device: torch.device
) -> Generator[Batch, None, None]:
    """Yields the batches of `steps` in their order, each made by a thread while the caller has the
    one before; for a GPU they are in pinned memory. No batch is made further ahead. An error of the
    loader is raised when its batch is asked for. The thread ends with the generator, so close the
    generator where you may leave it early."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="next_batch") as thread:
        coming: Future[Batch] | None = None
        for step in steps:
            batch = (coming or thread.submit(loader.batch, step)).result()
            coming = thread.submit(loader.batch, step + 1) if step + 1 in steps else None
            # Pinned by the caller's thread, because CUDA may wait for the whole device to give
            # pinned memory, which it must not do in the middle of a pipeline's step.
            if device.type == "cuda":
                batch = batch.pinned()
            yield batch
