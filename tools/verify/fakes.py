"""Private APIs of torch used by the dry run and tests: fake tensors, and a fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param

FSDPParam = _fsdp_param.FSDPParam
# Operator that `Tensor.item` and `if tensor:` call.
READ_A_VALUE = torch.ops.aten._local_scalar_dense.default
# Operator that torch dispatches to read the device of a fake tensor: three quarters of all
# dispatches. Each mode returns the device at once, because torch's own way is slow.
READ_THE_DEVICE = torch.ops.prim.device.default


def storage_id(storage: torch.UntypedStorage) -> int:
    """Returns an identifier of a live storage. `data_ptr` would be 0 for all fake tensors."""
    return int(storage._cdata)


@contextmanager
def cutting_by(chunk: Any) -> Iterator[None]:
    """Context manager that makes `fully_shard` split parameters with `chunk(tensor, chunks,
    dim=...)`. By default it creates one tensor per rank.
    """
    eager = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = chunk
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = eager


@contextmanager
def world_of_none(size: int, rank: int) -> Iterator[None]:
    """Context manager that opens a default process group of `size` ranks. Only this process exists,
    as `rank`, and nothing is sent. The import from torch.testing registers the backend.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Otherwise DTensor's cache would give tensors of the next group a mesh of this one.
        _clear_sharding_prop_cache()
