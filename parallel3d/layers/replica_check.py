"""Compares tensors between ranks by fingerprints, one integer per tensor.

[Note: fingerprints] The bits of each element are mixed into an integer, multiplied by an odd number
that depends on the element's position, and summed modulo 2^64. Both steps are invertible, so
changing a single element always changes the sum. Integer sums do not depend on order, so they agree
on all devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.layers.collectives import all_reduce
from parallel3d.layers.dropout import GOLDEN, xor_shifted
from parallel3d.mesh import Axis

_PIECE = 2**20  # Elements hashed at a time, to limit temporary memory.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Returns an int64 scalar, on the tensor's device, that depends on every bit of the tensor."""
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for index, piece in enumerate(bits.split(_PIECE)):
        first = index * _PIECE
        places = torch.arange(first, first + len(piece), device=bits.device)
        total += (_mixed(piece.long()) * (_mixed(places) | 1)).sum()
    return total


def _mixed(numbers: Tensor) -> Tensor:
    return xor_shifted(numbers * GOLDEN, 32)


def differ(numbers: Tensor, axis: Axis) -> Tensor:
    """Returns a mask of the integers in `numbers` that differ between ranks of the axis.

    The mask is the same on all ranks. Sends 16 bytes per number.
    """
    largest, smallest_inverted = all_reduce(torch.stack((numbers, ~numbers)), axis, "max")
    return largest != ~smallest_inverted
