"""What the two ends of the model keep and allocate: the embedding, and the last norm, the head and the loss
(`layers.vocabulary`, `layers.loss`, `training.loss`), for one microbatch on one tp rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.planner.memory.block_work import Changes, WeightGradients, Work, input_gradient, work_of
from parallel3d.planner.model.parameters import vocabulary_rows
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.training.loss_chunks import tokens_at_a_time


@dataclass(frozen=True, kw_only=True)
class EndTensors:
    """Bytes of the tensors at the ends; `hidden_local` and the like as in `BlockTensors`."""

    hidden_local: int
    hidden_full: int
    gathered: int
    copied: int
    item: int
    tokens: int
    rows: int  # rows of the vocabulary on this rank
    chunk: int | None  # tokens whose logits exist at a time; None: all
    norm: int  # what the last norm keeps, its output aside
    table: int  # numbers of the token table on this rank
    positions: int  # the gradient of learned positions; 0 without
    is_split: bool  # tp > 1
    steps_in_backward: bool

    @classmethod
    def of(cls, run: PlannedRun, *, norm_bytes: int) -> EndTensors:
        """`norm_bytes` are what a norm keeps of a token, its output included."""
        layout, shape, item = run.layout, run.shape, int(run.item_bytes)
        outside = run.tokens // (layout.tp if layout.sequence_parallel else 1)
        rows, full = vocabulary_rows(shape, layout.tp), item * run.tokens * shape.hidden
        is_gathered = layout.sequence_parallel and layout.tp > 1
        copied = full if is_gathered and layout.microbatch_size > 1 else 0
        chunk = tokens_at_a_time(run.optimizer.loss_chunk_tokens, tokens=run.tokens, vocab=shape.vocab, tp=layout.tp)
        return cls(
            hidden_local=item * outside * shape.hidden,
            hidden_full=full,
            gathered=full + copied if is_gathered else 0,
            copied=copied,
            item=item,
            tokens=run.tokens,
            rows=rows,
            chunk=chunk,
            norm=outside * norm_bytes - item * outside * shape.hidden,
            table=rows * shape.hidden,
            positions=item * shape.position_rows * shape.hidden if shape.positions == "learned" else 0,
            is_split=layout.tp > 1,
            steps_in_backward=run.optimizer.steps_in_backward,
        )

    @property
    def logits(self) -> int:
        """The logits of a microbatch between the head's forward and its backward."""
        return self.item * self.tokens * self.rows if self.chunk is None else 0

    @property
    def kept_by_embedding(self) -> int:
        """The ids as rows of this rank, and which of them are another rank's."""
        return 9 * self.tokens if self.is_split else 0

    @property
    def kept_by_head(self) -> int:
        """What the last norm and the loss keep, the logits aside."""
        is_gathered = self.chunk is not None and self.gathered  # it is kept in the place of the norm's output
        return self.norm + (self.hidden_full if is_gathered else self.hidden_local) + 4 * self.tokens


@lru_cache(maxsize=4096)
def head_forward(s: EndTensors) -> Work:
    """From the last block's output, which is there, to the logits; where they come in chunks, to the norm's output."""
    released = -s.hidden_full if s.gathered and s.chunk is None else 0
    return work_of([s.norm, s.gathered, -s.copied, s.logits, released])


def loss_forward(s: EndTensors) -> float:
    """The most from the last block's output, which is there, to the loss: float32 logits beside those of the head."""
    at_once = s.tokens if s.chunk is None else s.chunk
    narrow = s.item if s.chunk is not None and s.item < 4 else 0
    return head_forward(s).left + (4.0 + narrow) * at_once * s.rows


def loss_backward(s: EndTensors) -> float:
    """Returns the bytes of the softmax in float32, where the logits of a microbatch all exist in 16 bits."""
    return 4.0 * s.tokens * s.rows if s.chunk is None and s.item < 4 else 0.0


@lru_cache(maxsize=4096)
def head_backward(s: EndTensors, weights: WeightGradients, *, has_sum: bool) -> float:
    """The most from the gradient of the logits, which is where they were, or from the loss in chunks, to the gradient
    of the last block's output. `has_sum`: there is a float32 gradient of the table that can be added to."""
    table, local = s.item * s.table, s.hidden_local
    if s.chunk is None:
        made: Changes = [table] if weights in ("kept", "given") else [table, -table] if weights == "dropped" else []
        changes = [*input_gradient(local, s.hidden_full, s.gathered, s.copied), *made]
        if weights != "later":
            changes.append(-s.logits - (s.hidden_full if s.gathered else 0))
        changes.append(-s.hidden_full if s.gathered else 0)
        if weights == "given":
            changes.append(-table)
    else:
        logits = s.chunk * s.rows
        at_once = [(2 * s.item + 4) * logits, 2 * s.item * logits + table] if s.item < 4 else [s.item * logits]
        changes = [s.hidden_full, 0 if has_sum else 4 * s.table]
        for bytes_ in at_once:
            changes += [bytes_, -bytes_]
        if not has_sum and s.item < 4:  # the sum is rounded to what the head computes in
            changes += [table, -4 * s.table - (0 if weights in ("kept", "given") else table)]
        changes.append(-s.hidden_full if s.gathered else -local)  # the input goes before its gradient is summed
        if s.gathered:
            changes += [s.copied + local, -s.copied, -s.hidden_full]
    keeps_output = weights == "later" and s.chunk is None and not s.gathered
    return work_of([*changes, local * keeps_output, local]).peak


@lru_cache(maxsize=4096)
def embedding_backward(s: EndTensors, weights: WeightGradients) -> float:
    """The most from the gradient of the embedding's output, which is there, to the gradient of its table."""
    table, wide = s.item * s.table, 4 * s.hidden_full // s.item
    changes: Changes = [s.positions if weights in ("kept", "given") else 0]
    changes += [-s.positions if weights == "given" else 0, s.gathered, -s.copied]
    if s.is_split:
        changes += [s.hidden_full, -s.hidden_full if s.gathered else 0]  # without other ranks' rows
    if s.steps_in_backward and s.item < 4:  # the table's gradient is added up in float32
        changes += [4 * s.table, wide, -wide, table]
    elif weights in ("kept", "given"):
        changes.append(table)
    else:
        changes.append(wide if s.item < 4 else 0)
    return work_of(changes).peak
