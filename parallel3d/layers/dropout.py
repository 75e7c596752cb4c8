"""Dropout that knows the layout: it differs over tp where activations are split, agrees where they are whole, and is a
function of a key instead of a generator's state, so that recomputing an activation drops the same elements again.

    exact   an element is dropped or kept by its global place alone: (seed, step, sample, name, row, column). So tp 4
            drops what tp 1 drops, and two runs can be compared number by number. Integer arithmetic: some ten
            operations an element.
    fast    drawn by torch's generator from (seed, step, samples, name), and the rank where activations are split: the
            same again for the same layout, other numbers for another.

The hash of `exact` is SplitMix64's finaliser (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators", figure 14) of a counter, as in counter-based generators (Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3"): int64 products wrap as its uint64 ones do.

A key is a tensor and not the numbers that it is made of, so that a compiled model is one graph for all steps.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from parallel3d.mesh import Axis

DropoutMode = Literal["exact", "fast"]

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


def dropout_key(seed: int, step: int, samples: Tensor) -> Tensor:
    """Returns what the dropout of a microbatch depends on beside each layer's name: an int64 for each sequence and this
    step, in the shape of `samples`, which are the global indices of the sequences, int64."""
    run = _split_mix(_split_mix(torch.tensor(seed)) + torch.tensor(step))
    return _split_mix(samples * _GOLDEN + run)


def drawn_key(batch: int) -> Tensor:
    """Draws a key [batch] from torch's default CPU generator, whose state has to agree over tp. torch.utils.checkpoint
    restores the state before it recomputes (`preserve_rng_state`, its default)."""
    return _split_mix((torch.arange(batch) + torch.randint(2**62, (1,))) * _GOLDEN)


class Dropout(nn.Module):
    """Zeroes elements with probability p and scales the others by 1 / (1 - p), while training. Nothing is sent.

    x, y [batch, ..., rows, columns]: the activations of a transformer [batch, seq, features]. `split_dim`: the dim that
    is split over tp, if one is (1 under sequence parallelism, -1 between a column- and a row-parallel linear). `name`:
    the layer's global one, different for every dropout of a model. `key` [batch]: `dropout_key`; without one, one is
    drawn (`drawn_key`). Keys of a whole step are best moved to a GPU at once, because `exact` copies one that is not
    there; `fast` reads the key on the host, so there keep it on the CPU.
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
        salt = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
        # A tensor, of which a compiler asks no value: one graph for all blocks of a model. No part of a state dict.
        self.salt = torch.tensor(salt, device="cpu")

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        # The mask, a byte an element, is all that is kept for the backward.
        return x.masked_fill(self.dropped(x, drawn_key(x.shape[0]) if key is None else key), 0.0) * (1 / (1 - self.p))

    def dropped(self, x: Tensor, key: Tensor) -> Tensor:
        """Returns which elements are dropped: True where one is, in the shape of x."""
        if key.shape != x.shape[:1]:
            raise ValueError(f"Dropout {self.name}: a key of {list(key.shape)}, and a batch of {x.shape[0]}")
        split = None if self.split_dim is None else self.split_dim % x.ndim
        if self.mode == "fast":
            drop: Tensor = _keyed_bernoulli(x, key, self.salt, 0 if split is None else self.axis.rank, self.p)
            return drop
        # A counter of every element's global place in its sample is hashed with the sample's key.
        counter = _split_mix(key.to(x.device, non_blocking=True) + self.salt).view(-1, *[1] * (x.ndim - 1))
        stride = 1
        for dim in range(x.ndim - 1, 0, -1):
            size = x.shape[dim]
            first = self.axis.rank * size if dim == split else 0
            place = torch.arange(first, first + size, device=x.device) * stride
            counter = counter + place.view(-1, *[1] * (x.ndim - 1 - dim))
            stride = stride * size * (self.axis.size if dim == split else 1)
        # The p 2^64 smallest of all 2^64 values are dropped.
        # Multiplied at last: of places alone inductor would write an index, and that no int64 holds.
        return _split_mix(counter * _GOLDEN) < int(self.p * 2**64) - 2**63


@torch.library.custom_op("parallel3d::keyed_bernoulli", mutates_args=())
def _keyed_bernoulli(like: Tensor, key: Tensor, salt: Tensor, rank: int, p: float) -> Tensor:
    """Draws True with probability p, in the shape of `like`. It is an operator of its own, because no compiler can
    follow a generator that is made here. A key on the CPU costs a GPU no wait."""
    of_samples = _split_mix(key.cpu() + salt) * torch.arange(1, 2 * key.numel(), 2)  # their order counts
    seed = int(_split_mix(of_samples.sum() + rank))
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.empty(like.shape, dtype=torch.bool, device=like.device).bernoulli_(p, generator=generator)


@_keyed_bernoulli.register_fake
def _(like: Tensor, key: Tensor, salt: Tensor, rank: int, p: float) -> Tensor:
    return torch.empty(like.shape, dtype=torch.bool, device=like.device)


def _split_mix(z: Tensor) -> Tensor:
    """Returns SplitMix64's finaliser of a tensor, which is written over unless a compiler traces it."""
    z = _xor_shifted(z, 30).mul_(_MIX[0])
    z = _xor_shifted(z, 27).mul_(_MIX[1])
    return _xor_shifted(z, 31)


def _xor_shifted(z: Tensor, bits: int) -> Tensor:
    """Returns z xor (z >> bits), with zeros shifted in: torch's own shift repeats the sign."""
    return z.bitwise_xor_((z >> bits).bitwise_and_(2 ** (64 - bits) - 1))
