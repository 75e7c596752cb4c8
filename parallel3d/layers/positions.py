"""Token positions: learned embeddings, packed documents, and rotary embeddings with scaling."""

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
from parallel3d.layers.sequence import WHOLE, SequencePart
from parallel3d.mesh import ONE_RANK


class LearnedPositions(ParallelModule, nn.Embedding):
    """Adds learned position embeddings: y = x + weight[position], as in GPT-2.

    Shapes: x and y [batch, seq, hidden], or [batch, seq / tp, hidden] under sequence parallelism.
    In the latter case each tp rank adds the embeddings of its own tokens, and the weight's gradient
    is summed over tp.

    The forward pass also takes `positions` [batch, seq] of full sequences. Default: 0, 1, ...
    Under context parallelism, x has only this rank's part of each sequence.

    Args:
        longest: Number of positions.
        hidden: Hidden size of the model.
        tp: Tensor-parallel axis or a `ParallelContext`.

    Raises:
        ValueError: The sequence is longer than `longest`.

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
        length = own * axis.size * self.sequence_part.ranks
        mine = slice(own * axis.rank, own * (axis.rank + 1))
        if length > self.num_embeddings:
            raise ValueError(
                f"LearnedPositions: a sequence of {length} tokens exceeds the "
                f"{self.num_embeddings} positions; shorten it or raise longest"
            )
        weight = self.replicated("weight")
        if positions is None:
            return x + self.sequence_part.take(weight[:length], 0)[mine]
        # The lookup is in float32, so that gradients of equal positions are summed in float32.
        wide = weight.to(wide_dtype(weight))
        return x + F.embedding(self.sequence_part.take(positions, 1)[:, mine], wide).to(x.dtype)


@dataclass(frozen=True, eq=False)
class PackedDocuments:
    """Boundaries of the documents packed into the sequences [batch, seq] of a microbatch.

    No document crosses the end of its sequence. Build this once per batch on the CPU: reading the
    lengths from a GPU would synchronize it.

    Args:
        lengths: Number of tokens of each document, in batch order.
        starts: int32 [documents + 1]. Index of each document's first token among the batch * seq
            tokens, followed by their total number.
        positions: int64 [batch, seq]. Position of each token within its document.

    Example:
        >>> ids = torch.tensor([[5, 6, 0, 7, 8, 9]])
        >>> documents = parallel3d.PackedDocuments.ended_by(0, ids)
        >>> documents.lengths
        (3, 3)
        >>> y = attention(x, documents=documents)
    """

    lengths: tuple[int, ...]
    starts: Tensor
    positions: Tensor

    @classmethod
    def ended_by(cls, end_of_text: int, ids: Tensor) -> PackedDocuments:
        """Finds the documents in ids [batch, seq]. Each ends with `end_of_text` or its sequence."""
        is_start = F.pad(ids[:, :-1] == end_of_text, (1, 0), value=True)
        place = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        starts = F.pad(is_start.flatten().nonzero().flatten(), (0, 1), value=ids.numel()).int()
        positions = place - (place * is_start).cummax(dim=1).values
        return cls(tuple(starts.diff().tolist()), starts, positions)

    def moved(self, move: Callable[[Tensor], Tensor]) -> PackedDocuments:
        """Returns a copy with `move` applied to each tensor, for example to copy it to a GPU."""
        return PackedDocuments(self.lengths, move(self.starts), move(self.positions))


def stretched(frequencies: Tensor, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Returns rotary frequencies [head_dim / 2] scaled to a longer context, and a magnitude.

    The magnitude multiplies queries and keys.

    "llama3" (Llama 3.1): frequencies with at most `low_freq_factor` turns in the original context
    are divided by `factor`. Those with at least `high_freq_factor` turns stay. Those in between are
    blended. Dubey et al. 2024 (arXiv 2407.21783) give no formula. This one is `apply_scaling` in
    models/llama3/model.py of Meta's llama-models.

    "yarn" (Peng et al. 2023, arXiv 2309.00071, section 3): frequencies with fewer than `beta_slow`
    turns are divided by `factor`. Those with more than `beta_fast` turns stay. Those in between are
    blended linearly by index. The magnitude is `attention_factor`, by default 0.1 ln(factor) + 1.
    """
    context = scaling.original_max_positions
    if scaling.type == "llama3":
        low = scaling.low_freq_factor
        high = scaling.high_freq_factor
        keep = ((context * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / scaling.factor), 1.0
    half = frequencies.numel()
    # Indices of the frequencies that make `turns` turns in the original context.
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
    """Rotary position embedding in the half-split form of Hugging Face's Llama.

    It rotates dims i and i + head_dim / 2 by position * theta^(-2i / head_dim) (Su et al. 2021,
    arXiv 2104.09864). Angles are float32. Arithmetic is float32, or float64 for float64 inputs. The
    result is rounded once to the dtype of x. The table of angles is not in the state dict. It
    covers the longest sequence seen and is built on first use, or earlier by `make_table` if layers
    are compiled.

    Args:
        head_dim: Size of each head.
        theta: Base of the frequencies.
        scaling: Scaling of the frequencies to longer contexts.

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
        self._own_rows: dict[object, tuple[Tensor, Tensor]] = {}
        self.pointwise: Pointwise = turned

    def forward(
        self, x: Tensor, positions: Tensor | None = None, part: SequencePart = WHOLE
    ) -> Tensor:
        """Rotates x by its positions.

        Args:
            x: Queries or keys [batch, seq, heads, head_dim].
            positions: [batch, seq] of full sequences, each below seq. Default: 0, 1, ...
            part: Part of each sequence that x has. Default: all of it.

        Returns:
            Tensor in the shape and dtype of x.
        """
        length = x.shape[1] * part.ranks
        cos, sin = self.make_table(length, x)
        if cos.shape[0] > length:
            cos, sin = cos[:length], sin[:length]
        if positions is not None:
            return self.pointwise(x, cos, sin, part.take(positions, 1))
        if part.ranks > 1:  # All layers share the rows of the part.
            own = (length, cos.dtype, cos.device, part)
            if own not in self._own_rows:
                self._own_rows = {own: (part.take(cos, 0), part.take(sin, 0))}
            cos, sin = self._own_rows[own]
        return self.pointwise(x, cos, sin, None)

    def make_table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin [at least `length`, 1, head_dim] on the device of `like`.

        They are at least float32 and include the magnitude of the scaling. sin is negated in the
        first half of head_dim.
        """
        device = like.device
        dtype = wide_dtype(like)
        if self._table is not None:
            cos = self._table[0]
            if cos.shape[0] >= length and cos.device == device and cos.dtype == dtype:
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
        if not is_compiling():  # A graph that stores state would be recompiled at its next use.
            self._table = table
        return table


class _Turn(Function):
    """Autograd function of `turned` for given positions or an x of lower precision than the table.

    The backward pass rotates back, with -sin. Differentiating `turn` would round both terms and
    save table rows for each token in every block.
    """

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
    """Rotates x in the dtype of the table, with one temporary tensor of x's shape."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]  # [batch, seq, 1, head_dim]
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin, value=sign).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    """Returns x rotated by its positions. The backward pass rotates the gradient back."""
    if x.dtype == cos.dtype and positions is None:
        return turn(x, cos, sin, None)  # Here plain autograd takes half the time of `_Turn`.
    y: Tensor = _Turn.apply(x, cos, sin, positions)
    return y
