"""`torch.compile` of a model, block by block: what is compiled is small, and the same for every block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def compile_blocks(model: nn.Module) -> None:
    """Compiles, in place and at its first use, the forward of each block of `model.layers`; of a block that is
    recomputed its `compute`. Hooks of the block (`fully_shard`'s, the reduction of gradients) and activation recompute
    stay outside of what is compiled, so that the order in which these are applied does not matter; collectives of tp
    are in the graph.

    A forward that `torch.compile` cannot trace whole is an error at its first use, not a slow graph in pieces.
    """
    for block in model.get_submodule("layers").children():
        method = "compute" if hasattr(block, "compute") else "forward"
        setattr(block, method, torch.compile(getattr(block, method), fullgraph=True))  # this instance's own
        block.is_compiled = True  # type: ignore[assignment]


def inside_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that a compiled block is made of. Their hooks are not called, or break its graph."""
    for module in model.modules():
        if "is_compiled" in vars(module):
            yield from (part for part in module.modules() if part is not module)
