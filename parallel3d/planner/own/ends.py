"""What the two ends of the model keep and make for themselves: the embedding, and the head with the loss
(`layers.head`, `layers.loss`, `training.loss`). One microbatch on one tp rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from parallel3d.planner.model.parameters import vocabulary_rows
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.own.work import Tape, Weights, Work, input_backward
from parallel3d.training.loss_chunks import tokens_at_a_time


@dataclass(frozen=True)
class EndSizes:
    """Bytes of the tensors at the ends; b and w as in `own/work`."""

    b: int
    w: int
    item: int
    tokens: int
    rows: int  # of the vocabulary, on this rank
    chunk: int | None  # tokens whose logits exist at a time; None: all
    table: int  # numbers of the token table on this rank
    norm: int  # what the last norm keeps of its forward beside its output
    gathers: bool
    copies: bool
    is_split: bool  # tp > 1
    positions: int  # bytes of the gradient of learned positions; 0 without
    widens: bool  # the table's gradient is added up in float32

    @classmethod
    def of(cls, run: PlannedRun, *, norm_bytes: int) -> EndSizes:
        """`norm_bytes`: what a norm keeps of a token, its output included."""
        layout, shape, item = run.layout, run.shape, int(run.item_bytes)
        outside = run.tokens // (layout.tp if layout.sequence_parallel else 1)
        rows = vocabulary_rows(shape, layout.tp)
        learned = shape.positions == "learned"
        return cls(
            b=item * outside * shape.hidden,
            w=item * run.tokens * shape.hidden,
            item=item,
            tokens=run.tokens,
            rows=rows,
            chunk=tokens_at_a_time(run.loss_chunk_tokens, tokens=run.tokens, vocab=shape.vocab, tp=layout.tp),
            table=rows * shape.hidden,
            norm=outside * norm_bytes - item * outside * shape.hidden,
            gathers=layout.sequence_parallel and layout.tp > 1,
            copies=layout.sequence_parallel and layout.tp > 1 and layout.microbatch_size > 1,
            is_split=layout.tp > 1,
            positions=item * shape.position_rows * shape.hidden if learned else 0,
            widens=run.steps_in_backward and item < 4,
        )

    @property
    def logits(self) -> int:
        """Of a microbatch, between the head's forward and its backward."""
        return self.item * self.tokens * self.rows if self.chunk is None else 0

    @property
    def kept_by_embedding(self) -> int:
        """Ids as rows of this rank, and which are another's."""
        return 9 * self.tokens if self.is_split else 0

    @property
    def kept_by_head(self) -> int:
        """But for logits: the norm, and of the loss a number a token."""
        is_gathered = self.chunk is not None and self.gathers  # instead of the norm's output
        return self.norm + (self.w if is_gathered else self.b) + 4 * self.tokens


@lru_cache(maxsize=4096)
def head_forward(s: EndSizes) -> Work:
    """From the last block's output, which is there, to the logits, or where they come in chunks to the norm's output
    (gathered)."""
    tape = Tape()
    tape.make(s.norm)
    if s.gathers:
        tape.make(s.w, s.copies * s.w)
        tape.drop(s.copies * s.w)
    tape.make(s.logits)
    tape.drop(s.w if s.gathers and s.chunk is None else 0)
    return Work(tape.peak, tape.now)


@lru_cache(maxsize=4096)
def loss_forward(s: EndSizes) -> float:
    """The most from there to the loss, beside the last block's output."""
    at_once = s.tokens if s.chunk is None else s.chunk
    narrow = s.item if s.chunk is not None and s.item < 4 else 0
    return head_forward(s).left + (4.0 + narrow) * at_once * s.rows


@lru_cache(maxsize=4096)
def loss_backward(s: EndSizes) -> float:
    """The most that the loss makes, of logits that all exist: the softmax in float32, in 16 bits beside them."""
    return 4.0 * s.tokens * s.rows if s.chunk is None and s.item < 4 else 0.0


@lru_cache(maxsize=4096)
def head_backward(s: EndSizes, weights: Weights, *, has_total: bool, opens: float = 0.0, step: float = 0.0) -> Work:
    """From the gradient of the logits, which is where they were, or the loss in chunks, to the gradient of the last
    block's output. `has_total`: a float32 gradient of the table is there and can be added to; `opens`, `step`: see
    `Tape`."""
    tape = Tape(opens=opens, step=step)
    table = s.item * s.table
    if s.chunk is None:
        input_backward(tape, gathers=s.gathers, whole=s.w, own=s.b, copies=s.copies)
        if weights in ("kept", "given"):
            tape.make(table)
        elif weights == "dropped":
            tape.touch(table)
        if weights != "later":
            tape.drop(s.logits)
            tape.drop(s.w if s.gathers else 0)
        if weights == "given":
            tape.give(table)
        if s.gathers:
            tape.drop(s.w)
    else:
        tape.make(s.w)
        if not has_total:
            tape.make(4 * s.table)
        logits = s.chunk * s.rows
        if s.item < 4:
            tape.touch((2 * s.item + 4) * logits)
            tape.touch(2 * s.item * logits + table)
        else:
            tape.touch(s.item * logits)
        if not has_total and s.item < 4:  # rounded to what the head computes in
            tape.make(table)
            tape.drop(4 * s.table, 0 if weights in ("kept", "given") else table)
        tape.drop(s.w if s.gathers else s.b)  # the input, before its gradient is summed
        if weights == "given":
            tape.give(table)
        if s.gathers:
            tape.touch(s.copies * s.w + s.b)
            tape.make(s.b)
            tape.drop(s.w)
    # The last norm.
    if weights == "later" and s.chunk is None and not s.gathers:
        tape.make(s.b)  # its output stays for the second half
    tape.make(s.b)
    tape.drop(s.norm, 2 * s.b if s.chunk is None else s.b)
    return Work(tape.peak, tape.now)


@lru_cache(maxsize=4096)
def embedding_backward(s: EndSizes, weights: Weights, *, opens: float = 0.0, step: float = 0.0) -> Work:
    """From the gradient of its output, which is there, to the table's, which `left` has where it is kept. `opens`,
    `step`: see `Tape`."""
    tape = Tape(opens=opens, step=step)
    if s.positions and weights == "kept":
        tape.make(s.positions)
    elif s.positions and weights == "given":
        tape.make(s.positions)
        tape.give(s.positions)
    if s.gathers:
        tape.make(s.w, s.copies * s.w)
        tape.drop(s.copies * s.w)
    if s.is_split:
        tape.make(s.w)  # with nothing of other ranks' rows
        tape.drop(s.w if s.gathers else 0)
    if s.widens:
        tape.make(4 * s.table)
        tape.touch(4 * s.w // s.item)
        tape.make(s.item * s.table)
        tape.drop(4 * s.table)
    elif weights in ("kept", "given"):
        tape.make(s.item * s.table)
    else:
        tape.touch(4 * s.w // s.item if s.item < 4 else 0)
    if weights == "given":
        tape.give(s.item * s.table)
    tape.drop(s.w if s.is_split else 0, s.b, s.kept_by_embedding)
    return Work(tape.peak, tape.now)
