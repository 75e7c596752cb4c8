"""Linear layers, MLPs, norms and learned positions over tp against plain torch: every option,
dtype, gradient mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.mlp import ACTIVATIONS, Activation, ParallelMLP
from parallel3d.layers.norm import LayerNorm, RMSNorm
from parallel3d.layers.positions import LearnedPositions
from tests.distributed.layer_cases import Case, Weights, check_all, tp_mesh

B, S, D, OUT = 2, 8, 12, 20
SHAPE = (B, S, D)


def linear(weights: Weights, x: Tensor) -> Tensor:
    return F.linear(x, weights["weight"], weights.get("bias"))


def column(bias: bool, gather: bool) -> Case:
    split = None if gather else -1
    return Case(
        name=f"column bias={bias} gather={gather}",
        build=partial(ColumnParallelLinear, D, OUT, bias=bias, gather_output=gather),
        reference=linear,
        shapes=(SHAPE,),
        output_split=split,
        sp_output_split=split,
    )


def row(bias: bool) -> Case:
    return Case(
        name=f"row bias={bias}",
        build=partial(RowParallelLinear, D, OUT, bias=bias),
        reference=linear,
        shapes=(SHAPE,),
        input_split=-1,
        sp_input_split=-1,
    )


def mlp(activation: Activation, bias: bool) -> Case:
    def reference(w: Weights, x: Tensor) -> Tensor:
        up = F.linear(x, w["up.weight"], w.get("up.bias"))
        activate = ACTIVATIONS[activation]
        if "gate.weight" in w:
            gate = F.linear(x, w["gate.weight"], w.get("gate.bias"))
            inner = activate(gate) * up
        else:
            inner = activate(up)
        return F.linear(inner, w["down.weight"], w.get("down.bias"))

    build = partial(ParallelMLP, D, OUT, activation=activation, bias=bias)
    return Case(
        name=f"{activation} bias={bias}",
        build=build,
        reference=reference,
        shapes=(SHAPE,),
    )


def rms_norm(w: Weights, x: Tensor) -> Tensor:
    return F.rms_norm(x, (D,), w["weight"], 1e-5)


def layer_norm(w: Weights, x: Tensor) -> Tensor:
    return F.layer_norm(x, (D,), w["weight"], w.get("bias"), 1e-5)


def norm(
    name: str,
    build: Callable[..., nn.Module],
    reference: Callable[..., Tensor],
) -> Case:
    return Case(name=name, build=build, reference=reference, shapes=(SHAPE,))


def positions(given: bool) -> Case:
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 0, 1, 2, 3]])

    def reference(w: Weights, x: Tensor) -> Tensor:
        return x + (F.embedding(places, w["weight"]) if given else w["weight"][:S])

    arguments = {"positions": places} if given else {}
    return Case(
        name=f"positions given={given}",
        build=partial(LearnedPositions, S + 3, D),
        reference=reference,
        shapes=(SHAPE,),
        arguments=arguments,
    )


GROUPS: dict[str, list[Case]] = {
    "linear": [column(True, False), column(False, True), row(True), row(False)],
    "mlp": [mlp("swiglu", True), mlp("geglu", False), mlp("gelu_tanh", True), mlp("relu", False)],
    "norm": [
        norm("rms", partial(RMSNorm, D), rms_norm),
        norm("layer", partial(LayerNorm, D), layer_norm),
        norm("layer without bias", partial(LayerNorm, D, bias=False), layer_norm),
        positions(False),
        positions(True),
    ],
}


def refusals() -> None:
    tp = tp_mesh()
    with pytest.raises(ValueError, match="copies = 3: must divide tp = 2"):
        ColumnParallelLinear(4, 4, tp=tp, copies=3)
    with pytest.raises(ValueError, match=r"ColumnParallelLinear.weight \[7, 4\]: dim 0 .* tp = 2"):
        ColumnParallelLinear(4, 7, tp=tp)
    with pytest.raises(ValueError, match="activation = silu: must be one of swiglu"):
        ParallelMLP(4, 4, activation="silu", tp=tp)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="9 tokens exceeds the 8 positions"):
        LearnedPositions(8, 4, tp=tp)(torch.zeros(1, 9, 4))


def check_group(name: str) -> None:
    check_all(GROUPS[name])


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("group", GROUPS)
def test_layers_are_plain_torchs_whatever_tp(
    world: Callable,
    size: int,
    group: str,
) -> None:
    world(size).run(check_group, group)


def test_what_cannot_be_is_refused(world: Callable) -> None:
    world(2).run(refusals)
