"""Counts the calls that a reader follows from the trainer's step to a matrix product."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor
from torch.nn import functional as F

import parallel3d
from parallel3d.config.recipe import ParallelConfig
from parallel3d.layers import linear
from tests.distributed.training_cases import GROUPED, make_recipe, make_trainer, train

MOST_CALLS = 9
ROOT = Path(parallel3d.__file__).parents[1]


def longest_path(parallel: ParallelConfig) -> list[str]:
    """Returns the names of the functions called after `train_step`, on the way down to the deepest
    product."""
    paths: list[list[str]] = []
    product = F.linear

    def recording(*args: Tensor) -> Tensor:
        names, frame = ["linear"], sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "train_step":
            code = frame.f_code
            is_ours = (
                Path(code.co_filename).is_relative_to(ROOT) and ".venv" not in code.co_filename
            )
            # a comprehension is no function to a reader
            if is_ours and not code.co_name.startswith("<"):
                names.append(code.co_qualname)
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None:
            paths.append(names[::-1])
        return product(*args)

    trainer = make_trainer(make_recipe(GROUPED, parallel))
    with (
        mock.patch.object(F, "linear", recording),
        mock.patch.object(linear, "FUSED_FROM_ELEMENTS", 0),
    ):
        train(trainer, 1)
    return max(paths, key=len)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_batch_takes_few_calls_from_the_step_to_the_matrix_product(
    world: Callable, pp: int
) -> None:
    for path in world(pp).run(longest_path, ParallelConfig(pp=pp, microbatch_size=2)):
        assert len(path) <= MOST_CALLS, " -> ".join(path)
        product, called = path[-2:]
        assert product.endswith("ParallelProduct.forward") and called == "linear"
