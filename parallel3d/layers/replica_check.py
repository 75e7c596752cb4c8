"""Compares tensors that ranks hold each for itself, by one number for each tensor.

[Note: fingerprints] The bits of each element, mixed into a whole number, are multiplied by an odd
number of their place and summed modulo 2^64. Both steps can be undone, so any change of a single
element changes the sum. Whole numbers have the same sum in any order, so on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel3d.layers.collectives import all_reduce
from parallel3d.layers.dropout import GOLDEN, xor_shifted
from parallel3d.mesh import Axis

_PIECE = 2**20  # elements; a piece takes 16 bytes for each while it is summed
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Returns a number that depends on every bit of a tensor: an int64 scalar on its device."""
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
    """Returns which of some whole numbers are not the same on all ranks of an axis, bool in their
    shape, the same on all of them. It sends 16 bytes for each."""
    largest, smallest_inverted = all_reduce(torch.stack((numbers, ~numbers)), axis, "max")
    return largest != ~smallest_inverted
