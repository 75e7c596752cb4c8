"""`torch.compile` of a model, block by block: what is compiled is small, and the same for every block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def compile_blocks(model: nn.Module) -> None:
    """Compiles, in place and at its first use, the `body` of each block of `model.layers`: what it computes, without
    what is done around it. Hooks of the block (`fully_shard`'s, the reduction of gradients) and activation recompute
    stay outside, so that the order in which these are applied does not matter; collectives of tp are in the graph.

    A body that `torch.compile` cannot trace whole is an error at its first use, not a slow graph in pieces.
    """
    for block in model.get_submodule("layers").children():
        body: Any = block.body
        block.body = torch.compile(body, fullgraph=True)  # type: ignore[assignment]  # this instance's own


def inside_compiled(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that a compiled body is made of. Their hooks are not called, or break its graph."""
    for module in model.modules():
        if "body" in vars(module):
            yield from (part for part in module.modules() if part is not module)
