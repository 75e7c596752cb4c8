"""The proof of a conversion: a forward and a backward of a tiny input through the whole module, and the same through
the split one. What no table can show (a norm that works on split heads, two products in one weight, a forward that
counts heads) shows in an output or a gradient."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from parallel3d.convert.forms import ExpertsForm
from parallel3d.layers.collectives import all_reduce_max
from parallel3d.mesh import Axis
from parallel3d.torch_private import tree_iter

Example = Tensor | Mapping[str, Any] | tuple[Any, ...]  # what the module is called with, by name or in order
_TOLERANCE = 1e-3  # float32 of deep models differs by 1e-5 between layouts, and a wrong table by 1e-2 at least
_FLOOR = 1e-2  # a gradient below this share of the largest may be noise around 0, as that of a key's bias is
_CHUNK = 2**22  # numbers that are summed at a time
_OUTPUT_CAUSES = (
    "a product that is split the wrong way, two products (q and k and v, gate and up) in one weight that is split as "
    "one, a forward that reads a count of heads which no rule divides, or one that takes a size of what is split from "
    "its whole input (B, T, C = x.size(), then view(B, T, self.n_head, C // self.n_head)): write -1 for that size"
)
_GRADIENT_CAUSES = (
    "a module that works on split activations, such as a norm of each head, without Replicate(partial_gradient=True), "
    "or Enter() around more than the column-parallel layers that read its input"
)

_AFTERWARDS = "The module is split by now: build it again. check=False splits it without this check"


@dataclass(frozen=True)
class Figures:
    """A tensor's shape, its norm, and two sums over its numbers that another tensor hardly shares."""

    shape: torch.Size
    norm: float
    sums: tuple[float, float]

    @classmethod
    def of(cls, x: Tensor) -> Figures:
        square = plain = waved = 0.0
        for at, part in enumerate(x.detach().flatten().split(_CHUNK)):
            numbers = part.double()
            square += numbers.square().sum().item()
            plain += numbers.sum().item()
            waved += (numbers * _wave(len(numbers), at * _CHUNK, numbers.device)).sum().item()
        return cls(x.shape, math.sqrt(square), (plain, waved))

    def differs_by(self, other: Figures, scale: float) -> float:
        """Returns the largest difference, in shares of `scale`."""
        pairs = zip((self.norm, *self.sums), (other.norm, *other.sums), strict=True)
        found = max(abs(ours - theirs) for ours, theirs in pairs) / max(scale, 1e-30)
        return found if math.isfinite(found) else math.inf


@dataclass
class Trace:
    """What a forward and a backward have given: the first output of each module by its name, in the order in which they
    were done, and the gradient of each parameter, in the order of the backward."""

    outputs: dict[str, Figures] = field(default_factory=dict)
    gradients: dict[str, Figures] = field(default_factory=dict)


@contextmanager
def checked(module: nn.Module, tp: DeviceMesh, example: Example | None) -> Iterator[None]:
    """Follows `module` before and after the block, which splits it over `tp`. Raises ValueError, on all ranks, where
    the split module gives another output or another gradient. A module on the meta device has nothing to compare."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        yield
        return
    if any(tensor.device.type != tp.device_type for tensor in tensors):
        warnings.warn(f"the split is not checked: the weights are not on {tp.device_type} yet", stacklevel=4)
        yield
        return
    axis, called = Axis.of(tp), example if example is not None else guess_example(module, tp.size())
    with _in_float32(module):
        try:
            whole = _run(module, axis, called, None)
        except Exception as error:
            words = "the module cannot be computed with its example before it is split; give another, or check=False"
            raise ValueError(f"{words}: {error}") from error
        yield
        try:
            split = _run(module, axis, called, whole)
        except Exception as error:
            words = f"the split module cannot be computed: {error}; usual causes: {_OUTPUT_CAUSES}"
            raise ValueError(f"{words}. {_AFTERWARDS}") from error
        _compare(whole, split, axis, next(iter(module.parameters())).device)


def _run(module: nn.Module, axis: Axis, example: Example, whole: Trace | None) -> Trace:
    """Runs the example forward and backward, without dropout, and leaves the module as it was."""
    found = Trace()
    before = {parameter: parameter.grad for parameter in module.parameters()}
    with _hooked(module, found), _as_in_evaluation(module), torch.enable_grad(), torch.random.fork_rng():
        arguments = (example,) if isinstance(example, Tensor) else example
        output = module(**arguments) if isinstance(arguments, Mapping) else module(*arguments)
        result = _first_number(output)
        if result is None:
            raise ValueError("its output has no tensor of floats")
        target = result.shape if whole is None else whole.outputs[""].shape
        factors = _wave(target.numel(), 0, result.device).view(target).to(result.dtype)
        for dim, (size, all_of_it) in enumerate(zip(result.shape, target, strict=True)):
            if size != all_of_it:  # this rank's part, as a head gives it that does not gather its logits
                factors = factors.narrow(dim, axis.rank * size, size)
        for parameter in before:
            parameter.grad = None
        (result * factors).sum().backward()
    for name, parameter in reversed(list(module.named_parameters())):
        gradient, parameter.grad = parameter.grad, before[parameter]
        if gradient is not None:
            whole_one = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found.gradients[name] = Figures.of(whole_one)
    return found


def _compare(whole: Trace, split: Trace, axis: Axis, device: torch.device) -> None:
    """Raises ValueError for the first module whose output differs, or for the first gradient of the backward."""
    least = _FLOOR * max((each.norm for each in whole.gradients.values()), default=0.0)
    for what, causes, theirs, ours, floor in (
        ("output", _OUTPUT_CAUSES, whole.outputs, split.outputs, 0.0),
        ("gradient", _GRADIENT_CAUSES, whole.gradients, split.gradients, least),
    ):
        names = [name for name in theirs if name in ours and ours[name].shape == theirs[name].shape]
        found = [ours[name].differs_by(theirs[name], max(theirs[name].norm, floor)) for name in names]
        worst = all_reduce_max(torch.tensor([0.0, *found], device=device), axis).tolist()[1:]
        for name, difference in zip(names, worst, strict=True):
            if difference > _TOLERANCE:
                raise ValueError(
                    f"{name or 'the module'}: its {what} differs from that of the whole module, by "
                    f"{difference:.1e} of its size; usual causes: {causes}. {_AFTERWARDS}"
                )


def guess_example(module: nn.Module, tp: int) -> Example:
    """Returns a tiny input of a model of transformers: two sequences of ids, or two images. Raises ValueError for any
    other module."""
    config, known = getattr(module, "config", None), inspect.signature(module.forward).parameters
    if "pixel_values" in known and isinstance(getattr(config, "image_size", None), int):
        shape = (2, config.num_channels, config.image_size, config.image_size)  # type: ignore[union-attr]
        return {"pixel_values": torch.cos(torch.arange(math.prod(shape), dtype=torch.float32)).view(shape)}
    vocab = getattr(config, "vocab_size", None)
    if "input_ids" not in known or not isinstance(vocab, int):
        raise ValueError(
            f"the split of this {type(module).__name__} is checked with an example, which is not known; try "
            "example=tensor or example={'x': tensor}, what its forward takes, or check=False"
        )
    device = next(module.parameters()).device
    ids = (torch.arange(8 * tp, device=device) * 7 + 1).view(2, -1) % vocab  # tp divides the sequence
    return {name: ids for name in ("input_ids", "decoder_input_ids") if name in known}


def _wave(numbers: int, start: int, device: torch.device) -> Tensor:
    """Returns cosines of start, start + 1, ...: factors that tell a number's place."""
    return torch.arange(start, start + numbers, dtype=torch.float64, device=device).cos()


def _first_number(output: Any) -> Tensor | None:
    """Returns the first tensor of floats in what a module gives."""
    tensors = (each for each in tree_iter(output) if isinstance(each, Tensor))
    return next((each for each in tensors if each.is_floating_point()), None)


@contextmanager
def _hooked(module: nn.Module, found: Trace) -> Iterator[None]:
    """Has the first output of each module written down for a block, and names the innermost in which it fails."""
    # Within experts a rank has the tokens of its own.
    own_work = [f"{name}." for name, part in module.named_modules() if isinstance(part, ExpertsForm)]

    def keep(name: str, output: Any) -> None:
        number = _first_number(output)
        if number is not None and name not in found.outputs and not name.startswith(tuple(own_work)):
            found.outputs[name] = Figures.of(number)

    with failures_named(module, keep):
        yield


@contextmanager
def failures_named(module: nn.Module, keep: Callable[[str, Any], None] = lambda name, output: None) -> Iterator[None]:
    """Gives `keep` each module's name and output for a block. What fails inside a module becomes a RuntimeError that
    names the innermost."""
    inside: list[str] = []

    def enter(name: str, part: nn.Module, inputs: Any) -> None:
        inside.append(name)

    def leave(name: str, part: nn.Module, inputs: Any, output: Any) -> None:
        inside.pop()
        keep(name, output)

    hooks = [
        hook
        for name, part in module.named_modules()
        for hook in (
            part.register_forward_pre_hook(partial(enter, name)),
            part.register_forward_hook(partial(leave, name)),
        )
    ]
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{inside[-1]}: {error}" if inside and inside[-1] else str(error)) from error
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _as_in_evaluation(module: nn.Module) -> Iterator[None]:
    """Turns dropout off for a block."""
    were = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, was in were:
            part.training = was


@contextmanager
def _in_float32(module: nn.Module) -> Iterator[None]:
    """Has a module of one 16-bit type in float32 for a block, where a wrong sum is told from a rounded one. The numbers
    are the same afterwards, and buffers of float32 stay what they are."""
    types = {parameter.dtype for parameter in module.parameters()}
    if len(types) != 1 or not types & {torch.bfloat16, torch.float16}:
        yield
        return
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    module.float()
    try:
        yield
    finally:
        module.to(types.pop())
        for part, own in buffers:
            part._buffers.update(own)
