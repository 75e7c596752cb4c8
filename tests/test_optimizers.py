"""Optimizers in one process: their arithmetic against torch's own, and what a recipe may ask of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import ModelConfig, OptimizerConfig, Recipe
from parallel3d.errors import ConfigError
from parallel3d.models.llama import Llama
from parallel3d.optimizers.build import build_optimizer
from parallel3d.optimizers.muon import SubMatrix, adjustment, nearest_holders, orthogonalize, parts_of_ranks
from parallel3d.optimizers.rounding import LowPrecisionAdamW, LowPrecisionSGD
from parallel3d.optimizers.step_bytes import assign_by_cost
from parallel3d.recipes import find_recipe
from parallel3d.sharding.optimizer_parts import ShardedData, local_parameters
from parallel3d.torch_private import TorchDispatchMode, norms, tree_iter

SHAPES = [(24, 40), (40, 24), (7,)]


def trained(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = build(parameters)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def low_precision_adamw(parameters: list[nn.Parameter], dtype: torch.dtype) -> torch.optim.Optimizer:
    optimizer = LowPrecisionAdamW([{"params": parameters, "weight_decay": 0.1}], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    return optimizer


def low_precision_sgd(parameters: list[nn.Parameter], dtype: torch.dtype, nesterov: bool) -> torch.optim.Optimizer:
    optimizer = LowPrecisionSGD([{"params": parameters, "weight_decay": 0.1}], lr=0.01, momentum=0.9, nesterov=nesterov)
    for parameter in parameters:
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, dtype=dtype)}
    return optimizer


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor], atol: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_adamw_of_other_states_does_in_float32_what_torch_does() -> None:
    theirs = trained(lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1))
    assert_close(trained(lambda p: low_precision_adamw(p, torch.float32)), theirs, atol=2e-7)
    ours = trained(lambda p: low_precision_adamw(p, torch.bfloat16))
    assert_close(ours, theirs, atol=0.01 * 5 * 2**-7)  # five steps of lr, each off by bf16's spacing at most
    assert not torch.equal(ours[0], theirs[0])


def test_parameters_that_are_widened_together_are_no_larger_than_the_largest() -> None:
    """What a step makes beside the parameters is counted by the largest of them, in `step_bytes`."""
    shapes, together = [(7,), (30,), (24, 40), (9,), (20, 30), (300,), (61,)], []

    class Counting(LowPrecisionSGD):
        def _step_together(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
            together.append([parameter.numel() for parameter in parameters])
            super()._step_together(parameters, group)

    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = Counting(parameters, lr=0.5, momentum=0.5)
    for parameter in parameters:
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, dtype=torch.bfloat16)}
        parameter.grad = None if parameter.numel() == 9 else torch.ones_like(parameter)
    optimizer.step()
    assert together == [[7, 30], [960], [600, 300], [61]]
    assert [parameter.mean().item() for parameter in parameters] == [0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 0.5]
    assert all(state["momentum_buffer"].dtype == torch.bfloat16 for state in optimizer.state.values())


class OperatorCount(TorchDispatchMode):
    """Counts the operators that are called on tensors of the meta device, which have no number to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = func.is_view or func is torch.ops.aten.detach.default
        self.count += not is_view and any(
            x.device.type == "meta" for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)
        )
        return func(*args, **(kwargs or {}))


def operators_of_a_step(layers: int) -> tuple[int, int]:
    """Returns the operators of a step of Adafactor on a device, and the parameters that it steps."""
    config = ModelConfig(layers=layers, hidden=32, heads=4, ffn_hidden=64, vocab=64)
    model = Llama(config, device="meta")
    parameters = local_parameters(model, {}, ShardedData(model))
    optimizer = build_optimizer(parameters, OptimizerConfig(name="adafactor"), mesh=None)  # type: ignore[arg-type]
    for parameter in parameters:
        parameter.local.grad = torch.ones_like(parameter.local)
    with OperatorCount() as operators:
        optimizer.step()
    return operators.count, len(parameters)


def test_a_step_of_adafactor_reads_nothing_off_the_device_and_calls_few_operators() -> None:
    """A kernel that is launched costs the host microseconds, and a number that is read costs it its lead."""
    (few, parameters), (many, more) = operators_of_a_step(2), operators_of_a_step(6)
    assert (many - few) / (more - parameters) <= 9
    assert few - 9 * parameters <= 25


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_of_other_states_does_in_float32_what_torch_does(nesterov: bool) -> None:
    theirs = trained(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=nesterov, weight_decay=0.1))
    assert_close(trained(lambda p: low_precision_sgd(p, torch.float32, nesterov)), theirs, atol=5e-7)
    ours = trained(lambda p: low_precision_sgd(p, torch.bfloat16, nesterov))
    assert 0 < (ours[0] - theirs[0]).abs().max() < 0.01 * 2 * 5 * 4 * 2**-8 * 5


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_a_matrix_is_made_orthogonal_as_torch_does_to_the_bit(shape: tuple[int, int], rule: str) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = gradient
    torch.optim.Muon([parameter], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, adjust_lr_fn=rule).step()
    rate = adjustment(rule, shape)  # type: ignore[arg-type]
    assert torch.equal(parameter.detach(), torch.zeros(shape).add_(orthogonalize(gradient.bfloat16(), 5), alpha=-rate))


def test_singular_values_become_about_one() -> None:
    matrix = torch.randn(32, 48, generator=torch.Generator().manual_seed(2))
    singular = torch.linalg.svdvals(orthogonalize(matrix, 5))
    assert singular.min() > 0.6 and singular.max() < 1.25
    assert torch.linalg.svdvals(matrix).max() / torch.linalg.svdvals(matrix).min() > 5


def test_matrices_are_divided_by_cost() -> None:
    assert assign_by_cost([1, 1, 4, 1, 1], 2) == [1, 1, 0, 1, 1]
    assert sorted(assign_by_cost([2.0] * 7, 3)) == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_part_lies_where_a_rank_cuts_it(dim: int | None) -> None:
    matrix = torch.arange(10 * 6).view(10, 6)
    boxes = parts_of_ranks((10, 6), dim, ranks=8, tp=2, shards=4)
    for tp in range(2):
        of_tp = matrix if dim is None else matrix.chunk(2, dim)[tp]
        for shard in range(4):  # 10 rows are cut into 3, 3, 3 and 1, and 5 rows into 2, 2, 1 and 0
            parts = of_tp.chunk(4)
            expected = parts[shard] if shard < len(parts) else of_tp[:0]
            assert torch.equal(boxes[2 * shard + tp].of(matrix), expected)
    assert sum(box.elements for box in boxes) == 60 * (2 if dim is None else 1)


def test_a_matrix_comes_from_the_nearest_replica() -> None:
    halves = [SubMatrix(0, 0, 2, 3), SubMatrix(2, 0, 2, 3)]
    assert nearest_holders([*halves, *halves], 3, (4, 3)) == {2, 3}
    assert nearest_holders([*halves, *halves], 0, (4, 3)) == {0, 1}
    with pytest.raises(AssertionError):
        nearest_holders([halves[0], halves[0]], 0, (4, 3))


def quickstart(*overrides: str) -> Recipe:
    return load_recipe(Path(find_recipe("quickstart")), overrides, cards={})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["momentum=0.9"],
            "optimizer.momentum = 0.9: optimizer.name = adamw has no use for it; try optimizer.momentum",
        ),
        (["name=sgd", "ns_steps=3"], "optimizer.ns_steps = 3: optimizer.name = sgd has no use for it"),
        (["name=sgd", "betas=[0.8,0.9]"], "optimizer.betas = [0.8, 0.9]: optimizer.name = sgd has no use for it"),
        (["name=adafactor", "state_dtype=bf16"], "optimizer.state_dtype = bf16: optimizer.name = adafactor has no use"),
        (["name=sgd", "momentum=1.0"], "optimizer.momentum = 1.0: must be at least 0 and below 1; try 0.9"),
        (["name=sgd", "momentum=0.0", "nesterov=true"], "optimizer.nesterov = true: needs momentum"),
        (["name=sgd", "momentum=0.0", "state_dtype=bf16"], "sgd without momentum has no states"),
        (["name=muon", "ns_steps=100"], "optimizer.ns_steps = 100: must be at most 99; try 5"),
        (["name=muon", "muon_lr=-1.0"], "optimizer.muon_lr = -1.0: must be above 0; try 0.02"),
        (["name=muon", "lr_adjust=mine"], "must be one of original, match_rms_adamw"),
        (
            ["name=adafactor", "beta2_decay=0.8"],
            "optimizer.beta2_decay = 0.8: must be at least -1 and below 0",
        ),
        (["name=adafactor", "update_clip=0.5"], "optimizer.update_clip = 0.5: must be at least 1; try 1.0"),
        (["state_dtype=bf16", "betas=[0.9,0.999]"], "must be with optimizer.state_dtype = bf16 at most 0.99"),
        (["name=lion"], "must be one of adamw, sgd, muon, adafactor"),
    ],
)
def test_what_an_optimizer_has_no_use_for_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        quickstart(*(f"optimizer.{override}" for override in overrides))
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "adafactor"])
def test_every_optimizer_takes_the_shipped_recipe(name: str) -> None:
    assert quickstart(f"optimizer.name={name}").optimizer.name == name


def test_the_defaults_are_each_optimizers_own() -> None:
    assert OptimizerConfig(name="muon").resolved.momentum == 0.95
    assert OptimizerConfig(name="sgd").resolved.momentum == 0.9
    assert OptimizerConfig(name="sgd", momentum=0.0).resolved.momentum == 0.0
    assert OptimizerConfig().resolved == OptimizerConfig()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_a_large_gradient_does_not_lose_small_squares(dtype: torch.dtype) -> None:
    """torch adds up the squares of a tensor on the CPU one after the other, and was off by 9e-5 here."""
    gradient = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).to(dtype)
    (norm,) = norms([gradient], torch.float32)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(gradient.double().norm().item(), rel=1e-6)
