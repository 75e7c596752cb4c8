"""The placement of a layer: what every layer of a model is given alike, as one object."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import DeviceMesh


@dataclass(frozen=True)
class Placement:
    """The mesh and the memory of a layer's parameters.

    `tp` is the tensor-parallel axis, a one-dimensional mesh; None means one device and no communication, by the same
    code. `sequence_parallel` splits the activations between the layers along the sequence, too: all layers of a block
    have it, or none. `device` and `dtype` are torch's defaults where they are None.
    """

    tp: DeviceMesh | None = None
    sequence_parallel: bool = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, tp: LayerTp) -> Placement:
        """The placement that a layer's `tp` argument means: a mesh alone leaves everything else at its default."""
        return tp if isinstance(tp, Placement) else cls(tp)


LayerTp = Placement | DeviceMesh | None
