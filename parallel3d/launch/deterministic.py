"""The switch for runs that repeat themselves to the bit on GPUs, too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Lets torch use deterministic algorithms alone for a block, if they are wanted: attention's
    kernels and sums by index then take their deterministic backwards, and an operator that has none
    raises RuntimeError. Enter the block before CUDA is used, because cuBLAS reads its workspace's
    size from the environment when it starts."""
    import torch

    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # its one attribute is made by hand, which mypy does not see
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    was_on = torch.are_deterministic_algorithms_enabled()
    memory.fill_uninitialized_memory = False  # nothing here reads memory before it is written
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)
        memory.fill_uninitialized_memory = fills
