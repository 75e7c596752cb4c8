"""Compares the outputs and gradients of a module before and after its split, for a tiny input.

This reveals mistakes that the rules do not show: a norm over split heads, two matrices packed in
one weight, or a forward pass that counts heads.
"""

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

from parallel3d.convert.parallel_modules import ConvertedExperts
from parallel3d.layers.collectives import all_reduce
from parallel3d.mesh import Axis
from parallel3d.torch_private import tree_iter

# Arguments of the module's forward pass, by name or in order.
Example = Tensor | Mapping[str, Any] | tuple[Any, ...]
Figures = tuple[torch.Size, Tensor]
# float32 results of deep models differ by 1e-5 between layouts. Wrong rules cause at least 1e-2.
_TOLERANCE = 1e-3
# A gradient below this share of the largest may be noise around 0, such as that of a key bias.
_FLOOR = 1e-2
_OUTPUT_CAUSES = (
    "a matrix split along the wrong dim, packed matrices (q, k and v, or gate and up) split as "
    "one, a forward pass that reads a number of heads that no rule divides, or one that "
    "takes the size of a split dim from its full input (B, T, C = x.size(), then "
    "view(B, T, self.n_head, C // self.n_head)): write -1 for that size"
)
_GRADIENT_CAUSES = (
    "a module on split activations, such as a norm of each head, without "
    "Replicate(partial_gradient=True), or Enter() on a module in which other layers than "
    "column-parallel ones read its input"
)
AFTERWARDS = "The module is already split: build it again. check=False skips this check"


@dataclass
class Trace:
    """Fingerprints of module outputs in forward order and parameter gradients in backward order."""

    outputs: dict[str, Figures] = field(default_factory=dict)
    gradients: dict[str, Figures] = field(default_factory=dict)


def figures(x: Tensor) -> Figures:
    """Returns the shape of x, and its norm and position-weighted sum as float64 [2]."""
    numbers = x.detach().flatten().double()
    weighted = numbers @ _weights(len(numbers), numbers.device)
    return x.shape, torch.stack((numbers.norm(), weighted))


@contextmanager
def checked(module: nn.Module, tp: DeviceMesh, example: Example | None) -> Iterator[None]:
    """Context manager that compares a module before and after the `with` block, which splits it.

    Raises ValueError if the split module fails, and on all ranks if an output or gradient differs.
    A module on the meta device is not compared.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.device.type != tp.device_type for tensor in tensors):
        if not any(tensor.is_meta for tensor in tensors):
            words = f"split not checked: the weights are not on {tp.device_type}; move them first"
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
            words = f"the split module failed: {error}; usual causes: {_OUTPUT_CAUSES}"
            raise ValueError(f"{words}. {AFTERWARDS}") from error
        _compare("output", _OUTPUT_CAUSES, whole.outputs, split.outputs, axis, floor=0.0)
        _compare("gradient", _GRADIENT_CAUSES, whole.gradients, split.gradients, axis, floor=_FLOOR)


def _run(module: nn.Module, axis: Axis, example: Example, whole: Trace | None) -> Trace:
    """Runs a forward and backward pass of the example. Restores the gradients afterwards."""
    trace = Trace()
    before = {parameter: parameter.grad for parameter in module.parameters()}
    arguments = (example,) if isinstance(example, Tensor) else example
    with _recording(module, trace), torch.random.fork_rng():
        with torch.enable_grad():
            output = module(**arguments) if isinstance(arguments, Mapping) else module(*arguments)
        result = _first_number(output)
        if result is None:
            raise ValueError("the module returns no floating-point tensor; pass check=False")
        target = (whole or trace).outputs[""][0]
        factors = _weights(target.numel(), result.device).view(target).to(result.dtype)
        for dim, size in enumerate(result.shape):
            # Only this rank's part, for example of logits that are not all-gathered.
            if size != target[dim]:
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
    """Raises ValueError for the first tensor whose fingerprints differ.

    Tensors whose shapes differ are sharded, so they are not compared.
    """
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
                f"{name or 'the module'}: its {what} differs from that of the unsplit module, by "
                f"{difference:.1e} of its norm; usual causes: {causes}. {AFTERWARDS}"
            )


def _guess_example(module: nn.Module, tp: int) -> Example:
    """Returns token ids [2, 4 tp] for a Hugging Face model. Raises ValueError for others."""
    vocab = getattr(getattr(module, "config", None), "vocab_size", None)
    if not vocab:
        raise ValueError(
            f"example = None: checking the split of this {type(module).__name__} needs an "
            "example; pass example=tensor or example={'x': tensor}, or check=False"
        )
    device = next(module.parameters()).device
    # tp must divide the sequence length.
    ids = (torch.arange(8 * tp, device=device) * 7 + 1).view(2, -1)
    return {"input_ids": ids % vocab}


def _weights(numbers: int, device: torch.device) -> Tensor:
    """Returns the cosines of 0, 1, ... as factors that distinguish positions."""
    return torch.arange(numbers, dtype=torch.float64, device=device).cos()


def _first_number(output: Any) -> Tensor | None:
    for each in tree_iter(output):
        if isinstance(each, Tensor) and each.is_floating_point():
            return each
    return None


@contextmanager
def _recording(module: nn.Module, trace: Trace) -> Iterator[None]:
    """Context manager that records the first output of each module.

    Outputs inside experts are skipped, because ranks see different tokens there. An exception in a
    module becomes a RuntimeError that names the innermost module.
    """
    names = {part: name for name, part in module.named_modules()}
    experts = tuple(
        f"{name}." for part, name in names.items() if isinstance(part, ConvertedExperts)
    )
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
    """Context manager that disables dropout in a module and converts its 16-bit dtypes to float32.

    float32 distinguishes wrong sums from rounding. The weights are restored afterwards.
    """
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
