"""The layers over tp against themselves on one process: outputs, input gradients and every parameter's, in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed import DeviceMesh, get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from parallel3d.host_memory.exchange import SLOT_BYTES
from parallel3d.layers.attention import ParallelAttention
from parallel3d.layers.collectives import (
    all_reduce,
    all_reduce_max,
    gather,
    reduce_scatter,
)
from parallel3d.layers.linear import ColumnParallelLinear, RowParallelLinear
from parallel3d.layers.loss import vocab_parallel_cross_entropy
from parallel3d.layers.mlp import ParallelMLP
from parallel3d.layers.norm import RMSNorm
from parallel3d.layers.parameter import ParallelModule, Placement, set_fused_gradients
from parallel3d.layers.positions import RotaryEmbedding
from parallel3d.layers.vocabulary import VocabParallelEmbedding
from parallel3d.mesh import Axis

B, S, D = 2, 8, 16
F64 = torch.float64

Build = Callable[[DeviceMesh | None, bool], ParallelModule]


def attention(tp: DeviceMesh | None, sp: bool) -> ParallelModule:
    return ParallelAttention(D, 8, 4, rotary=RotaryEmbedding(2), tp=Placement(tp, sp, dtype=F64))


def mlp(tp: DeviceMesh | None, sp: bool) -> ParallelModule:
    return ParallelMLP(D, 24, tp=Placement(tp, sp, dtype=F64))


def norm(tp: DeviceMesh | None, sp: bool) -> ParallelModule:
    return RMSNorm(D, tp=Placement(tp, sp, dtype=F64))


BUILD: dict[str, Build] = {"attention": attention, "mlp": mlp, "norm": norm}


def own_part(x: Tensor, sp: bool) -> Tensor:
    return x.chunk(get_world_size(), dim=1)[get_rank()] if sp else x


def compare_layer(name: str, sp: bool, fused: bool) -> None:
    """Compares two layers of the same seed on the same input, by two backwards, so that gradients add up."""
    tp = init_device_mesh("cpu", (get_world_size(),))
    torch.manual_seed(0)
    alone = BUILD[name](None, False)
    torch.manual_seed(0)
    parallel = BUILD[name](tp, sp)
    set_fused_gradients(parallel, fused)
    for _ in range(2):
        x, grad = torch.randn(2, B, S, D, dtype=F64)
        x_alone, x_parallel = x.clone().requires_grad_(), own_part(x, sp).clone().requires_grad_()
        y_alone, y_parallel = alone(x_alone), parallel(x_parallel)
        y_alone.backward(grad)
        y_parallel.backward(own_part(grad, sp))
        torch.testing.assert_close(y_parallel, own_part(y_alone, sp), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(x_parallel.grad, own_part(x_alone.grad, sp), rtol=1e-10, atol=1e-12)
    for key, parameter in alone.named_parameters():
        ours = parallel.get_parameter(key)
        assert isinstance(ours, DTensor) and isinstance(ours.grad, DTensor)
        assert torch.equal(ours.full_tensor(), parameter)
        gradient = ours.grad.full_tensor()
        if fused and sp and name == "norm":  # left partial, to be summed once a step
            torch.distributed.all_reduce(gradient)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-10, atol=1e-12)


def compare_vocabulary(sp: bool) -> None:
    """Compares embedding, head and loss on ids of every rank's rows; no rank ever has all logits."""
    tp = init_device_mesh("cpu", (get_world_size(),))
    vocab = 12
    torch.manual_seed(0)
    embed, head = (
        VocabParallelEmbedding(vocab, D, tp=Placement(dtype=F64)),
        ColumnParallelLinear(D, vocab, tp=Placement(dtype=F64)),
    )
    torch.manual_seed(0)
    p_embed = VocabParallelEmbedding(vocab, D, tp=Placement(tp, sp, dtype=F64))
    p_head = ColumnParallelLinear(D, vocab, tp=Placement(tp, sp, dtype=F64))
    ids, labels = torch.randint(0, vocab, (2, B, S))
    weights = torch.rand(B, S)
    losses = vocab_parallel_cross_entropy(head(embed(ids)), labels)
    p_logits = p_head(p_embed(ids))
    assert p_logits.shape == (B, S, vocab // get_world_size())
    p_losses = vocab_parallel_cross_entropy(p_logits, labels, tp)
    torch.testing.assert_close(p_losses, losses, rtol=1e-6, atol=1e-6)  # the loss is float32 by design
    (losses * weights).sum().backward()
    (p_losses * weights).sum().backward()
    for ours, plain in ((p_embed, embed), (p_head, head)):
        assert isinstance(ours.weight.grad, DTensor)
        torch.testing.assert_close(ours.weight.grad.full_tensor(), plain.weight.grad, rtol=1e-5, atol=1e-7)


def compare_sequence_collectives() -> None:
    """Gather and reduce-scatter along dim 1, for a batch of one and of more, against the same by hand."""
    axis, n, rank = Axis.of(init_device_mesh("cpu", (get_world_size(),))), get_world_size(), get_rank()
    for batch in (1, 3):
        for features in (2, SLOT_BYTES // 8):  # through shared memory, and by the backend
            whole = torch.arange(float(batch * S)).view(batch, S, 1).expand(batch, S, features)
            part, total = whole.chunk(n, dim=1)[rank], n * (n + 1) / 2
            assert torch.equal(gather(part, axis), whole)
            assert torch.equal(reduce_scatter(whole * (rank + 1), axis), part * total)
            assert torch.equal(all_reduce(part * 1.0, axis), sum(whole.chunk(n, dim=1)))
            assert torch.equal(all_reduce_max(part * 1.0, axis), whole.chunk(n, dim=1)[-1])


def refuse_sizes() -> None:
    tp = init_device_mesh("cpu", (get_world_size(),))
    with pytest.raises(ValueError, match=r"ColumnParallelLinear.weight \[7, 4\]: dim 0 of size 7 .* tp = 2"):
        ColumnParallelLinear(4, 7, tp=tp)
    with pytest.raises(ValueError, match="RowParallelLinear"):
        RowParallelLinear(5, 4, tp=tp)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["whole_sequence", "sequence_parallel"])
@pytest.mark.parametrize("fused", [False, True], ids=["autograd", "fused"])
@pytest.mark.parametrize("name", BUILD)
def test_layer_over_tp_is_the_layer_alone(world: Callable, size: int, name: str, sp: bool, fused: bool) -> None:
    world(size).run(compare_layer, name, sp, fused)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["whole_sequence", "sequence_parallel"])
def test_vocabulary_over_tp_is_the_vocabulary_alone(world: Callable, size: int, sp: bool) -> None:
    world(size).run(compare_vocabulary, sp)


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_collectives_join_and_split_dim_1(world: Callable, size: int) -> None:
    world(size).run(compare_sequence_collectives)


def test_sizes_that_tp_does_not_divide_are_refused(world: Callable) -> None:
    world(2).run(refuse_sizes)
