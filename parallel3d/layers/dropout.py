"""Dropout that knows the layout: it differs over tp where activations are split, agrees where they are whole, and is a
function of a key instead of a generator's state, so that recomputing an activation drops the same elements again.

    exact   an element is dropped or kept by its global place alone: (seed, step, name, sample, row, column). So tp 4
            drops what tp 1 drops, and two runs can be compared number by number. Integer arithmetic: some ten
            operations an element.
    fast    drawn by torch's generator from (seed, step, name, samples), and the rank where activations are split: the
            same again for the same layout, other numbers for another.

The hash of `exact` is SplitMix64's finaliser (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators", figure 14) of a counter, as in counter-based generators (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"): int64 products wrap as its uint64 ones do.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.mesh import Axis

DropoutMode = Literal["exact", "fast"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


@dataclass(frozen=True)
class DropoutKey:
    """What a microbatch's dropout depends on beside the layer's name. `samples`: the global index of each sequence."""

    seed: int
    step: int
    samples: tuple[int, ...]

    @classmethod
    def draw(cls, batch: int) -> DropoutKey:
        """From torch's default CPU generator, whose state has to agree over tp; torch.utils.checkpoint puts it back
        before it recomputes (`preserve_rng_state`, its default)."""
        return cls(int(torch.randint(2**62, ()).item()), 0, tuple(range(batch)))

    def of(self, name: str, sample: int) -> int:
        """A number from 0 to 2^64 for one layer and sample."""
        text = f"{self.seed}/{self.step}/{name}/{sample}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Dropout(nn.Module):
    """Zeroes elements with probability p and scales the others by 1 / (1 - p), while training. Nothing is sent.

    x, y [batch, ..., rows, columns]: the activations of a transformer [batch, seq, features]. `split_dim`: the dim that
    is split over tp, if one is (1 under sequence parallelism, -1 between a column- and a row-parallel linear). `name`:
    the layer's global one, different for every dropout of a model. Without a key, one is drawn: `DropoutKey.draw`.
    """

    def __init__(
        self,
        p: float,
        *,
        name: str,
        tp: DeviceMesh | None = None,
        split_dim: int | None = None,
        mode: DropoutMode = "exact",
    ) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"Dropout: p = {p}: must be at least 0 and below 1")
        self.p, self.name, self.mode, self.split_dim = p, name, mode, split_dim
        self.axis = Axis.of(tp)

    def forward(self, x: Tensor, key: DropoutKey | None = None) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        key = key or DropoutKey.draw(x.shape[0])
        return x * self.scaled_mask(x, key)

    def scaled_mask(self, x: Tensor, key: DropoutKey) -> Tensor:
        """1 / (1 - p) where x is kept, 0 where not, in its shape and dtype."""
        if len(key.samples) != x.shape[0]:
            raise ValueError(f"Dropout {self.name}: {len(key.samples)} samples in the key, {x.shape[0]} in the batch")
        keep = self._exact(x, key) if self.mode == "exact" else self._fast(x, key)
        return keep.to(x.dtype).mul_(1.0 / (1.0 - self.p))

    def _exact(self, x: Tensor, key: DropoutKey) -> Tensor:
        """A counter for every element of a sample, from its global place, hashed with the sample's key."""
        split = None if self.split_dim is None else self.split_dim % x.ndim
        keys = [_signed(key.of(self.name, sample)) for sample in key.samples]
        counter = torch.tensor(keys, device=x.device).view(-1, *[1] * (x.ndim - 1))
        stride = 1
        for dim in range(x.ndim - 1, 0, -1):
            size = x.shape[dim]
            first = self.axis.rank * size if dim == split else 0
            place = torch.arange(first, first + size, device=x.device) * _signed(stride * _GOLDEN)
            counter = counter + place.view(-1, *[1] * (x.ndim - 1 - dim))
            stride *= size * (self.axis.size if dim == split else 1)
        # The p 2^64 smallest of all 2^64 values are dropped.
        return _split_mix(counter) >= _signed_threshold(self.p)

    def _fast(self, x: Tensor, key: DropoutKey) -> Tensor:
        rank = 0 if self.split_dim is None else self.axis.rank
        seed = key.of(f"{self.name}/{rank}/{key.samples}", 0)
        generator = torch.Generator(x.device).manual_seed(_signed(seed))
        return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1.0 - self.p, generator=generator)


def _split_mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place."""
    z ^= _logical_shift(z, 30)
    z *= _signed(_MIX[0])
    z ^= _logical_shift(z, 27)
    z *= _signed(_MIX[1])
    z ^= _logical_shift(z, 31)
    return z


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    """To the right, zeros following: torch's own repeats the sign."""
    return (z >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _signed_threshold(p: float) -> int:
    return int(p * 2**64) - 2**63
