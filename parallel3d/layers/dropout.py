"""Dropout as a function of a key instead of a generator's state: it differs over tp if activations
are split, agrees if they are whole, and drops the same elements again in a recomputed activation.

An element is dropped or kept by its global place: (seed, step, sample, name, row, column). So tp 4
drops what tp 1 drops. The hash is SplitMix64's finaliser (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators", figure 14) of a counter, as in counter-based generators
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). int64 products wrap as its
uint64 products do.

A key is a tensor, so that a compiled model is one graph for all steps.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.mesh import Axis

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio: its multiples are far apart
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def dropout_key(seed: int, step: int, samples: Tensor) -> Tensor:
    """Returns the key of a step for each of `samples`, the global indices of the sequences, int64
    in the same shape.

    Example:
        >>> key = parallel3d.dropout_key(seed=0, step=1, samples=torch.arange(2))
        >>> key.shape
        torch.Size([2])
    """
    run = _split_mix(_split_mix(torch.tensor(seed)) + step)
    return _split_mix(samples * GOLDEN + run)


class Dropout(nn.Module):
    """Zeroes elements with probability p and scales the others by 1 / (1 - p), while training.
    Nothing is sent.

    x, y [batch, ..., rows, columns]. `split_dim`: the dim that is split over tp, if any (1 under
    sequence parallelism, -1 between a column- and a row-parallel linear). `name`: the layer's
    global name, different for every dropout of a model. `key` [batch]: `dropout_key`. Move the
    keys of a whole step to a GPU at once.

    Example:
        >>> dropout = parallel3d.Dropout(0.1, name="embed")
        >>> key = parallel3d.dropout_key(seed=0, step=1, samples=torch.arange(2))
        >>> y = dropout(torch.ones(2, 8, 64), key)
    """

    def __init__(
        self, p: float, *, name: str, tp: DeviceMesh | None = None, split_dim: int | None = None
    ) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"Dropout: p = {p}: must be at least 0 and below 1")
        self.p = p
        self.name = name
        self.split_dim = split_dim
        self.axis = Axis.of(tp)
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        # A tensor, so that all blocks of a model are one compiled graph. Not in the state dict.
        self.salt = torch.tensor(int.from_bytes(digest, "big", signed=True), device="cpu")

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        if key is None or key.shape != x.shape[:1]:
            raise ValueError(
                f"Dropout {self.name}: needs key=dropout_key(seed, step, samples), one number for "
                "each sequence"
            )
        mask = self.dropped(x, key)
        # Only the mask, a byte per element, is saved for the backward pass.
        return x.masked_fill(mask, 0.0) * (1 / (1 - self.p))

    def dropped(self, x: Tensor, key: Tensor) -> Tensor:
        """Returns a mask in the shape of x, True for the elements that are dropped."""
        # A counter of every element's global place in its sample, added to the sample's key.
        counter = _split_mix(key.to(x.device, non_blocking=True) + self.salt)
        whole = list(x.shape)  # over all ranks
        if self.split_dim is not None:
            whole[self.split_dim] *= self.axis.size
        for dim in range(1, x.ndim):
            size = x.shape[dim]
            first = self.axis.rank * size if whole[dim] > size else 0
            place = torch.arange(first, first + size, device=x.device)
            counter = counter.unsqueeze(-1) + place * math.prod(whole[dim + 1 :])
        # The p 2^64 smallest of all 2^64 values are dropped. The factor comes last: inductor would
        # write a product of places as an index, which cannot hold it.
        return _split_mix(counter * GOLDEN) < int(self.p * 2**64) - 2**63


def _split_mix(z: Tensor) -> Tensor:
    """Returns SplitMix64's finaliser of a tensor, which is overwritten."""
    z = xor_shifted(z, 30).mul_(_FIRST_FACTOR)
    z = xor_shifted(z, 27).mul_(_SECOND_FACTOR)
    return xor_shifted(z, 31)


def xor_shifted(z: Tensor, bits: int) -> Tensor:
    """Returns z xor (z >> bits), with zeros shifted in: torch's own shift repeats the sign."""
    return z.bitwise_xor_((z >> bits).bitwise_and_(2 ** (64 - bits) - 1))
