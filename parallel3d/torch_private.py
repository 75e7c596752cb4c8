"""Names of torch that have no public counterpart, each with why it is needed; this is the one place that calls them.

What `fully_shard` keeps to itself is in `sharding.fully_sharded`, and a storage's count of references in
`pipeline.transport`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies each, in place, in few kernels. `torch.nn.utils.clip_grads_with_norm_` is public and never multiplies
    by more than 1; a plain loop costs a GPU a launch for each tensor."""
    torch._foreach_mul_(list(tensors), factor)


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each, added up and given in `dtype`. `torch.nn.utils.get_total_norm` is public and rounds each to
    the tensor's own dtype: eight bits of bf16."""
    return list(torch._foreach_norm(list(tensors), 2.0, dtype=dtype))


def is_in_backward() -> bool:
    """Whether autograd is at work here: so a forward tells that activation recompute runs it again."""
    return torch._C._current_graph_task_id() != -1


def offsets_of(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's part begins in the whole, by dim; also where several axes split one. It is what DCP asks a
    tensor, to save its part. Raises ValueError where the rank has no part."""
    (chunk,) = tensor.__create_chunk_list__()
    assert chunk.sizes == tensor.to_local().shape
    return tuple(chunk.offsets)
