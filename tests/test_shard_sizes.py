"""The cut of a dim over ranks, beside torch's own."""

from __future__ import annotations

import pytest
import torch

from parallel3d.shard_sizes import largest_shard, shard_rows


@pytest.mark.parametrize("size, ranks", [(8, 2), (10, 4), (5, 4), (3, 8), (1, 1), (50_257, 8)])
def test_the_cut_is_that_of_torch_chunk(size: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(ranks)]
    mine = [list(shard_rows(size, rank, ranks)) for rank in range(ranks)]
    assert [rows for rows in mine if rows] == chunks
    assert largest_shard(size, ranks) == len(chunks[0])
