"""The strategies that split parameters at rest, by torch's `fully_shard`; and one data rank, which needs none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from parallel3d.sharding.bucket import DataAxes
from parallel3d.sharding.dtypes import Dtypes
from parallel3d.sharding.parts import OptimizerPart, ShardedPart
from parallel3d.sharding.units import CommunicationUnit
from parallel3d.torch_private import keep_delayed_gradients, reduce_delayed_gradients


class FullyShardedData:
    """What `shard` gives where parameters are split at rest.

    `frees_forward`: parameters are freed after each forward of a unit, and gathered again for its backward.
    `frees_each`: they are freed after each backward, else only after the step's last. `reduces_each`: gradients are
    reduced in each backward, else only in the last; over the replicas only in the last in either case.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[CommunicationUnit],
        mesh: DeviceMesh,
        axes: DataAxes,
        *,
        frees_forward: bool,
        frees_each: bool,
        reduces_each: bool,
        dtypes: Dtypes,
        average: bool,
        prefetch: int | None,
    ) -> None:
        data_mesh = mesh["dp_replicate", "dp_shard"] if axes.replicate.size > 1 else mesh["dp_shard"]
        self._root = _fully_shard(model, units, data_mesh, frees_forward=frees_forward, dtypes=dtypes)
        self._shards = axes.shard
        self._frees_each, self._reduces_each = frees_each, reduces_each
        self._current: bool | None = None
        for part in _parts_of(model):
            if not average:
                # Summed by a plain sum, which gloo has too, and divided by nothing.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        if prefetch is not None:
            _prefetch([unit.modules[0] for unit in units if unit.modules], prefetch)

    def allocate(self) -> None:
        """`fully_shard` finds the memory that its parameters have got by itself."""

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        """Of the parameter that `module` holds as `attribute`."""
        shards = self._shards
        repeated = frozenset({"dp_replicate"})
        return ShardedPart.of(
            partial(getattr, module, attribute), repeated_over=repeated, rank=shards.rank, ranks=shards.size
        )

    def before_backward(self, last: bool) -> None:
        """Tells of each backward whether it is the step's last. Without it, each is."""
        self._root.unshard()  # a loss that has taken over the head's work needs its weight before torch gathers it
        self._say(last)

    def _say(self, last: bool) -> None:
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
        """Tells that the weights' half of a split backward is done, and whether it is the step's last. What
        `fully_shard` does at the end of a backward it did after the first half, without those gradients: here it is
        done with them."""
        keep_delayed_gradients(self._root)
        if last:
            self._say(True)
            reduce_delayed_gradients(self._root)

    def finish_gradients(self) -> None:
        """`fully_shard` has waited for them at the end of the backward."""

    def clear_gradients(self) -> None:
        for parameter in self._root.parameters():  # type: ignore[attr-defined]
            parameter.grad = None

    def publish(self) -> None:
        """The optimizer steps the parameters themselves."""

    def free_gathered(self) -> None:
        """Frees the gathered parameters that a forward without a backward leaves behind."""
        for part in _parts_of(self._root):  # type: ignore[arg-type]
            part.reshard()


class SingleRankData:
    """What `shard` gives for one data rank in one precision: nothing is done."""

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
    model: nn.Module, units: Sequence[CommunicationUnit], data_mesh: DeviceMesh, *, frees_forward: bool, dtypes: Dtypes
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
    """Each gathers the next `depth` ahead in the forward, and those before it in the backward."""
    for at, module in enumerate(modules):
        assert isinstance(module, FSDPModule)
        module.set_modules_to_forward_prefetch(_sharded(modules[at + 1 : at + 1 + depth]))
        module.set_modules_to_backward_prefetch(_sharded(modules[max(0, at - depth) : at][::-1]))


def _sharded(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]


def _parts_of(model: nn.Module) -> list[FSDPModule]:
    return [part for part in model.modules() if isinstance(part, FSDPModule)]
