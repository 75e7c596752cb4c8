"""Optimizers in one process: their arithmetic against torch's own, and what a recipe may ask of
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import OptimizerConfig
from parallel3d.errors import ConfigError
from parallel3d.layers.parameter import ParameterSpec, zeros
from parallel3d.optimizers.low_precision import LowPrecisionAdamW, LowPrecisionSGD
from parallel3d.optimizers.muon import (
    SubMatrix,
    adjustment,
    nearest_holders,
    orthogonalize,
    parts_of_ranks,
)
from parallel3d.optimizers.rounds import owners_of
from parallel3d.recipes import find_recipe
from parallel3d.torch_private import norms

SHAPES = [(24, 40), (40, 24), (7,)]
Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
SGD: dict[str, Any] = {
    "lr": 0.01,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 0.1,
}


def trained(build: Build) -> list[torch.Tensor]:
    """Returns the parameters after five steps of an optimizer."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = build(parameters)
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def low_precision(dtype: torch.dtype, is_sgd: bool) -> Build:
    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": parameters}]
        names = ["momentum_buffer"] if is_sgd else ["exp_avg", "exp_avg_sq"]
        make = LowPrecisionSGD(groups, **SGD) if is_sgd else LowPrecisionAdamW(groups, **ADAMW)
        for parameter in parameters:
            states = {name: torch.zeros_like(parameter, dtype=dtype) for name in names}
            make.state[parameter] = states if is_sgd else {"step": torch.zeros(()), **states}
        return make

    return build


@pytest.mark.parametrize("is_sgd", [False, True])
def test_states_of_another_dtype_are_stepped_in_float32_as_torch_does(is_sgd: bool) -> None:
    theirs = trained(
        lambda p: torch.optim.SGD(p, **SGD) if is_sgd else torch.optim.AdamW(p, **ADAMW)
    )
    for ours, expected in zip(trained(low_precision(torch.float32, is_sgd)), theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=5e-7 if is_sgd else 2e-7)
    narrow = trained(low_precision(torch.bfloat16, is_sgd))
    # Five steps of lr, each wrong by bf16's spacing at most.
    bound = 0.01 * 2 * 5 * 4 * 2**-8 * 5 if is_sgd else 0.01 * 5 * 2**-7
    assert 0 < (narrow[0] - theirs[0]).abs().max() < bound


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_a_matrix_is_made_orthogonal_as_torch_does_to_the_bit(
    shape: tuple[int, int], rule: str
) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = gradient
    torch.optim.Muon(
        [parameter], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, adjust_lr_fn=rule
    ).step()
    update = orthogonalize(gradient.bfloat16(), 5)
    ours = torch.zeros(shape).add_(update, alpha=-adjustment(rule, shape))
    assert torch.equal(parameter.detach(), ours)


def test_matrices_are_divided_by_cost() -> None:
    assert owners_of([(8, 8), (8, 8), (16, 16), (8, 8), (8, 8)], 2) == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_part_lies_where_a_rank_cuts_it(dim: int | None) -> None:
    matrix = torch.arange(10 * 6).view(10, 6)
    boxes = parts_of_ranks(
        ParameterSpec((10, 6), dim, zeros),
        ranks=8,
        tp=2,
        shards=4,
    )
    for tp in range(2):
        of_tp = matrix if dim is None else matrix.chunk(2, dim)[tp]
        for shard in range(4):  # 10 rows are cut into 3, 3, 3 and 1, and 5 rows into 2, 2, 1 and 0
            parts = of_tp.chunk(4)
            expected = parts[shard] if shard < len(parts) else of_tp[:0]
            assert torch.equal(boxes[2 * shard + tp].of(matrix), expected)


def test_a_matrix_comes_from_the_nearest_replica() -> None:
    halves = [SubMatrix(range(2), range(3)), SubMatrix(range(2, 4), range(3))]
    assert nearest_holders([*halves, *halves], 3) == {2, 3}
    assert nearest_holders([*halves, *halves], 0) == {0, 1}


@pytest.mark.parametrize(
    "overrides, message",
    [
        ("momentum=0.9", "only used with optimizer.name = sgd or muon, but it is adamw; try"),
        ("name=sgd momentum=1.0", "(command line): must be below 1; try 0.5"),
        ("name=sgd momentum=0.0 nesterov=true", "optimizer.nesterov = true: requires momentum"),
        ("state_dtype=bf16 betas=[0.9,0.999]", "at most 0.99 with optimizer.state_dtype = bf16"),
        ("stochastic_rounding=true", "removed; try train.precision=bf16"),
    ],
)
def test_what_an_optimizer_has_no_use_for_is_refused(overrides: str, message: str) -> None:
    keys = [f"optimizer.{override}" for override in overrides.split()]
    with pytest.raises(ConfigError) as error:
        load_recipe(Path(find_recipe("quickstart")), keys, cards={})
    assert message in str(error.value)


def test_removed_keys_at_their_defaults_stay_readable(tmp_path: Path) -> None:
    """The config.yaml of an earlier run has every key of its version."""
    path = tmp_path / "config.yaml"
    path.write_text(
        """
optimizer: {beta2_decay: null, update_clip: null, stochastic_rounding: false}
model: {layers: 1, hidden: 8, heads: 1, ffn_hidden: 8, vocab: 300}
train: {steps: 1, global_batch_size: 1, seq_len: 8, gc_every: null}
local_sgd: {transport: fp32, fragments: 1, overlap_steps: 0, mixing: null}
"""
    )
    assert load_recipe(path, cards={}).optimizer == OptimizerConfig()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_large_gradient_does_not_lose_small_squares(dtype: torch.dtype) -> None:
    """torch adds up the squares of a tensor on the CPU one after the other, and was off by 9e-5
    here."""
    gradient = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).to(dtype)
    (norm,) = norms([gradient], torch.float32)
    expected = gradient.double().norm().item()
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected, rel=1e-6)
