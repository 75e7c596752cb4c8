"""What the tests of the layers share: a layer over tp, and the plain torch function of its global
weights that it must agree with, in its output, its inputs' gradients and every parameter's.

Imported as a plain module by tests and, by name, by the pool's workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from parallel3d.layers.parameter import (
    ParallelContext,
    ParameterSpec,
    named_specs,
    set_fused_gradients,
)
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.mesh import Axis

F64 = torch.float64
F32 = torch.float32
BF16 = torch.bfloat16
# relative to the largest number of the reference, or to 1
TOLERANCE = {F64: 1e-10, F32: 1e-5, BF16: 5e-2}
Weights = Mapping[str, Tensor]
Split = int | None  # the dim that is split over tp
BY_SEQUENCE = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """`build(tp=context)` must compute `reference(weights, *inputs)`."""

    name: str
    build: Callable[..., nn.Module]
    reference: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    # what the module's forward takes beside the inputs
    arguments: Mapping[str, Any] = field(default_factory=dict)
    input_split: Split = None  # without sequence parallelism
    output_split: Split = None
    sp_input_split: Split = BY_SEQUENCE
    sp_output_split: Split = BY_SEQUENCE
    weight_std: float = 0.3


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def draw_weights(
    module: nn.Module,
    std: float,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Draws a global tensor for each parameter, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: (torch.randn(spec.shape, generator=generator, dtype=F64) * std)
        .to(dtype)
        .requires_grad_()
        for name, spec in named_specs(module)
    }


@torch.no_grad()
def load(module: nn.Module, weights: Weights) -> None:
    """Cuts the global tensors into this rank's parameters."""
    for name, spec in named_specs(module):
        owner, _, attribute = name.rpartition(".")
        part = module.get_submodule(owner)
        local_tensor(getattr(part, attribute)).copy_(part.axis.part(weights[name], spec.dim))


def part_of(
    x: Tensor,
    split: Split,
    axis: Axis,
) -> Tensor:
    if split is None:
        return x
    return x.chunk(axis.size, dim=split)[axis.rank].contiguous()


def assert_near(
    ours: Tensor,
    reference: Tensor,
    what: str,
) -> None:
    assert ours.shape == reference.shape, f"{what}: {list(ours.shape)}, not {list(reference.shape)}"
    assert ours.dtype == reference.dtype, f"{what}: {ours.dtype}, not {reference.dtype}"
    bound = TOLERANCE[reference.dtype] * max(reference.abs().max().item(), 1.0)
    error = (ours - reference).abs().max().item()
    assert error <= bound, f"{what}: differs by {error:.3g}, allowed {bound:.3g}"


def global_gradient(
    parameter: Tensor,
    spec: ParameterSpec,
    *,
    fused: bool,
) -> Tensor:
    """The gradient as the global tensor; what fused gradients leave partial is summed as the
    trainer would."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(parameter, DTensor):
        return gradient
    assert isinstance(gradient, DTensor)
    assert gradient.placements == parameter.placements
    whole = gradient.full_tensor()
    if fused and spec.partial_gradient:
        dist.all_reduce(whole)
    return whole


def check(
    case: Case, tp: DeviceMesh, dtype: torch.dtype, sp: bool, fused: bool, again: bool = False
) -> None:
    """Runs two backwards, so that gradients add up; with `again` under activation recompute."""
    axis = Axis.of(tp)
    module = case.build(tp=ParallelContext(tp, sp, dtype=dtype))
    set_fused_gradients(module, fused)
    weights = draw_weights(module, case.weight_std, dtype)
    load(module, weights)
    run: Callable[..., Tensor] = module
    if again:
        run = partial(checkpoint, module, use_reentrant=False)
    generator = torch.Generator().manual_seed(2)
    input_split, output_split = (
        (case.sp_input_split, case.sp_output_split) if sp else (case.input_split, case.output_split)
    )
    for _ in range(2):
        inputs = [
            torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in case.shapes
        ]
        whole = [x.clone().requires_grad_() for x in inputs]
        own = [part_of(x, input_split, axis).clone().requires_grad_() for x in inputs]
        y = case.reference(weights, *whole)
        grad = torch.randn(y.shape, generator=generator, dtype=F64).to(y.dtype)
        y.backward(grad)
        ours = run(*own, **case.arguments)
        ours.backward(part_of(grad, output_split, axis))
        assert_near(ours, part_of(y, output_split, axis), "output")
        for index, (mine, reference) in enumerate(zip(own, whole, strict=True)):
            assert_near(
                mine.grad,
                part_of(reference.grad, input_split, axis),
                f"gradient of input {index}",
            )
    for name, spec in named_specs(module):
        parameter = module.get_parameter(name)
        if isinstance(parameter, DTensor):
            assert torch.equal(parameter.full_tensor(), weights[name]), (
                f"{name} is not the global tensor"
            )
        assert_near(
            global_gradient(parameter, spec, fused=fused),
            weights[name].grad,
            f"gradient of {name}",
        )


def check_all(cases: list[Case], dtypes: tuple[torch.dtype, ...] = (F64, F32)) -> None:
    """Checks every case in each dtype, with and without sequence parallelism, with autograd's
    gradients and fused ones, and once in bf16 and once under activation recompute."""
    tp = tp_mesh()
    variants = list(product(dtypes, (False, True), (False, True), (False,)))
    variants += [(BF16, True, True, False), (BF16, False, False, False), (F64, True, True, True)]
    for case in cases:
        for variant in variants:
            try:
                check(case, tp, *variant)
            except Exception as error:
                error.add_note(
                    f"case {case.name}: dtype, sequence_parallel, fused, again = {variant}"
                )
                raise
