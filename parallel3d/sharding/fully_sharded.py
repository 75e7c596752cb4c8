"""The strategies that split parameters at rest, by torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from parallel3d.layers.collectives import reduce_scatter_single
from parallel3d.mesh import DATA_ROLES, Role
from parallel3d.sharding.optimizer_parts import ShardedData
from parallel3d.sharding.settings import Reduction, ShardingOptions
from parallel3d.sharding.units import CommunicationUnit
from parallel3d.torch_private import keep_delayed_gradients, reduce_delayed_gradients


class ReduceScatterIn:
    """A reduce-scatter of `fully_shard` that sends `dtype`, whatever the dtype in which gradients
    are added up."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for what is sent, or for what arrives."""
        return torch.empty(*size, dtype=self._dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        return reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class FullyShardedData(ShardedData):
    """The model over the data ranks where parameters are split at rest.

    With `frees_forward` the parameters are freed after each forward of a unit, and gathered again
    for its backward: but those of a head stay, because its backward comes next, and tables that are
    looked up do not come back. Over the replicas gradients are summed in the last backward of a
    step, whatever `options.reduce` is. `fully_shard` finds the memory that its parameters have got,
    and waits for gradients at the end of the backward.
    """

    _repeated_over = frozenset({Role.REPLICATE})

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[CommunicationUnit],
        reduction: Reduction,
        options: ShardingOptions,
        *,
        frees_forward: bool,
    ) -> None:
        super().__init__(model)
        dtypes = reduction.dtypes
        self._shards = reduction.shard
        self._frees_each = options.gather == "microbatch"
        self._reduces_each = options.reduce == "microbatch"
        # what `fully_shard` was last told of the backward under way
        self._current: bool | None = None
        # the dtype in which microbatches are added up
        summed = torch.promote_types(dtypes.master, dtypes.reduce)
        if any(parameter.dtype != dtypes.master for parameter in model.parameters()):
            model.to(dtypes.master)
        names = DATA_ROLES if reduction.replicate.size > 1 else Role.SHARD_PARAMETERS
        policy = MixedPrecisionPolicy(
            param_dtype=dtypes.compute if dtypes.compute != dtypes.master else None,
            reduce_dtype=summed if summed != dtypes.compute else None,
        )
        offload = OffloadPolicy()
        if options.offload:
            offload = CPUOffloadPolicy(pin_memory=reduction.mesh.device_type == "cuda")
        split = partial(
            fully_shard, mesh=reduction.mesh[names], mp_policy=policy, offload_policy=offload
        )
        travelling = [unit for unit in units if unit.modules]
        for unit in reversed(travelling):  # inner ones first
            modules: Any = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            split(modules, reshard_after_forward=frees_forward and not unit.has_head)
        self._root = split(model, reshard_after_forward=False)
        heads = [unit.modules[0] for unit in travelling if unit.has_head]
        self._heads = [self._root, *_sharded(heads)]
        self._units = _sharded(model.modules())
        for module in self._units:
            if summed != dtypes.reduce:
                module.set_custom_reduce_scatter(ReduceScatterIn(dtypes.reduce))  # type: ignore[arg-type]
            if not reduction.average:
                # A plain sum, which gloo has too, divided by nothing.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        # In the backward pass torch finds the next unit to gather ahead in the order of the
        # forward passes. Before the first unit it would find the last one of another microbatch, so
        # the first unit names itself.
        chain = _sharded(unit.modules[0] for unit in travelling)
        depth = options.prefetch
        if chain and not travelling[0].has_head:
            chain[0].set_modules_to_backward_prefetch([chain[0]])
        for at, (module, unit) in enumerate(zip(chain, travelling, strict=True)):
            module.set_unshard_in_backward(not (frees_forward and unit.is_looked_up))
            if depth is not None:
                module.set_modules_to_forward_prefetch(chain[at + 1 : at + 1 + depth])
                if at > 0:
                    module.set_modules_to_backward_prefetch(chain[max(0, at - depth) : at][::-1])

    def before_backward(self, last: bool) -> None:
        # a loss that has taken over a head's work needs its weight before torch gathers it
        for head in self._heads:
            head.unshard()
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
        # If all parameters are frozen, no backward pass has freed what the forward pass gathered.
        self.free_gathered()

    def free_gathered(self) -> None:
        for module in self._units:
            module.reshard()


def _sharded(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
