"""What a transformer block allocates while it computes: the most bytes alive in its forward and in both halves of its
backward, for one microbatch on one tp rank.

Each pass is a list of byte counts in the order of `layers/`: a positive number is a tensor that is made, a negative one
tensors that go. The bytes alive are the running sums of the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from parallel3d.config.recipe import BlockRecompute
from parallel3d.layers.activations import BlockActivations

# What a backward does with the gradient of a product's weight: it keeps it until the block is done, adds it to a wider
# sum and drops it, adds the product to the sum as it is made, leaves it for the second half of the backward, or gives
# it to autograd, whose hook takes it as soon as the product's function has ended.
WeightGradients = Literal["kept", "dropped", "in place", "later", "given"]
Changes = list[float]


class Work(NamedTuple):
    """Bytes at the most and at the end of a pass, beside what there was at its start."""

    peak: float
    left: float


def work_of(changes: Iterable[float]) -> Work:
    """Returns the largest and the last running sum."""
    alive = list(accumulate(changes, initial=0.0))
    return Work(max(alive), alive[-1])


@dataclass(frozen=True, kw_only=True)
class BlockTensors:
    """Bytes of a block's tensors on this rank."""

    hidden_local: int  # what blocks hand on, [tokens, hidden], over tp with sequence parallelism
    hidden_full: int  # the same for all tokens of the microbatch
    ffn: int  # the MLP's inner features
    queries: int
    keys: int  # as large as the values
    softmax: int  # what attention's kernel keeps beside its output
    norm: int  # what a norm keeps of its forward, its output aside
    gates: int  # 1 for an MLP with a gate, else 0
    gathered: int  # the whole sequence where sequence parallelism gathers it, and its copy in order
    copied: int  # that copy: made where a batch has several sequences
    bias: int  # made by adding a bias after a row-parallel product; 0 without
    mask: int  # of dropout between the layers; 0 without
    weights: tuple[int, ...]  # gradients of wq, wk, wv, wo, up (and gate), down as products make them
    kept: int  # between forward and backward where nothing is recomputed

    @classmethod
    def of(cls, block: BlockActivations, *, key_weight: int, biases: bool) -> BlockTensors:
        """`key_weight` counts the numbers of the keys' weight on this rank."""
        item, tp, hidden = block.item_bytes, block.tp, block.hidden
        tokens = block.batch * block.seq
        outside = tokens // tp if block.sequence_parallel else tokens
        dim = block.head_dim or hidden // block.heads
        heads, inner = block.heads // tp * dim, block.ffn_hidden // tp
        full = item * tokens * hidden
        copied = full if block.sequence_parallel and tp > 1 and block.batch > 1 else 0
        row, mlp = item * hidden * heads, item * hidden * inner
        return cls(
            hidden_local=item * outside * hidden,
            hidden_full=full,
            ffn=item * tokens * inner,
            queries=item * tokens * heads,
            keys=item * tokens * max(block.kv_heads // tp, 1) * dim,
            softmax=tokens * block.heads // tp * max(item, 4),
            norm=outside * block.norm_bytes - item * outside * hidden,
            gates=int(block.gated),
            gathered=full + copied if block.sequence_parallel and tp > 1 else 0,
            copied=copied,
            bias=item * outside * hidden * biases,
            mask=outside * hidden if block.dropout else 0,
            weights=(row, item * key_weight, item * key_weight, row, *(mlp,) * (2 + block.gated)),
            kept=block.bytes(),
        )

    @property
    def products(self) -> int:
        """Gradients of all weights of products."""
        return sum(self.weights)

    def kept_with(self, recompute: BlockRecompute) -> int:
        """What a block keeps between its forward and its backward."""
        if recompute == "full":
            return self.hidden_local
        return self.kept - (self.softmax if recompute == "selective" else 0)


@lru_cache(maxsize=4096)
def forward_work(block: BlockTensors, recompute: BlockRecompute) -> Work:
    """From the block's input, which is there, to its output, which `left` counts beside what is kept."""
    return work_of(_forward(block, keeps=recompute != "full", keeps_softmax=recompute == "none"))


@lru_cache(maxsize=4096)
def backward_work(
    block: BlockTensors, recompute: BlockRecompute, weights: WeightGradients, *, is_received: bool = False
) -> Work:
    """From the gradient of the block's output, which is there, to that of its input in its place; beside it where
    another stage has sent it (`is_received`), because the runtime keeps that to the end. `left` is negative by what the
    forward has kept, and has the gradients of the weights where they are kept."""
    s, local = block, block.hidden_local
    is_replay, again = recompute == "full", recompute == "selective"
    changes: Changes = []
    if is_replay:  # with dropout the gradient is scaled before the block's forward is computed again
        changes += [local * (s.mask > 0)]
        changes += _forward(s, keeps=True, keeps_softmax=True, is_replay=True)
    wq, wk, wv, wo, *ups, down = s.weights
    # The MLP: its second product, the activation, its first products, the norm.
    changes += _dropout_backward(s, is_scaled=is_replay)
    changes += [*_row_backward(s, s.ffn, s.ffn, down, weights), -local * (s.mask > 0)]
    changes += [2 * s.ffn, -3 * s.ffn, s.ffn, -2 * s.ffn] if s.gates else [s.ffn, -2 * s.ffn]
    changes += _columns_backward(s, s.ffn * (1 + s.gates), tuple(ups), weights, is_replay=is_replay)
    changes += _norm_backward(s, keeps=is_received or (weights == "later" and not s.gathered))
    # Attention: its output's product, the kernel, rotary positions turned back, the products of q, k and v, the norm.
    changes += _dropout_backward(s)
    changes += [*_row_backward(s, s.queries, s.queries * again, wo, weights), -local * (s.mask > 0)]
    qkv = s.queries + 2 * s.keys
    changes += [again * (s.queries + s.softmax), qkv, -s.queries - qkv - s.softmax]
    changes += [-s.queries if again or weights != "later" else 0, 2 * s.queries, -2 * s.queries]
    changes += _columns_backward(s, qkv, (wq, wk, wv), weights, is_replay=is_replay)
    changes += _norm_backward(s, keeps=weights == "later" and not s.gathered)
    return work_of(changes)


def delayed_bytes(block: BlockTensors, recompute: BlockRecompute) -> float:
    """What is left of a block between the two halves of a split backward: the factors of its products."""
    return backward_work(block, recompute, "later").left + block.kept_with(recompute)


@lru_cache(maxsize=4096)
def second_half_work(block: BlockTensors, weights: WeightGradients) -> Work:
    """The second half of a backward: each product's gradient is made, and its factors go."""
    s, along = block, block.hidden_full if block.gathered else block.hidden_local
    wq, wk, wv, wo, *ups, down = s.weights
    changes = [*_made(down, weights), -s.ffn - along]
    for up in ups:
        changes += [*_made(up, weights), -s.ffn]
    changes += [-along, *_made(wo, weights), -s.queries - along]
    for weight, gradient in ((wq, s.queries), (wk, s.keys), (wv, s.keys)):
        changes += [*_made(weight, weights), -gradient]
    return work_of([*changes, -along])


def _forward(s: BlockTensors, *, keeps: bool, keeps_softmax: bool, is_replay: bool = False) -> Changes:
    """`is_replay`: inside a backward, where the block's output is dropped at once."""
    local, normed = s.hidden_local, s.norm
    qkv = s.queries + 2 * s.keys
    changes: Changes = [normed, s.gathered, qkv, -s.gathered, 2 * s.queries, -2 * s.queries]
    changes += [s.queries + s.softmax, *_row_forward(s), local, -local]
    if not keeps:
        changes += [-normed - qkv - s.queries - s.mask]
    changes += [-s.softmax * (not keeps or not keeps_softmax), normed, s.gathered]
    changes += [(1 + s.gates) * s.ffn, -s.gathered, s.ffn, s.ffn * s.gates, -s.ffn * (s.gates and not keeps)]
    changes += _row_forward(s)
    if is_replay:
        return [*changes, -local]
    return [*changes, local, -local, 0 if keeps else -normed - (2 + s.gates) * s.ffn - local - s.mask]


def _row_forward(s: BlockTensors) -> Changes:
    """A row-parallel product, its bias and the dropout after it, which draws 24 bytes a number for its mask."""
    local = s.hidden_local
    reduced = [s.copied + local, -s.copied - s.hidden_full] if s.gathered else []
    dropped = [24 * s.mask, -24 * s.mask, s.mask + local, local, -2 * local] if s.mask else []
    return [s.hidden_full, *reduced, s.bias, -s.bias, *dropped]


def _made(weight: int, weights: WeightGradients) -> Changes:
    if weights in ("kept", "given"):
        return [weight]
    return [weight, -weight] if weights == "dropped" else []


def _row_backward(s: BlockTensors, features: int, kept: int, weight: int, weights: WeightGradients) -> Changes:
    """`features` are bytes of the input's gradient, `kept` those of the input."""
    changes = [s.gathered, -s.copied, features, *_made(weight, weights)]
    if weights != "later":
        changes.append(-kept - (s.hidden_full if s.gathered else 0))
    return [*changes, -weight] if weights == "given" else changes


def input_gradient(local: int, full: int, gathered: int, copied: int) -> Changes:
    """The gradient of a column-parallel product's input: where the input lies along the sequence it is gathered again,
    and the gradient is summed and cut."""
    return [full, full, copied + local, -copied, copied, -copied] if gathered else [full]


def _columns_backward(
    s: BlockTensors, gradients: int, products: tuple[int, ...], weights: WeightGradients, *, is_replay: bool
) -> Changes:
    """Returns the changes of products that share one input. What was computed again for this backward goes as soon as
    it has been gathered; what the forward has kept, when the products are done."""
    changes = input_gradient(s.hidden_local, s.hidden_full, s.gathered, s.copied)
    early = s.hidden_local if is_replay and s.gathered else 0
    changes.append(-early)
    for weight in products:
        changes += _made(weight, weights)
    if weights != "later":
        changes.append(early - s.hidden_local - gradients - (s.hidden_full if s.gathered else 0))
    elif s.gathered:
        changes.append(early - s.hidden_local)
    changes.append(-s.hidden_full if s.gathered else 0)
    return [*changes, -sum(products)] if weights == "given" else changes


def _norm_backward(s: BlockTensors, *, keeps: bool) -> Changes:
    """`keeps`: someone else still has the gradient that passes by the norm, to which the norm's own is added."""
    local = s.hidden_local
    return [local, -s.norm - local, local, -local - (0 if keeps else local)]


def _dropout_backward(s: BlockTensors, *, is_scaled: bool = False) -> Changes:
    local = s.hidden_local
    return [0 if is_scaled else local, local, -local - s.mask] if s.mask else []
