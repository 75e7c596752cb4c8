"""Declares the tensors that stages exchange, so that shapes are neither sent nor negotiated."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

Sizes = Mapping[str, int]
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor that is sent from a stage to the next.

    Args:
        shape: Sizes. A name stands for a size that differs between batches: pass its value to
            `PipelineRuntime.run(..., sizes={"batch": 2, "seq": 1024})`.
        dtype: Data type of the tensor.
        requires_grad: True if the next stage sends back a gradient of the same shape. Integer and
            bool tensors never have one.

    Example:
        >>> spec = parallel3d.TensorSpec(("batch", "seq", 512), torch.bfloat16)
        >>> runtime = parallel3d.PipelineRuntime(stages, schedule, pp, loss_fn, boundaries=spec)
        >>> loss = runtime.run(inputs, labels, sizes={"batch": 2, "seq": 1024})
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    @cached_property
    def has_gradient(self) -> bool:
        return self.requires_grad and (self.dtype.is_floating_point or self.dtype.is_complex)

    def with_sizes(self, sizes: Sizes) -> TensorSpec:
        """Returns the spec with numbers for names. Raises ValueError if `sizes` lacks a name."""
        try:
            shape = tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)
        except KeyError as unknown:
            raise ValueError(
                f"{self}: size {unknown.args[0]} is missing in sizes = {dict(sizes)}"
            ) from None
        return replace(self, shape=shape)

    def fits(self, tensor: Tensor) -> bool:
        """Returns True if shape and dtype match, and a gradient is declared if it is required."""
        is_same = tensor.shape == self.shape and tensor.dtype == self.dtype
        return is_same and (self.has_gradient or not tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} [{', '.join(map(str, self.shape))}]"


Boundary = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Message:
    """Tensors of one transfer: the outputs of a stage for one microbatch, or their gradients."""

    specs: Boundary

    @cached_property
    def nbytes(self) -> int:
        return sum(math.prod(map(int, spec.shape)) * spec.dtype.itemsize for spec in self.specs)

    @cached_property
    def digest(self) -> int:
        """Checksum of the declared shapes and dtypes, which lets two ranks detect a mismatch."""
        return zlib.crc32(str(self).encode())

    def empty(self, device: torch.device) -> Tensors:
        """Allocates uninitialized tensors to receive into."""
        return tuple(
            torch.empty(spec.shape, dtype=spec.dtype, device=device)  # type: ignore[arg-type]
            for spec in self.specs
        )

    def __str__(self) -> str:
        return " and ".join(map(str, self.specs))


@dataclass(frozen=True)
class Crossing:
    """Messages between two consecutive stages for one microbatch: outputs, and their gradients."""

    forward: Message
    backward: Message

    @classmethod
    @lru_cache
    def of(cls, boundary: Boundary, sizes: tuple[tuple[str, int], ...]) -> Crossing:
        specs = tuple(spec.with_sizes(dict(sizes)) for spec in boundary)
        return cls(Message(specs), Message(tuple(spec for spec in specs if spec.has_gradient)))


def normalized(
    boundaries: TensorSpec | Boundary | Sequence[Boundary], stages: int
) -> tuple[Boundary, ...]:
    """Returns one boundary per pair of consecutive stages.

    `boundaries` is one declaration for all pairs, or a list with one per pair. Raises ValueError if
    the list has the wrong length.
    """
    listed: Sequence[Any] = (boundaries,) if isinstance(boundaries, TensorSpec) else boundaries
    if listed and isinstance(listed[0], TensorSpec):
        return (tuple(listed),) * (stages - 1)
    if len(listed) != stages - 1:
        raise ValueError(
            f"{len(listed)} boundaries for {stages} stages: declare the tensors that cross, once "
            f"for all {stages - 1} gaps or per gap, for example boundaries=TensorSpec((batch, seq, "
            "hidden))"
        )
    return tuple(map(tuple, listed))
