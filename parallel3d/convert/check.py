"""Compares a module before and after its conversion, on a forward and a backward of a tiny input.
What a table does not show (a norm that works on split heads, two matrices in one weight, a forward
that counts heads) shows in an output or a gradient."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from parallel3d.convert.parallel_modules import ParallelExperts
from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import Axis
from parallel3d.torch_private import tree_iter

# what the module is called with, by name or in order
Example = Tensor | Mapping[str, Any] | tuple[Any, ...]
Figures = tuple[torch.Size, Tensor]
# float32 of deep models differs by 1e-5 between layouts, and a wrong table by 1e-2 at least
_TOLERANCE = 1e-3
# a gradient below this share of the largest may be noise around 0, as that of a key's bias is
_FLOOR = 1e-2
_OUTPUT_CAUSES = (
    "a matrix that is split the wrong way, two matrices (q and k and v, gate and up) in one weight "
    "that is split as one, a forward that reads a count of heads which no rule divides, or one "
    "that takes the size of a split dimension from its full input (B, T, C = x.size(), then "
    "view(B, T, self.n_head, C // self.n_head)): write -1 for that size"
)
_GRADIENT_CAUSES = (
    "a module that works on split activations, such as a norm of each head, without "
    "Replicate(partial_gradient=True), or Enter() around more than the column-parallel layers that "
    "read its input"
)
_AFTERWARDS = "The module is split by now: build it again. check=False splits it without this check"


@dataclass
class Trace:
    """Shapes and figures of the first output of each module in the order of the forward, and of
    each parameter's gradient in the order of the backward."""

    outputs: dict[str, Figures] = field(default_factory=dict)
    gradients: dict[str, Figures] = field(default_factory=dict)


def figures(x: Tensor) -> Figures:
    """Returns the shape of x, and its norm and its sum weighted by place, float64 [2]."""
    numbers = x.detach().flatten().double()
    weighted = numbers @ _weights(len(numbers), numbers.device)
    return x.shape, torch.stack((numbers.norm(), weighted))


@contextmanager
def checked(module: nn.Module, tp: DeviceMesh, example: Example | None) -> Iterator[None]:
    """Runs a module before and after a block that splits it. Raises ValueError on all ranks if an
    output or a gradient differs. A module on the meta device is not compared."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.device.type != tp.device_type for tensor in tensors):
        if not any(tensor.is_meta for tensor in tensors):
            words = f"the split is not checked: the weights are not on {tp.device_type} yet"
            warnings.warn(words, stacklevel=4)
        yield
        return
    axis = Axis.of(tp)
    if example is None:
        example = _guess_example(module, axis.size)
    with _comparable(module):
        whole = _run(module, axis, example, None)
        yield
        try:
            split = _run(module, axis, example, whole)
        except Exception as error:
            words = f"the split module cannot be computed: {error}; usual causes: {_OUTPUT_CAUSES}"
            raise ValueError(f"{words}. {_AFTERWARDS}") from error
        _compare("output", _OUTPUT_CAUSES, whole.outputs, split.outputs, axis, floor=0.0)
        _compare("gradient", _GRADIENT_CAUSES, whole.gradients, split.gradients, axis, floor=_FLOOR)


def _run(module: nn.Module, axis: Axis, example: Example, whole: Trace | None) -> Trace:
    """Runs the example forward and backward, and leaves the gradients as they were."""
    trace = Trace()
    before = {parameter: parameter.grad for parameter in module.parameters()}
    arguments = (example,) if isinstance(example, Tensor) else example
    with _recording(module, trace), torch.random.fork_rng():
        with torch.enable_grad():
            output = module(**arguments) if isinstance(arguments, Mapping) else module(*arguments)
        result = _first_number(output)
        if result is None:
            raise ValueError("its output has no tensor of floats")
        target = (whole or trace).outputs[""][0]
        factors = _weights(target.numel(), result.device).view(target).to(result.dtype)
        for dim, size in enumerate(result.shape):
            if size != target[dim]:  # this rank's part of a head that does not gather its logits
                factors = factors.narrow(dim, axis.rank * size, size)
        for parameter in before:
            parameter.grad = None
        result.backward(factors)
    for name, parameter in reversed(list(module.named_parameters())):
        gradient = parameter.grad
        parameter.grad = before[parameter]
        if gradient is not None:
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            trace.gradients[name] = figures(full)
    return trace


def _compare(
    what: str,
    causes: str,
    whole: Mapping[str, Figures],
    split: Mapping[str, Figures],
    axis: Axis,
    *,
    floor: float,
) -> None:
    """Raises ValueError for the first tensor of both traces whose figures differ. A tensor of
    another shape is split."""
    names = [name for name in whole if name in split and whole[name][0] == split[name][0]]
    if not names:
        return
    theirs = torch.stack([whole[name][1] for name in names])
    ours = torch.stack([split[name][1] for name in names])
    norms = theirs[:, 0]
    scale = norms.clamp(min=max(floor * float(norms.max()), 1e-30))
    differences = (ours - theirs).abs().amax(dim=1) / scale
    worst = all_reduce(differences.nan_to_num(nan=torch.inf), axis, "max").tolist()
    for name, difference in zip(names, worst, strict=True):
        if difference > _TOLERANCE:
            raise ValueError(
                f"{name or 'the module'}: its {what} differs from that of the whole module, by "
                f"{difference:.1e} of its size; usual causes: {causes}. {_AFTERWARDS}"
            )


def _guess_example(module: nn.Module, tp: int) -> Example:
    """Returns two sequences of ids for a model of transformers. Raises ValueError for others."""
    vocab = getattr(getattr(module, "config", None), "vocab_size", None)
    if not vocab:
        raise ValueError(
            f"the split of this {type(module).__name__} is checked with an example, which is not "
            "known; try example=tensor or example={'x': tensor}, or check=False"
        )
    device = next(module.parameters()).device
    # tp divides the length.
    ids = (torch.arange(8 * tp, device=device) * 7 + 1).view(2, -1)
    return {"input_ids": ids % vocab}


def _weights(numbers: int, device: torch.device) -> Tensor:
    """Returns cosines of 0, 1, ...: factors that tell a number's place."""
    return torch.arange(numbers, dtype=torch.float64, device=device).cos()


def _first_number(output: Any) -> Tensor | None:
    """Returns the first tensor of floats in a module's output."""
    for each in tree_iter(output):
        if isinstance(each, Tensor) and each.is_floating_point():
            return each
    return None


@contextmanager
def _recording(module: nn.Module, trace: Trace) -> Iterator[None]:
    """Records the first output of each module, except inside experts, which see other tokens on
    each rank. A failure inside a module becomes a RuntimeError that names the innermost module."""
    names = {part: name for name, part in module.named_modules()}
    experts = tuple(f"{name}." for part, name in names.items() if isinstance(part, ParallelExperts))
    inside: list[str] = []

    def enter(part: nn.Module, inputs: Any) -> None:
        inside.append(names.get(part, ""))

    def leave(part: nn.Module, inputs: Any, output: Any) -> None:
        name = inside.pop()
        number = _first_number(output)
        if part in names and number is not None and not name.startswith(experts):
            trace.outputs.setdefault(name, figures(number))

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    except Exception as error:
        place = f"{inside[-1]}: " if inside and inside[-1] else ""
        raise RuntimeError(f"{place}{error}") from error
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _comparable(module: nn.Module) -> Iterator[None]:
    """Turns dropout off for a block, and holds a module of one 16-bit type in float32, in which a
    wrong sum is told from a rounded one. Its numbers are the same afterwards."""
    types = {parameter.dtype for parameter in module.parameters()}
    is_narrow = types in ({torch.bfloat16}, {torch.float16})
    before = [(part, part.training, dict(part._buffers)) for part in module.modules()]
    module.eval()
    if is_narrow:
        module.float()
    try:
        yield
    finally:
        if is_narrow:
            module.to(types.pop())
        for part, training, buffers in before:
            part.training = training
            part._buffers.update(buffers)
