"""torch's tensors without memory and its process group without processes, which have no public
names. The dry run and tests use them."""

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
# the operator behind `Tensor.item` and `if tensor:`
READ_A_VALUE = torch.ops.aten._local_scalar_dense.default


def storage_id(storage: torch.UntypedStorage) -> int:
    """Returns a number that tells a storage from all others that are alive. `data_ptr` is 0 for a
    fake tensor."""
    return int(storage._cdata)


@contextmanager
def cutting_by(chunk: Any) -> Iterator[None]:
    """Lets `fully_shard` cut its parameters by `chunk(tensor, chunks, dim=...)` for a block, in
    place of a function that makes a tensor for each of the ranks."""
    eager = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = chunk
    try:
        yield
    finally:
        _fsdp_param._chunk_with_empty = eager


@contextmanager
def world_of_none(size: int, rank: int) -> Iterator[None]:
    """Holds a default process group of `size` ranks open for a block, of which this process is
    `rank` and the others do not exist: nothing is sent. torch registers its backend in a module for
    its own tests alone."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor would give tensors of the next world a mesh of this world's groups
        _clear_sharding_prop_cache()
