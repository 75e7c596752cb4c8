"""Selects torch's deterministic algorithms, so that runs are bitwise reproducible on GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Context manager in which torch uses only deterministic algorithms, if `wanted`.

    For example, attention and index sums use deterministic backward kernels. An operator without
    one raises RuntimeError. Enter the context before CUDA is used, because cuBLAS reads its
    workspace size from the environment when it is initialized."""
    import torch

    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Any, because mypy does not see an attribute that is defined dynamically.
    memory: Any = torch.utils.deterministic
    fills = memory.fill_uninitialized_memory
    was_on = torch.are_deterministic_algorithms_enabled()
    # Filling takes time, and no memory is read before it is written.
    memory.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)
        memory.fill_uninitialized_memory = fills
