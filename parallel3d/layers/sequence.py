"""The positions of a sequence that each rank holds under context parallelism.

A sequence is split into 2 cp chunks, and rank r holds chunks r and 2 cp - 1 - r. The later a causal
query is, the more keys it sees, so this choice gives all ranks the same number of scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from parallel3d.mesh import Axis

QUERY_BLOCK = 256  # Largest number of queries that share an attention mask.


class SequencePart:
    """Part of each sequence that this rank holds: two chunks, or the full sequence on one rank.

    Args:
        cp: Context-parallel axis. None means one rank.

    Example:
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        >>> part = parallel3d.SequencePart(mesh["cp"])  # on rank 0
        >>> part.ranges(8)
        (range(0, 2), range(6, 8))
    """

    def __init__(self, cp: DeviceMesh | Axis | None = None) -> None:
        self.axis = Axis.of(cp)
        self._masks: dict[object, Tensor] = {}

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.axis.size

    def ranges(self, length: int, rank: int | None = None) -> tuple[range, ...]:
        """Returns the positions of a rank, by default this one, in a sequence of `length` tokens.

        Raises ValueError if 2 cp does not divide `length`.
        """
        if self.ranks == 1:
            return (range(length),)
        chunks = 2 * self.ranks
        if length % chunks:
            raise ValueError(
                f"a sequence of {length} tokens cannot be split into 2 cp = {chunks} chunks; use a "
                f"multiple of {chunks}"
            )
        first = self.axis.rank if rank is None else rank
        size = length // chunks
        starts = (first * size, (chunks - 1 - first) * size)
        return tuple(range(start, start + size) for start in starts)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's part of x along `dim`, which holds full sequences."""
        return self._part(x, dim, self.axis.rank)

    def split(self, x: Tensor, dim: int) -> list[Tensor]:
        """Returns the parts of all ranks in rank order. The inverse of `joined`."""
        return [self._part(x, dim, rank) for rank in range(self.ranks)]

    def joined(self, parts: Sequence[Tensor], dim: int, out: Tensor | None = None) -> Tensor:
        """Returns full sequences from the parts of all ranks, given in rank order.

        Writes them to `out` if given.
        """
        chunks = [part.chunk(2, dim) for part in parts]
        first = [chunk[0] for chunk in chunks]
        second = [chunk[1] for chunk in reversed(chunks)]
        return torch.cat([*first, *second], dim, out=out)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the positions [length / cp] that this rank holds."""
        return self.take(torch.arange(length, device=device), 0)

    def last_queries_mask(
        self,
        queries: int,
        keys: int,
        *,
        longest: int,
        window: int | None,
        repeats: int,
        like: Tensor,
    ) -> Tensor:
        """Returns the causal mask [repeats * queries, keys] of queries that are the last keys.

        It is 0 if a query sees a key, else -inf, in the dtype of `like`. There are at most
        `QUERY_BLOCK` queries and `longest` keys. All masks of full blocks are views of one tensor,
        which the layers of a model share.
        """
        own = (window, repeats, like.dtype, like.device)
        if window is not None:
            longest = min(longest, QUERY_BLOCK + window - 1)
        mask = self._masks.get(own)
        if mask is None or mask.shape[1] < longest:
            last = range(longest - QUERY_BLOCK, longest)
            hidden = ~visible(last, range(longest), True, window, like.device)
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            mask = mask.masked_fill_(hidden, float("-inf")).repeat(repeats, 1)
            self._masks[own] = mask
        by_repeat = mask.unflatten(0, (repeats, QUERY_BLOCK))[:, QUERY_BLOCK - queries :]
        return by_repeat.flatten(0, 1)[:, mask.shape[1] - keys :]

    def _part(self, x: Tensor, dim: int, rank: int) -> Tensor:
        ranges = self.ranges(x.shape[dim], rank)
        if len(ranges) == 1:
            return x
        return torch.cat([x.narrow(dim, own.start, len(own)) for own in ranges], dim)


WHOLE = SequencePart()


def visible(
    queries: range, keys: range, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """Returns the mask [queries, keys] of positions, True if a query may see a key.

    With `window` a query sees that many keys up to itself (Beltagy et al. 2020, arXiv 2004.05150,
    and Mistral). If not causal, it also sees that many from itself onward.
    """
    query = torch.arange(queries.start, queries.stop, device=device)
    distance = query.unsqueeze(1) - torch.arange(keys.start, keys.stop, device=device)
    is_near = distance.abs() < window if window is not None else torch.ones_like(distance) > 0
    return is_near & (distance >= 0) if causal else is_near
