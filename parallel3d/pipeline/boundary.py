"""What crosses from one stage to the next, declared before anything runs: no shape is ever sent or
negotiated."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor between two stages. Its shape consists of numbers, and of names for sizes that
    differ from batch to batch: `TensorSpec(("batch", "seq", 512))` is run with `sizes={"batch": 2,
    "seq": 1024}`. `requires_grad` says that a gradient of the same shape comes back. Integers and
    bools never have one."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    @classmethod
    def like(cls, tensor: Tensor) -> TensorSpec:
        """Makes the spec of an example tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    @cached_property
    def has_gradient(self) -> bool:
        return self.requires_grad and (self.dtype.is_floating_point or self.dtype.is_complex)

    def with_sizes(self, sizes: Sizes) -> TensorSpec:
        """Returns the spec with numbers in the place of names. Raises ValueError where a name has
        no size."""
        unknown = [size for size in self.shape if isinstance(size, str) and size not in sizes]
        if unknown:
            raise ValueError(
                f"{self}: no size given for {', '.join(map(str, unknown))}; given are {dict(sizes)}"
            )
        return replace(
            self, shape=tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)
        )

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the tensor; the shape must consist of numbers."""
        return math.prod(size for size in self.shape if isinstance(size, int)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} [{', '.join(map(str, self.shape))}]"


Boundary = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Message:
    """The tensors that one transfer carries, of known shapes: a stage's outputs, or the gradients
    of them."""

    specs: Boundary

    @cached_property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @cached_property
    def digest(self) -> int:
        """A checksum that is equal on two ranks whose declarations are the same."""
        return zlib.crc32(str(self).encode())

    def __str__(self) -> str:
        return " and ".join(map(str, self.specs))


@dataclass(frozen=True)
class Crossing:
    """The messages over one boundary for one microbatch: outputs down the model, their gradients
    back up."""

    forward: Message
    backward: Message

    @classmethod
    def of(cls, boundary: Boundary, sizes: Sizes) -> Crossing:
        specs = tuple(spec.with_sizes(sizes) for spec in boundary)
        return cls(Message(specs), Message(tuple(spec for spec in specs if spec.has_gradient)))


def normalized(
    boundaries: TensorSpec | Boundary | Sequence[Boundary], stages: int
) -> tuple[Boundary, ...]:
    """Returns one boundary for each gap between stages, from one that all gaps share or a list.
    Raises ValueError where the list has another length."""
    if isinstance(boundaries, TensorSpec):
        boundaries = (boundaries,)
    if boundaries and all(isinstance(spec, TensorSpec) for spec in boundaries):
        return (tuple(spec for spec in boundaries if isinstance(spec, TensorSpec)),) * (stages - 1)
    listed = tuple(tuple(each) for each in boundaries if not isinstance(each, TensorSpec))
    if len(listed) != stages - 1:
        raise ValueError(
            f"{len(listed)} boundaries for {stages} stages: declare the tensors that cross, once "
            f"for all {stages - 1} gaps or for each, such as boundaries=TensorSpec((batch, seq, "
            "hidden))"
        )
    return listed
