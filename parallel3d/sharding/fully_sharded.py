"""The strategies that split parameters at rest, by torch's `fully_shard`; and one data rank, which needs none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from parallel3d.sharding.optimizer_parts import OptimizerPart, ShardedPart
from parallel3d.sharding.settings import DataAxes, Dtypes, ShardingOptions
from parallel3d.sharding.units import CommunicationUnit
from parallel3d.torch_private import keep_delayed_gradients, reduce_delayed_gradients


class FullyShardedData:
    """The model over the data ranks where parameters are split at rest (see `ShardedData`).

    With `frees_forward` the parameters are freed after each forward of a unit, and gathered again for its backward.
    Over the replicas gradients are summed in the last backward of a step, whatever `options.reduce` is.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[CommunicationUnit],
        axes: DataAxes,
        dtypes: Dtypes,
        options: ShardingOptions,
        *,
        frees_forward: bool,
        average: bool,
    ) -> None:
        data_mesh = axes.mesh["dp_replicate", "dp_shard"] if axes.replicate.size > 1 else axes.mesh["dp_shard"]
        self._root = _fully_shard(model, units, data_mesh, frees_forward=frees_forward, dtypes=dtypes)
        self._shards = axes.shard
        self._frees_each = options.gather == "microbatch"
        self._reduces_each = options.reduce == "microbatch"
        self._current: bool | None = None  # what `fully_shard` was last told of the backward under way
        for module in _sharded(model.modules()):
            if not average:
                # A plain sum, which gloo has too, divided by nothing.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if options.prefetch is not None:
            _prefetch([unit.modules[0] for unit in units if unit.modules], options.prefetch)

    def allocate(self) -> None:
        """Does nothing: `fully_shard` finds the memory that its parameters have got."""

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        find, repeated_over = partial(getattr, module, attribute), frozenset({"dp_replicate"})
        return ShardedPart.of(find, repeated_over=repeated_over, rank=self._shards.rank, ranks=self._shards.size)

    def before_backward(self, last: bool) -> None:
        self._root.unshard()  # a loss that has taken over the head's work needs its weight before torch gathers it
        self._tell(last)

    def _tell(self, last: bool) -> None:
        if last == self._current:  # the calls below walk the whole model
            return
        self._current = last
        root = self._root
        root.set_requires_gradient_sync(last or self._reduces_each)
        if self._reduces_each:
            root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(last or self._frees_each)

    def after_weights(self, last: bool) -> None:
        keep_delayed_gradients(self._root)
        if last:
            self._tell(True)
            reduce_delayed_gradients(self._root)

    def finish_gradients(self) -> None:
        """Does nothing: `fully_shard` has waited for the gradients at the end of the backward."""

    def clear_gradients(self) -> None:
        for parameter in self._root.parameters():  # type: ignore[attr-defined]
            parameter.grad = None

    def publish(self) -> None:
        """Does nothing: the optimizer steps the parameters themselves."""

    def free_gathered(self) -> None:
        for module in _sharded(self._root.modules()):  # type: ignore[attr-defined]
            module.reshard()


class SingleRankData:
    """The model on one data rank in one precision (see `ShardedData`): nothing is cut and nothing is sent."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def allocate(self) -> None: ...

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        return ShardedPart.of(partial(getattr, module, attribute), repeated_over=frozenset(), rank=0, ranks=1)

    def before_backward(self, last: bool) -> None: ...

    def after_weights(self, last: bool) -> None: ...

    def finish_gradients(self) -> None: ...

    def clear_gradients(self) -> None:
        self._model.zero_grad()

    def publish(self) -> None: ...

    def free_gathered(self) -> None: ...


def _fully_shard(
    model: nn.Module,
    units: Sequence[CommunicationUnit],
    data_mesh: DeviceMesh,
    *,
    frees_forward: bool,
    dtypes: Dtypes,
) -> FSDPModule:
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes.compute if dtypes.compute != dtypes.master else None,
        reduce_dtype=dtypes.reduce if dtypes.reduce != dtypes.compute else None,
    )
    if any(parameter.dtype != dtypes.master for parameter in model.parameters()):
        model.to(dtypes.master)
    for unit in reversed(units):  # inner ones first
        if unit.modules:
            modules: Any = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            fully_shard(modules, mesh=data_mesh, mp_policy=policy, reshard_after_forward=frees_forward)
    return fully_shard(model, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False)


def _prefetch(modules: Sequence[nn.Module], depth: int) -> None:
    """Lets each module gather the next `depth` ahead in the forward, and those before it in the backward."""
    for at, module in enumerate(modules):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(_sharded(modules[at + 1 : at + 1 + depth]))
        module.set_modules_to_backward_prefetch(_sharded(modules[max(0, at - depth) : at][::-1]))


def _sharded(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
