"""A parameter's parts, cut when they are asked for.

`fully_shard` cuts each parameter into one tensor for every data rank and takes two of them. That is nothing to a real
tensor; of fake ones, each some 0.1 ms of Python, 16,384 ranks times a model's parameters are a quarter of an hour.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """What `torch.chunk` gives, and empty tensors for the ranks that it has nothing for."""

    tensor: Tensor
    num_chunks: int
    dim: int

    def __getitem__(self, rank: int) -> Tensor:
        """Returns the part of data rank `rank`: `ceil(rows / num_chunks)` rows of dimension `dim`, fewer at the end."""
        rows = self.tensor.size(self.dim)
        each = -(-rows // self.num_chunks)
        begin = rank * each
        if begin >= max(rows, 1):
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, begin, min(each, rows - begin))
