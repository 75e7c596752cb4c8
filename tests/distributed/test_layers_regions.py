"""The regions over tp: each forward and backward against what it says it is, along any dim, eager
and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed import get_rank, get_world_size

from parallel3d.layers.collectives import all_reduce
from parallel3d.layers.regions import (
    all_gather_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
)
from parallel3d.mesh import Axis
from parallel3d.shared_memory.collectives import SLOT_BYTES
from tests.distributed.layer_cases import F64, tp_mesh


def ranks_own(
    shape: tuple[int, ...],
    rank: int,
    salt: int,
) -> Tensor:
    """What a rank starts from: any rank can say what another had."""
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(10 * salt + rank))


def check_pair(
    region: Callable[[Tensor], Tensor],
    x: list[Tensor],
    y: Tensor,
    grad: list[Tensor],
    grad_x: Tensor,
):
    """Checks a region and its conjugate; `x` and `grad` have an entry for each rank, `y` and
    `grad_x` are this rank's.

    The gradient that autograd shares is not written to.
    """
    rank = get_rank()
    mine = x[rank].clone().requires_grad_()
    before = grad[rank].clone()
    ours = region(mine)
    torch.testing.assert_close(ours, y, rtol=1e-12, atol=1e-12)
    ours.backward(grad[rank])
    torch.testing.assert_close(mine.grad, grad_x, rtol=1e-12, atol=1e-12)
    assert torch.equal(mine, x[rank])
    assert torch.equal(grad[rank], before)


def check_regions(
    shape: tuple[int, ...],
    dim: int,
    backend: str,
) -> None:
    axis = Axis.of(tp_mesh())
    n = get_world_size()
    rank = get_rank()
    short = tuple(size // n if i == dim % len(shape) else size for i, size in enumerate(shape))

    def each(size: tuple[int, ...], salt: int) -> list[Tensor]:
        return [ranks_own(size, r, salt) for r in range(n)]

    def same(size: tuple[int, ...], salt: int) -> list[Tensor]:
        return [ranks_own(size, 0, salt)] * n

    def part(x: Tensor) -> Tensor:
        return x.chunk(n, dim)[rank]

    def join(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts, dim)

    def compiled(function: Callable[..., Tensor], *more: int) -> Callable[[Tensor], Tensor]:
        def region(x: Tensor) -> Tensor:
            return function(x, axis, *more) * 1.0

        return torch.compile(region, backend=backend) if backend else region

    whole = same(shape, 1)
    partial = each(shape, 2)
    parts = each(short, 3)
    check_pair(compiled(copy_to_region), whole, whole[0], partial, sum(partial))
    check_pair(compiled(reduce_from_region), partial, sum(partial), whole, whole[0])
    check_pair(compiled(scatter_to_region, dim), whole, part(whole[0]), parts, join(parts))
    check_pair(compiled(gather_from_region, dim), parts, join(parts), whole, part(whole[0]))
    check_pair(compiled(all_gather_to_region, dim), parts, join(parts), partial, part(sum(partial)))
    check_pair(
        compiled(reduce_scatter_from_region, dim),
        partial,
        part(sum(partial)),
        parts,
        join(parts),
    )


def check_sizes() -> None:
    for dim in (0, 1, 2, -1):
        check_regions((4, 8, 12), dim, "")
    check_regions((8,), 0, "")
    check_regions((1, 8, 3), 1, "")  # nothing is copied for a batch of one
    axis = Axis.of(tp_mesh())
    for features in (2, SLOT_BYTES):
        largest = all_reduce(torch.full((1, features), float(axis.rank)), axis, "max")
        assert largest.eq(axis.size - 1).all()
    check_regions((2, 4, SLOT_BYTES // 32), 1, "")  # beyond the shared memory, by the backend


def refuse() -> None:
    with pytest.raises(ValueError, match=r"dim 1 of shape \[4, 7\] cannot be split"):
        scatter_to_region(torch.zeros(4, 7), tp_mesh(), 1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_regions_are_conjugate_along_any_dim(world: Callable, size: int) -> None:
    world(size).run(check_sizes)


def test_regions_are_the_same_under_the_compiler(world: Callable) -> None:
    world(2).run(check_regions, (4, 8), 1, "aot_eager")


def test_a_dim_that_tp_does_not_divide_is_refused(world: Callable) -> None:
    world(2).run(refuse)
