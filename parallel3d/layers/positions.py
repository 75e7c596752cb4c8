"""Positions of tokens: learned embeddings, positions within packed documents, and rotary embeddings
with the scalings that stretch their frequencies to longer contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.compiler import is_compiling
from torch.nn import functional as F

from parallel3d.config.recipe import RopeScaling
from parallel3d.layers.loss import wide_dtype
from parallel3d.layers.parameter import LayerTp, ParallelModule, ParameterSpec, Pointwise
from parallel3d.mesh import ONE_RANK


class LearnedPositions(ParallelModule, nn.Embedding):
    """x + weight[position] (GPT-2). x, y [batch, seq, hidden], or [batch, seq / tp, hidden] with
    `sequence_parallel`: each tp rank then adds those of its tokens, and the weight's gradient is
    summed over tp. Else nothing is sent.

    `positions` [batch, seq], of the whole sequence on every rank: 0, 1, ... where it is not given.
    Raises ValueError where the sequence is longer than `longest`.

    Example:
        >>> positions = parallel3d.LearnedPositions(1024, 64)
        >>> positions(torch.zeros(2, 8, 64)).shape
        torch.Size([2, 8, 64])
    """

    padding_idx = max_norm = None
    norm_type = 2.0
    scale_grad_by_freq = False
    sparse = False

    def __init__(self, longest: int, hidden: int, *, tp: LayerTp = None) -> None:
        super().__init__(tp)
        self.num_embeddings = longest
        self.embedding_dim = hidden
        partial = self.sequence_parallel
        init = self.context.init
        spec = ParameterSpec((longest, hidden), None, init, partial_gradient=partial)
        self.add_parameter("weight", spec)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        own = x.shape[1]
        axis = self.axis if self.sequence_parallel else ONE_RANK
        length = own * axis.size
        first = own * axis.rank
        if length > self.num_embeddings:
            raise ValueError(
                f"LearnedPositions: a sequence of {length} tokens, and there are "
                f"{self.num_embeddings} positions"
            )
        weight = self.replicated("weight")
        if positions is None:
            return x + weight[first : first + own]
        # Looked up in float32, in which the gradients of equal positions then add up.
        wide = weight.to(wide_dtype(weight))
        return x + F.embedding(positions[:, first : first + own], wide).to(x.dtype)


@dataclass(frozen=True, eq=False)
class PackedDocuments:
    """The documents that the sequences [batch, seq] of a microbatch are packed of. A document ends
    with its sequence at the latest. Make them once a batch where the ids are, on the host: their
    lengths must not be asked of a GPU.

    Example:
        >>> ids = torch.tensor([[5, 6, 0, 7, 8, 9]])
        >>> documents = parallel3d.PackedDocuments.ended_by(0, ids)
        >>> documents.lengths
        (3, 3)
        >>> y = attention(x, documents=documents)
    """

    lengths: tuple[int, ...]  # tokens of each document, in order over the batch
    # int32 [documents + 1]: the first of its batch * seq tokens for each document, and their number
    starts: Tensor
    positions: Tensor  # int64 [batch, seq]: each token's place in its own document

    @classmethod
    def ended_by(cls, end_of_text: int, ids: Tensor) -> PackedDocuments:
        """Returns the documents of ids [batch, seq], each of which ends with `end_of_text` or with
        its sequence."""
        is_start = F.pad(ids[:, :-1] == end_of_text, (1, 0), value=True)
        place = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        starts = F.pad(is_start.flatten().nonzero().flatten(), (0, 1), value=ids.numel()).int()
        positions = place - (place * is_start).cummax(dim=1).values
        return cls(tuple(starts.diff().tolist()), starts, positions)

    def moved(self, move: Callable[[Tensor], Tensor]) -> PackedDocuments:
        """Returns the documents with each tensor where `move` puts it, such as on a GPU."""
        return PackedDocuments(self.lengths, move(self.starts), move(self.positions))


def stretched(frequencies: Tensor, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Returns the frequencies [head_dim / 2] of rotary positions for a context that is longer than
    the one before, and the factor by which queries and keys grow.

    llama3, of Llama 3.1: a frequency that makes at most `low_freq_factor` turns in the context
    before is divided by `factor`, one that makes at least `high_freq_factor` stays, those between
    are blended. (Dubey et al. 2024, arXiv 2407.21783, names no formula; this is that of Meta's
    llama-models, models/llama3/model.py, `apply_scaling`.)

    yarn (Peng et al. 2023, arXiv 2309.00071, section 3): those that turn less than `beta_slow`
    times are divided, those that turn more than `beta_fast` times stay, those between are blended
    linearly by their index. Queries and keys grow by `attention_factor`, by default 0.1 ln(factor)
    + 1."""
    context = scaling.original_max_positions
    if scaling.type == "llama3":
        low = scaling.low_freq_factor
        high = scaling.high_freq_factor
        keep = ((context * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / scaling.factor), 1.0
    half = frequencies.numel()
    # The indices of the frequencies that turn so many times in the context before.
    fast, slow = (
        half * math.log(context / (turns * 2 * math.pi)) / math.log(theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    first = max(math.floor(fast), 0)
    last = min(math.ceil(slow), 2 * half - 1)
    place = torch.arange(half, dtype=torch.float32, device=frequencies.device)
    interpolate = ((place - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    magnitude = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    return frequencies * (1.0 - interpolate + interpolate / scaling.factor), magnitude


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by angles that grow with the position: dims i and i + K / 2 by
    position * theta^(-2i / K), that frequency changed by `scaling` where there is one (Su et al.
    2021, arXiv 2104.09864, in the half-split form of Hugging Face's Llama).

    Angles and arithmetic are float32 (of float64 queries float64), rounded once to the dtype of x.
    The table of angles is no part of a state dict. It is made for the longest sequence yet: by
    `make_table`, which whoever compiles the layers calls before them, or on first use.

    Example:
        >>> rotary = parallel3d.RotaryEmbedding(16, theta=500_000.0)
        >>> rotary(torch.zeros(2, 8, 4, 16)).shape
        torch.Size([2, 8, 4, 16])
    """

    def __init__(
        self, head_dim: int, *, theta: float = 10_000.0, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        self._table: tuple[Tensor, Tensor] | None = None
        self.pointwise: Pointwise = turned

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Turns x [batch, seq, heads, head_dim] by its positions [batch, seq], which are below seq,
        and 0, 1, ... where they are not given. Returns the same shape and dtype."""
        length = x.shape[1]
        cos, sin = self.make_table(length, x)
        return self.pointwise(x, cos[:length], sin[:length], positions)

    def make_table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin [at least `length`, 1, head_dim] for tensors as wide as `like`, on
        its device; sin is negative for the first half, which gets the second's."""
        device = like.device
        dtype = wide_dtype(like)
        if self._table is not None:
            cos = self._table[0]
            if len(cos) >= length and cos.device == device and cos.dtype == dtype:
                return self._table
        places = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
        frequencies = self.theta ** -(places / self.head_dim)
        magnitude = 1.0
        if self.scaling is not None:
            frequencies, magnitude = stretched(frequencies, self.theta, self.scaling)
        positions = torch.arange(length, device=device, dtype=torch.float32)
        angles = torch.outer(positions, frequencies).repeat(1, 2).unsqueeze(1)
        signs = torch.full((self.head_dim,), magnitude, device=device)
        signs[: self.head_dim // 2] *= -1.0
        table = (angles.cos() * magnitude).to(dtype), (angles.sin() * signs).to(dtype)
        if not is_compiling():  # a graph that keeps something is another graph the next time
            self._table = table
        return table


class _Turn(Function):
    """x cos + (x with its halves swapped) sin, for x narrower than the table, or positions. Its
    backward turns back, by -sin. Autograd's own would round each of the two products, and keep each
    token's row of the table in every block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        return turn(x, cos, sin, positions)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin, positions = ctx.saved_tensors
        return turn(grad, cos, sin, positions, -1.0), None, None, None


def turn(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, sign: float = 1.0
) -> Tensor:
    """Computes in the dtype of the table, and of it makes one tensor of x's shape alone."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]  # [batch, seq, 1, head_dim]
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin, value=sign).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    """Returns x turned by the angles of its positions, with a gradient that is turned back."""
    if x.dtype == cos.dtype and positions is None:
        return turn(x, cos, sin, None)  # autograd takes half the time of a Function in Python
    y: Tensor = _Turn.apply(x, cos, sin, positions)
    return y
