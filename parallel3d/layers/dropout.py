"""Dropout whose mask is a function of a key, not of a generator's state.

Masks differ between tp ranks if activations are split, and agree if they are replicated. Activation
recompute drops the same elements again.

The mask of an element depends on the seed, step, sample, layer name, and position in the sample, so
every layout drops the same elements. The mask is a hash: the finalizer of SplitMix64 (Steele, Lea
and Flood 2014, figure 14), applied to a counter as in counter-based generators (Salmon et al.
2011). int64 multiplication wraps like the original's uint64.

A key is a tensor, so one compiled graph serves all steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.layers.sequence import SequencePart
from parallel3d.mesh import Axis

# Dims that a tensor holds only in part: dim -> (range of its indices, size of the full dim).
Within = Mapping[int, tuple[range, int]]
GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio as int64: its multiples are far apart.
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def dropout_key(seed: int, step: int, samples: Tensor) -> Tensor:
    """Returns the dropout keys of a training step.

    Args:
        seed: Seed of the run.
        step: Step number.
        samples: Global indices of the sequences, int64.

    Returns:
        int64 keys with the shape of `samples`.

    Example:
        >>> key = parallel3d.dropout_key(seed=0, step=1, samples=torch.arange(2))
        >>> key.shape
        torch.Size([2])
    """
    run = _split_mix(_split_mix(torch.tensor(seed)) + step)
    return _split_mix(samples * GOLDEN + run)


class Dropout(nn.Module):
    """Zeroes elements with probability p and scales the others by 1 / (1 - p) during training.

    No communication. The forward pass takes x [batch, ..., rows, columns], `key` [batch] from
    `dropout_key`, and `within`, the dims that x holds only in part. Move the keys of a step to the
    GPU in one copy.

    Args:
        p: Dropout probability, at least 0 and below 1.
        name: Global name of the layer, unique in the model.
        tp: Tensor-parallel axis.
        split_dim: Dim of x that is split over tp: 1 under sequence parallelism, -1 between a
            column-parallel and a row-parallel layer. None if x is replicated.
        cp: Context-parallel axis. It splits the sequence, dim 1 of x.

    Raises:
        ValueError: p is out of range, or `key` does not have one number per sequence.

    Example:
        >>> dropout = parallel3d.Dropout(0.1, name="embed")
        >>> key = parallel3d.dropout_key(seed=0, step=1, samples=torch.arange(2))
        >>> y = dropout(torch.ones(2, 8, 64), key)
    """

    def __init__(
        self,
        p: float,
        *,
        name: str,
        tp: DeviceMesh | None = None,
        split_dim: int | None = None,
        cp: DeviceMesh | Axis | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"Dropout: p = {p}: must be at least 0 and below 1; try 0.1")
        self.p = p
        self.name = name
        self.split_dim = split_dim
        self.axis = Axis.of(tp)
        self.sequence_part = SequencePart(cp)
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        # A tensor, so that all blocks share one compiled graph. It is not in the state dict.
        self.salt = torch.tensor(int.from_bytes(digest, "big", signed=True), device="cpu")

    def forward(self, x: Tensor, key: Tensor | None = None, within: Within | None = None) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if key is None or key.shape != x.shape[:1]:
            raise ValueError(
                f"Dropout {self.name}: key must hold one number per sequence; pass "
                "key=dropout_key(seed, step, samples)"
            )
        mask = self.dropped(x, key, within or {})
        # Autograd saves only the mask, one byte per element.
        return x.masked_fill(mask, 0.0) * (1 / (1 - self.p))

    def dropped(self, x: Tensor, key: Tensor, within: Within) -> Tensor:
        """Returns a mask in the shape of x, True for dropped elements."""
        # The counter of an element is its global position in the sample plus a hash of the sample
        # key and the layer name.
        counter = _split_mix(key.to(x.device, non_blocking=True) + self.salt)
        whole = list(x.shape)
        firsts = [0] * x.ndim
        if self.split_dim is not None:
            firsts[self.split_dim] = self.axis.rank * whole[self.split_dim]
            whole[self.split_dim] *= self.axis.size
        for dim, (own, size) in within.items():
            firsts[dim] = own.start
            whole[dim] = size
        whole[1] *= self.sequence_part.ranks
        for dim in range(1, x.ndim):
            place = torch.arange(firsts[dim], firsts[dim] + x.shape[dim], device=x.device)
            if dim == 1 and self.sequence_part.ranks > 1:
                place = self.sequence_part.positions(whole[1], x.device)[place]
            counter = counter.unsqueeze(-1) + place * math.prod(whole[dim + 1 :])
        # Drops an element if its hash is among the p * 2^64 smallest of the 2^64 values. The factor
        # comes last, because inductor would turn a product of positions into an index, which
        # overflows.
        return _split_mix(counter * GOLDEN) < int(self.p * 2**64) - 2**63


def _split_mix(z: Tensor) -> Tensor:
    """Returns the SplitMix64 finalizer of a tensor. Overwrites the tensor."""
    z = xor_shifted(z, 30).mul_(_FIRST_FACTOR)
    z = xor_shifted(z, 27).mul_(_SECOND_FACTOR)
    return xor_shifted(z, 31)


def xor_shifted(z: Tensor, bits: int) -> Tensor:
    """Sets z to z xor (z >> bits) with a logical shift, unlike torch's `>>`, and returns it."""
    return z.bitwise_xor_((z >> bits).bitwise_and_(2 ** (64 - bits) - 1))
