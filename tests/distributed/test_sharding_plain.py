"""`shard` on a model of plain torch modules: the same training as DistributedDataParallel and
`fully_shard`, gradients that leave while the backward is under way, and 16-bit parameters with
float32 gradients and masters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from parallel3d.config.sharding_strategies import ShardingName
from parallel3d.mesh import Axis
from parallel3d.sharding.apply import shard
from parallel3d.sharding.optimizer_parts import ShardedData
from parallel3d.sharding.settings import Dtypes, ShardingOptions, own_rows
from parallel3d.tools.bench.counting import CollectiveCounter
from parallel3d.tools.bench.data import finish_step, parts_of

BF16 = Dtypes(
    compute=torch.bfloat16,
    master=torch.float32,
    reduce=torch.float32,
)


class Net(nn.Module):
    """Blocks of 7 rows, one of them used twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(3)]
        )
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return self.last(x)


def data_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))


def own_part(values: Tensor, strategy: ShardingName) -> Tensor:
    """Returns the rows of a parameter that this rank steps."""
    if strategy == "NO_SHARD":
        return values
    return own_rows(values, Axis(2, get_rank(), None))


def own_share(microbatches: int = 2) -> Tensor:
    whole = torch.randn(2 * microbatches, 3, 5, generator=torch.Generator().manual_seed(1))
    return whole.chunk(2)[get_rank()]


def backwards(
    model: nn.Module,
    data: ShardedData,
    x: Tensor,
) -> None:
    for at, microbatch in enumerate(x):
        data.before_backward(at == len(x) - 1)
        (model(microbatch).float().square().mean() / len(x)).backward()


def early_reductions(strategy: ShardingName) -> tuple[int, int, float]:
    """Collectives that had started when the last backward returned, those after all, and the
    largest difference of a gradient from one process's."""
    mesh = data_mesh()
    alone = Net()
    model = Net()
    data = shard(model, mesh, strategy, options=ShardingOptions(bucket_mib=1e-4))
    whole = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1))
    for microbatch in whole:
        (alone(microbatch).square().mean() / 4).backward()
    # gloo's reduce-scatter (sharding.buckets)
    kind = "all_reduce" if strategy == "NO_SHARD" else "all_to_all"
    with CollectiveCounter(mesh) as counter:
        backwards(model, data, own_share())
        early = counter.calls["dp_shard", kind]
        data.finish_gradients()
    parts = parts_of(model, data)
    worst = 0.0
    for name, reference in alone.named_parameters():
        parts[name].sync_views()
        grad = parts[name].local.grad
        rows = own_part(reference.grad, strategy)
        if len(rows):  # a bias of one row is on the first rank alone
            worst = max(worst, float((grad - rows).abs().max()))
    return early, counter.calls["dp_shard", kind], worst


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_OPTIMIZER"])
def test_gradients_leave_while_the_backward_is_under_way(
    world: Callable, strategy: ShardingName
) -> None:
    """Four buckets: three blocks and the rest, which is known only at the end; block 0 is used
    twice and waits for both."""
    for early, all_of_them, worst in world(2).run(early_reductions, strategy):
        assert early == 3
        assert all_of_them == 4
        assert worst < 1e-6


def published_late() -> tuple[list[list[float]], list[int], bool]:
    """Losses of a model that waits for its parameters in the forward, and of one that does not;
    broadcasts under way or done after `publish` and at the beginning of each block; whether the
    state dicts are equal, after a second `publish` too."""
    mesh = data_mesh()
    curves = []
    states = []
    seen = []
    kind = ("dp_shard", "broadcast")  # gloo's all-gather: one from each rank
    for late in (False, True):
        model = Net()
        options = ShardingOptions(bucket_mib=1e-4, publish_in_forward=late)
        data = shard(model, mesh, "SHARD_OPTIMIZER", options=options)
        parts = parts_of(model, data)
        optimizer = torch.optim.SGD([part.local for part in parts.values()], lr=0.1)
        curves.append([])
        for _ in range(3):
            backwards(model, data, own_share())
            finish_step(data, parts, optimizer)
            curves[-1].append(model(own_share()[0]).square().mean().item())
        with CollectiveCounter(mesh) as counter:
            data.publish()
            seen.append(counter.calls[kind])
            for block in model.blocks:
                block[0].register_forward_pre_hook(lambda *args: seen.append(counter.calls[kind]))
            model(own_share()[0])
        data.publish()
        with torch.no_grad():
            for part in parts.values():
                part.local.mul_(2.0)
        data.publish()
        states.append(model.state_dict())
    is_same = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return curves, seen[5:], is_same


def test_stepped_parameters_arrive_while_the_next_forward_is_under_way(world: Callable) -> None:
    """Four buckets, what no block holds first; block 0 is used twice."""
    for (usual, late), seen, is_same in world(2).run(published_late):
        assert late == usual
        assert usual[0] != usual[-1]
        assert seen[:5] == [2, 6, 8, 8, 8]
        assert is_same


def wide_gradients(strategy: ShardingName) -> tuple[set[torch.dtype], set[torch.dtype], float]:
    mesh = data_mesh()
    model = Net()
    exact = Net()
    data = shard(model, mesh, strategy, dtypes=BF16)
    parts = parts_of(model, data)
    optimizer = torch.optim.SGD([part.local for part in parts.values()], lr=0.1)
    start = {name: part.local.detach().clone() for name, part in parts.items()}
    for name, part in parts.items():  # the master has all bits of what the model was made with
        rows = dict(exact.named_parameters())[name].detach()
        assert torch.equal(part.local, own_part(rows, strategy))
    backwards(model, data, own_share(8))
    finish_step(data, parts, optimizer)
    assert any(not torch.equal(start[name], part.local) for name, part in parts.items())
    drift = 0.0
    for name, parameter in model.named_parameters():
        master = parts[name].distributed(parts[name].local.detach())
        whole = master.full_tensor() if isinstance(master, DTensor) else master
        drift = max(drift, float((parameter.detach().float() - whole).abs().max()))
    return (
        {p.dtype for p in model.parameters()},
        {part.local.grad.dtype for part in parts.values()},
        drift,
    )


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_OPTIMIZER"])
def test_sixteen_bit_parameters_have_float32_gradients_and_masters(
    world: Callable, strategy: ShardingName
) -> None:
    for parameters, gradients, drift in world(2).run(wide_gradients, strategy):
        assert parameters == {torch.bfloat16}
        assert gradients == {torch.float32}
        assert 0 < drift < 2**-8, "the model computes with its masters, rounded"


def freed_weights(strategy: ShardingName, dtypes: Dtypes) -> bool:
    model = Net()
    data = shard(model, data_mesh(), strategy, dtypes=dtypes)
    backwards(model, data, own_share(8))
    data.finish_gradients()
    weight = weakref.ref(next(model.parameters()))
    del model, data
    gc.collect()
    return weight() is None


@pytest.mark.parametrize("dtypes", [Dtypes(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_OPTIMIZER", "FULL_SHARD"])
def test_a_model_is_freed_with_its_last_reference(
    world: Callable, strategy: ShardingName, dtypes: Dtypes
) -> None:
    """A hook that holds its parameter would keep weights, gradients and process groups alive."""
    assert all(world(2).run(freed_weights, strategy, dtypes))


def cleared_otherwise() -> None:
    mesh = data_mesh()
    for is_cleared in (True, False):
        model = Net()
        data = shard(model, mesh, "NO_SHARD")
        backwards(model, data, own_share())
        data.finish_gradients()
        if is_cleared:
            model.zero_grad()
        backwards(model, data, own_share())
        with pytest.raises(RuntimeError, match=r"clear_gradients\(\) of the result of shard\(\)"):
            data.finish_gradients()


def test_gradients_that_were_not_cleared_are_refused(world: Callable) -> None:
    world(2).run(cleared_otherwise)


def different_starts() -> list[float]:
    torch.manual_seed(get_rank())
    model = nn.Linear(1, 1)
    data = shard(model, data_mesh(), "FULL_SHARD")
    data.before_backward(True)
    return [float(model(torch.ones(1, 1)).detach())]


def test_data_ranks_start_from_the_weights_of_the_first_one(world: Callable) -> None:
    first, second = world(2).run(different_starts)
    assert first == second


def refusals() -> list[str]:
    data, tp = (
        init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("dp_shard", "dp")
    )
    cases = [
        (Net(), data, "FULLSHARD"),
        (Net(), tp, "FULL_SHARD"),
        (nn.ParameterList([torch.ones(())]), data, "SHARD_OPTIMIZER"),
        (nn.ParameterList([torch.ones(0, 3)]), data, "SHARD_OPTIMIZER"),
    ]
    said = []
    for model, mesh, strategy in cases:
        with pytest.raises(ValueError) as error:
            shard(model, mesh, cast(ShardingName, strategy))
        said.append(str(error.value))
    return said


def test_a_wrong_strategy_mesh_or_parameter_is_refused(world: Callable) -> None:
    strategy, mesh, scalar, empty = world(2).run(refusals)[0]
    assert strategy.startswith("strategy = 'FULLSHARD': must be one of NO_SHARD, SHARD_OPTIMIZER")
    assert mesh.startswith("mesh with the axes ['dp']: one must be called dp_replicate or dp_shard")
    assert scalar.startswith("0 []: a scalar or empty parameter cannot be sharded")
    assert empty.startswith("0 [0, 3]: a scalar or empty parameter cannot be sharded")
