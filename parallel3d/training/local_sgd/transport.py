"""The mean of tensors over the replicas, in fewer bits than float32 where that is asked for.

Each replica sends every other its encoded part of a slice (all-to-all), decodes what it got,
averages it in float32, and sends the encoded mean of its slice back (all-gather): 2 (n - 1) / n
times the encoded size per rank, as a ring all-reduce, and no sum can overflow. Everything is done
element by element, or by blocks that no two tensors share, and in the order of the replicas: a
tensor's mean does not depend on what it travels with, so that equal copies (a tied embedding's on
two stages, a norm on all tp ranks) stay equal to the bit; and each replica decodes the same bytes.

    transport  bytes per element   error of the mean of x
    fp32       4                   rounding of float32
    fp16       2                   2^-10 |x|max (2^-24 if |x| is below 6e-5); x up to 65504
    int8       1 + 4 / 256         |x|max / 127 of 256 neighbours: half a step on either way

Bounds are over all replicas' x. Each tensor is rounded up to blocks of 256 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.recipe import Transport
from parallel3d.mesh import Axis

BLOCK = 256  # elements that share one scale


@dataclass(frozen=True)
class Codec:
    """Encodes blocks, float32 [n, BLOCK], as [n, anything], and decodes them."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


def _to_int8(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(dim=1, keepdim=True) / 127
    # A block of zeros has scale 0. A block that is not finite has a scale that is not, and decodes
    # to such numbers.
    whole = (blocks / torch.where(scale == 0, 1.0, scale)).round().to(torch.int8)
    return torch.cat((scale.view(torch.uint8), whole.view(torch.uint8)), dim=1)


def _from_int8(payload: Tensor) -> Tensor:
    scale, whole = payload[:, :4].contiguous().view(torch.float32), payload[:, 4:].view(torch.int8)
    return whole.float() * scale


CODECS: dict[Transport, Codec] = {
    "fp32": Codec(Tensor.float, Tensor.float),
    "fp16": Codec(Tensor.half, Tensor.float),
    "int8": Codec(_to_int8, _from_int8),
}


def blocks_of(numel: int) -> int:
    return -(-numel // BLOCK)


class MeanOverReplicas:
    """The mean of `tensors` over the replicas, on its way. All ranks of the axis make it at once,
    and call `gather` (or `wait`, which gathers) of several means in the same order."""

    def __init__(self, tensors: Sequence[Tensor], replicas: Axis, codec: Codec) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._replicas, self._codec = replicas, codec
        wanted = sum(blocks_of(tensor.numel()) for tensor in tensors)
        slice_blocks = -(-wanted // replicas.size)
        blocks = torch.zeros(replicas.size * slice_blocks, BLOCK, device=tensors[0].device)
        for part, tensor in zip(self._parts(blocks), tensors, strict=True):
            part.copy_(tensor)
        mine = codec.encode(blocks).unflatten(0, (replicas.size, -1))
        theirs = torch.empty_like(mine)
        self._buffers = mine, theirs  # kept until they have arrived
        self._arrives = dist.all_to_all_single(theirs, mine, group=replicas.group, async_op=True)
        self._is_averaged = False

    def gather(self) -> None:
        """Averages this replica's slice and starts to send it. A second call does nothing."""
        if self._is_averaged:
            return
        _wait(self._arrives)
        _, theirs = self._buffers
        mean = self._codec.decode(theirs[0])
        for part in theirs[1:]:
            mean = mean + self._codec.decode(part)
        mean = self._codec.encode(mean / self._replicas.size)
        everyone = torch.empty_like(theirs)
        self._buffers = mean, everyone
        self._arrives = dist.all_gather(
            list(everyone.unbind(0)), mean, group=self._replicas.group, async_op=True
        )
        self._is_averaged = True

    def wait(self) -> list[Tensor]:
        """Returns the means, float32, of the tensors' shapes; they have the same bits on every
        replica."""
        self.gather()
        _wait(self._arrives)
        _, everyone = self._buffers
        return self._parts(self._codec.decode(everyone.flatten(0, 1)))

    def _parts(self, blocks: Tensor) -> list[Tensor]:
        """Returns the part of each tensor in the blocks; each begins a block."""
        flat, start, parts = blocks.view(-1), 0, []
        for shape in self._shapes:
            parts.append(flat[start : start + shape.numel()].view(shape))
            start += blocks_of(shape.numel()) * BLOCK
        return parts


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
