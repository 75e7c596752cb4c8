"""What a block makes for itself while it computes: its forward and its backward played on a tape, tensor by tensor in
the order of `layers/`, which tells how many bytes are alive at most. One microbatch on one tp rank.

Tensors: b what blocks hand on [tokens, hidden] (a tp-th of the tokens with sequence parallelism), w that of all tokens,
f the MLP's inner features, a the query heads, g the keys (or values).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from parallel3d.layers.activations import BlockActivations, BlockRecompute

# What a backward does with a product's gradient of its weight: keeps it until the block is done, adds it to a wider
# total and drops it, adds the product to a total as it is made, leaves it for the backward's second half, or gives it
# to autograd: when the product's function has ended, a step is made with it, or a copy, and it goes.
Weights = Literal["kept", "dropped", "in place", "later", "given"]


class Tape:
    """Bytes alive, beside what was there before, and their most. `opens`: what the first gradient that is given has
    made for it and others; `step`: what a step with a gradient makes, for each of its bytes."""

    def __init__(self, *, opens: float = 0.0, step: float = 0.0) -> None:
        self.now = self.peak = 0.0
        self._opens, self._step = opens, step

    def make(self, *tensors: float) -> None:
        self.now += sum(tensors)
        self.peak = max(self.peak, self.now)

    def drop(self, *tensors: float) -> None:
        self.now -= sum(tensors)

    def touch(self, *tensors: float) -> None:
        """Made and dropped."""
        self.make(*tensors)
        self.drop(*tensors)

    def open(self) -> None:
        self.make(self._opens)
        self._opens = 0.0

    def give(self, gradient: float) -> None:
        """One that is there goes."""
        self.open()
        self.touch(self._step * gradient)
        self.drop(gradient)


@dataclass(frozen=True)
class Work:
    """Bytes at the most and at the end, beside what there was at the start."""

    peak: float
    left: float


@dataclass(frozen=True)
class BlockSizes:
    """Bytes of a block's tensors."""

    b: int
    w: int
    f: int
    a: int
    g: int
    softmax: int  # what attention's kernel keeps beside its output
    norm: int  # what a norm keeps of its forward beside its output
    is_gated: bool
    gathers: bool  # sequence parallelism
    copies: bool  # what is gathered along the sequence is copied into its order: not of one sequence
    wq: int  # bytes of gradients as products make them
    wk: int
    wo: int
    w_up: int
    w_down: int
    adds_bias: bool  # after a row-parallel product
    mask: int  # of dropout between the layers; 0 without
    counters: int  # of the numbers that such a mask is made of
    scores: int  # of attention's probabilities, where it has a dropout of its own, each number in 16 or 32 bits
    kept: int  # between forward and backward, nothing recomputed
    plain: bool  # products are torch's own

    @classmethod
    def of(cls, block: BlockActivations, *, kv_weight: int, biases: bool, plain: bool = False) -> BlockSizes:
        """`kv_weight`: numbers of the keys' weight on this rank."""
        item, tp, hidden = block.item_bytes, block.tp, block.hidden
        tokens = block.batch * block.seq
        outside = tokens // tp if block.sequence_parallel else tokens
        dim = block.head_dim or hidden // block.heads
        heads, keys = block.heads // tp * dim, max(block.kv_heads // tp, 1) * dim
        inner, wide = block.ffn_hidden // tp, max(item, 4)
        attends = tokens * block.heads // tp * wide
        return cls(
            b=item * outside * hidden,
            w=item * tokens * hidden,
            f=item * tokens * inner,
            a=item * tokens * heads,
            g=item * tokens * keys,
            softmax=attends,
            norm=outside * block.norm_bytes - item * outside * hidden,
            is_gated=block.gated,
            gathers=block.sequence_parallel and tp > 1,
            copies=block.sequence_parallel and tp > 1 and block.batch > 1,
            wq=item * hidden * heads,
            wk=item * kv_weight,
            wo=item * hidden * heads,
            w_up=item * hidden * inner,
            w_down=item * hidden * inner,
            adds_bias=biases,
            mask=outside * hidden if block.dropout else 0,
            counters=8 * outside * hidden if block.dropout else 0,
            scores=tokens * block.seq * block.heads // tp if block.attention_dropout else 0,
            kept=block.bytes(),
            plain=plain,
        )

    @property
    def products(self) -> int:
        """Gradients of all the weights of products."""
        return self.wq + 2 * self.wk + self.wo + (1 + self.is_gated) * self.w_up + self.w_down


@lru_cache(maxsize=4096)
def forward_work(sizes: BlockSizes, recompute: BlockRecompute) -> Work:
    """From its input, which is there, to its output, which `left` has beside what is kept."""
    tape = Tape()
    _forward(tape, sizes, keeps=recompute != "full", keeps_softmax=recompute == "none")
    return Work(tape.peak, tape.now)


@lru_cache(maxsize=4096)
def backward_work(
    sizes: BlockSizes,
    recompute: BlockRecompute,
    weights: Weights,
    *,
    is_received: bool = False,
    opens: float = 0.0,
    step: float = 0.0,
) -> Work:
    """From the gradient of its output, which is there, to that of its input, in the place of the other, or where
    another stage's backward has given it (`is_received`) beside it: the runtime has it to the end. `left` is less than
    nothing by what the forward has kept, and has the weights' gradients where they are kept. `opens`, `step`: see
    `Tape`."""
    tape, s = Tape(opens=opens, step=step), sizes
    is_replay = recompute == "full"
    if s.adds_bias and not s.plain and not s.mask:  # whose gradient is the first, and needs nothing that was kept
        tape.open()
    if is_replay:
        if s.mask:  # the last dropout scales its gradient before it asks for its mask
            tape.make(s.b)
        _forward(tape, s, keeps=True, keeps_softmax=True, is_replay=True)
    _mlp_backward(tape, s, weights, is_replay=is_replay)
    _norm_backward(tape, s, weights, keeps=is_received)
    if s.mask:
        _dropout_backward(tape, s)
    # The attention's kernel keeps its output, too, unless it is made again.
    again = recompute == "selective"
    _row_backward(tape, s, s.a, s.a if again else 0, s.wo, weights)
    if s.mask:
        tape.drop(s.b)
    tape.make(again * (s.a + s.softmax))
    tape.make(s.a, 2 * s.g)
    tape.drop(s.a, s.a, 2 * s.g, s.softmax)  # the gradient of the output; q, k and v
    tape.drop(s.a if again or weights != "later" else 0)
    tape.touch(2 * s.a)  # turned back
    _columns_backward(tape, s, [s.a, s.g, s.g], [s.wq, s.wk, s.wk], weights, is_replay=is_replay)
    _norm_backward(tape, s, weights)
    return Work(tape.peak, tape.now)


def put_off_bytes(sizes: BlockSizes, recompute: BlockRecompute) -> float:
    """What is left of a block between the two halves of its backward."""
    kept = sizes.b if recompute == "full" else sizes.kept - (sizes.softmax if recompute == "selective" else 0)
    return backward_work(sizes, recompute, "later").left + kept


@lru_cache(maxsize=4096)
def weights_work(sizes: BlockSizes, weights: Weights) -> Work:
    """The second half of a backward, from what the first has put off: each product's gradient is made, and what it was
    made of goes."""
    tape, s = Tape(), sizes
    along = s.w if s.gathers else s.b
    _weight(tape, s.w_down, weights)
    tape.drop(s.f, along)
    for _ in range(1 + s.is_gated):
        _weight(tape, s.w_up, weights)
        tape.drop(s.f)
    tape.drop(along)
    _weight(tape, s.wo, weights)
    tape.drop(s.a, along)
    for weight, grad in ((s.wq, s.a), (s.wk, s.g), (s.wk, s.g)):
        _weight(tape, weight, weights)
        tape.drop(grad)
    tape.drop(along)
    return Work(tape.peak, tape.now)


def _forward(tape: Tape, s: BlockSizes, *, keeps: bool, keeps_softmax: bool, is_replay: bool = False) -> None:
    """`is_replay`: in a backward, which ends it with the last tensor that is kept."""
    norm = s.norm - s.b  # what is new of it: its input is there
    tape.make(norm + s.b)
    _gathered(tape, s)
    tape.make(s.a, 2 * s.g)
    _drop_gathered(tape, s)
    tape.touch(2 * s.a)
    tape.make(s.a, s.softmax)
    _row_forward(tape, s)
    _dropout_forward(tape, s)
    tape.make(s.b)
    tape.drop(s.b)
    if not keeps:
        tape.drop(norm + s.b, s.a, 2 * s.g, s.a, s.mask)
    if not keeps_softmax or not keeps:
        tape.drop(s.softmax)
    tape.make(norm + s.b)
    _gathered(tape, s)
    tape.make((1 + s.is_gated) * s.f)
    _drop_gathered(tape, s)
    tape.make(s.f)
    if s.is_gated:
        tape.make(s.f)
        if not keeps:
            tape.drop(s.f)
    if is_replay and not s.mask:
        tape.make(s.w)
        tape.touch(s.gathers * (s.copies * s.w + s.b))
        tape.drop(s.w)
        return
    _row_forward(tape, s)
    _dropout_forward(tape, s)
    if is_replay:  # the last mask is the last that is kept
        tape.drop(s.b)
        return
    tape.make(s.b)
    tape.drop(s.b)
    if not keeps:
        tape.drop(norm + s.b, (2 + s.is_gated) * s.f, s.b, s.mask)


def _mlp_backward(tape: Tape, s: BlockSizes, weights: Weights, *, is_replay: bool) -> None:
    if s.mask:
        _dropout_backward(tape, s, is_scaled=is_replay)
    _row_backward(tape, s, s.f, s.f, s.w_down, weights)
    if s.mask:
        tape.drop(s.b)
    if s.is_gated:
        tape.make(2 * s.f)  # of both factors
        tape.drop(s.f, 2 * s.f)  # of the product, and the factors
        tape.make(s.f)
        tape.drop(s.f, s.f)
        _columns_backward(tape, s, [s.f, s.f], [s.w_up, s.w_up], weights, is_replay=is_replay)
    else:
        tape.make(s.f)
        tape.drop(s.f, s.f)
        _columns_backward(tape, s, [s.f], [s.w_up], weights, is_replay=is_replay)


def _row_forward(tape: Tape, s: BlockSizes) -> None:
    tape.make(s.w)
    if s.gathers:
        tape.touch(s.copies * s.w + s.b)
        tape.drop(s.w)
        tape.make(s.b)
    if s.adds_bias:
        tape.make(s.b)
        tape.drop(s.b)


def _row_backward(tape: Tape, s: BlockSizes, features: int, kept: int, weight: int, weights: Weights) -> None:
    """`features`: of the input's gradient, `kept`: the input."""
    if s.gathers:
        _gathered(tape, s)
        tape.drop(s.copies * s.w)
    tape.make(features)
    _weight(tape, weight, weights)
    if weights != "later":
        tape.drop(kept)
        if s.gathers:
            tape.drop(s.w)
    if weights == "given":
        tape.give(weight)


def input_backward(tape: Tape, *, gathers: bool, whole: int, own: int, copies: int) -> None:
    """Of the input of a column-parallel product, `own` bytes here and `whole` over tp: gathered again where it lies
    along the sequence, then its gradient, which is summed and cut."""
    if gathers:
        tape.make(whole)
    tape.make(whole)
    if gathers:
        tape.make(copies * whole, own)
        tape.drop(copies * whole)  # what is sent is a copy
        tape.touch(copies * whole)  # and what has arrived is put in order


def _columns_backward(
    tape: Tape, s: BlockSizes, grads: list[int], kinds: list[int], weights: Weights, *, is_replay: bool
) -> None:
    """Of products of one input: their outputs' `grads`, of weights of `kinds` of bytes. What was made again for this
    backward goes as soon as it has been gathered; what the forward has kept, when the products are done."""
    if s.plain:
        _plain_columns_backward(tape, s, grads, kinds, weights)
        return
    input_backward(tape, gathers=s.gathers, whole=s.w, own=s.b, copies=s.copies)
    early = s.b if is_replay and s.gathers else 0  # the norm's output
    tape.drop(early)
    for weight in kinds:
        _weight(tape, weight, weights)
    if weights != "later":
        tape.drop(s.b - early, *grads)
        if s.gathers:
            tape.drop(s.w)
    elif s.gathers:
        tape.drop(s.b - early)  # and keeps it gathered
    if s.gathers:
        tape.drop(s.w)
    for weight in kinds:
        if weights == "given":
            tape.give(weight)


def _plain_columns_backward(tape: Tape, s: BlockSizes, grads: list[int], kinds: list[int], weights: Weights) -> None:
    """Each of the products by itself, the last first; the gradients of their input are added up."""
    is_first = True
    for grad, weight in zip(reversed(grads), reversed(kinds), strict=True):
        tape.make(s.b)
        _weight(tape, weight, weights)
        tape.drop(grad)
        if weights == "given":
            tape.give(weight)
        tape.drop(0 if is_first else s.b)
        is_first = False
    tape.drop(s.b)  # what the forward has kept


def _weight(tape: Tape, weight: int, weights: Weights) -> None:
    if weights in ("kept", "given"):
        tape.make(weight)
    elif weights == "dropped":
        tape.touch(weight)


def _norm_backward(tape: Tape, s: BlockSizes, weights: Weights, *, keeps: bool = False) -> None:
    """And adds its gradient to what passes by it, which a product that is put off has taken, too; `keeps`: or someone
    else."""
    tape.make(s.b)
    tape.drop(s.norm, s.b)
    tape.make(s.b)
    tape.drop(s.b, 0 if keeps or (weights == "later" and not s.gathers) else s.b)


def _dropout_forward(tape: Tape, s: BlockSizes) -> None:
    if s.mask:
        tape.touch(3 * s.counters)
        tape.make(s.mask, s.b)
        tape.make(s.b)
        tape.drop(2 * s.b)


def _dropout_backward(tape: Tape, s: BlockSizes, *, is_scaled: bool = False) -> None:
    tape.make(0 if is_scaled else s.b)
    tape.make(s.b)
    tape.drop(s.b, s.mask)


def _gathered(tape: Tape, s: BlockSizes) -> None:
    if s.gathers:
        tape.make(s.w, s.copies * s.w)


def _drop_gathered(tape: Tape, s: BlockSizes) -> None:
    if s.gathers:
        tape.drop(s.w, s.copies * s.w)
