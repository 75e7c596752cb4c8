"""Tells whether tensors that ranks hold each for itself are the same to the bit, by one number for each tensor.

[Note: fingerprints] Each element's bits are mixed into a whole number of 64 bits, which is multiplied by an odd weight
of its place, and all are summed modulo 2^64. The mixing can be undone (a product with an odd number, and a xor of the
upper half onto the lower), and so can the product with the weight: no change of a single element, and so no flipped
bit, leaves the sum as it was. Several changes cancel each other by chance alone. A sum of whole numbers is the same in
any order, so on any device. Long tensors are summed in pieces, and the sums of the pieces likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel3d.layers.collectives import all_reduce_max
from parallel3d.mesh import Axis

_PIECE = 2**20  # elements; a piece takes 16 bytes for each while it is summed
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 2^64 over the golden ratio: multiples of it are far from each other
_LOWER_HALF = 2**32 - 1


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Returns a number that tells the bits of a tensor from others: an int64 scalar on the tensor's device."""
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    places = torch.arange(1, 1 + min(_PIECE, len(bits)), device=bits.device)
    weights = _mixed(places) | 1
    sums = [(_mixed(piece.long()) * weights[: len(piece)]).sum() for piece in bits.split(_PIECE)]
    return sums[0] if len(sums) == 1 else fingerprint(torch.stack(sums))


def _mixed(numbers: Tensor) -> Tensor:
    product = numbers * _ODD
    return product ^ (product >> 32 & _LOWER_HALF)


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the fingerprint of each tensor, int64 [tensors]."""
    return torch.stack([fingerprint(tensor) for tensor in tensors])


def differ(numbers: Tensor, axis: Axis) -> Tensor:
    """Returns which of some whole numbers are not the same on all ranks of an axis, bool [numbers], the same on all of
    them. It sends 16 bytes for each."""
    largest, smallest_inverted = all_reduce_max(torch.stack((numbers, ~numbers)), axis).unbind()
    return largest != ~smallest_inverted
