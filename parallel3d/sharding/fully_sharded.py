"""Strategies that shard parameters, based on torch's `fully_shard`."""

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
from parallel3d.layers.experts import ExpertWeights
from parallel3d.mesh import DATA_ROLES, Role
from parallel3d.sharding.optimizer_parts import OptimizerPart, ShardedData
from parallel3d.sharding.settings import Reduction, ShardingOptions
from parallel3d.sharding.units import CommunicationUnit
from parallel3d.torch_private import (
    keep_delayed_gradients,
    reduce_delayed_gradients,
    wrap_communication,
)
from parallel3d.watch.step_clock import timed_as


class ReduceScatterIn:
    """Reduce-scatter for `fully_shard` that sends `dtype` instead of the accumulation dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
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
    """Data-parallel handle of a model with sharded parameters.

    With `frees_forward`, a unit is resharded after its forward pass and all-gathered again for its
    backward pass. The head is not resharded, because its backward pass comes next. Embedding tables
    are not all-gathered again, because no backward pass reads them. Gradients are summed over
    replicas in the last backward pass of a step, whatever `options.reduce` is.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[CommunicationUnit],
        reduction: Reduction,
        of_experts: Reduction,
        options: ShardingOptions,
        *,
        frees_forward: bool,
    ) -> None:
        super().__init__(model)
        dtypes = reduction.dtypes
        self._reduction = reduction
        self._of_experts = of_experts
        self._frees_each = options.gather == "microbatch"
        self._reduces_each = options.reduce == "microbatch"
        # Last value of `last` passed to `fully_shard`, or None before the first.
        self._current: bool | None = None
        # Accumulation dtype of gradients over microbatches.
        summed = torch.promote_types(dtypes.master, dtypes.reduce)
        if any(parameter.dtype != dtypes.master for parameter in model.parameters()):
            model.to(dtypes.master)
        names = DATA_ROLES if reduction.replicate.size > 1 else Role.SHARD_PARAMETERS
        meshes = [each.mesh[names] for each in (reduction, of_experts)]
        policy = MixedPrecisionPolicy(
            param_dtype=dtypes.compute if dtypes.compute != dtypes.master else None,
            reduce_dtype=summed if summed != dtypes.compute else None,
        )
        offload = OffloadPolicy()
        if options.offload:
            offload = CPUOffloadPolicy(pin_memory=reduction.mesh.device_type == "cuda")
        split = partial(fully_shard, mp_policy=policy, offload_policy=offload)
        travelling = [unit for unit in units if unit.modules]
        for unit in reversed(travelling):  # Inner modules must come first.
            modules: Any = unit.modules[0] if len(unit.modules) == 1 else list(unit.modules)
            own_mesh = meshes[unit.has_experts]
            frees = frees_forward and not unit.has_head
            split(modules, mesh=own_mesh, reshard_after_forward=frees)
        self._root = split(model, mesh=meshes[0], reshard_after_forward=False)
        heads = [unit.modules[0] for unit in travelling if unit.has_head]
        self._heads = [self._root, *_sharded(heads)]
        self._units = _sharded(model.modules())
        for module in self._units:
            wrap_communication(module, timed_as("dp"))
            if summed != dtypes.reduce:
                module.set_custom_reduce_scatter(ReduceScatterIn(dtypes.reduce))  # type: ignore[arg-type]
            if not reduction.average:
                # A plain sum, which gloo supports, without a division.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        # In the backward pass, torch prefetches units in the reverse order of the ends of their
        # forward passes. At the first unit it would prefetch the last unit for another microbatch,
        # so the first unit is set to prefetch only itself. A block ends after its experts.
        chain = _sharded(unit.modules[0] for unit in travelling)
        depth = options.prefetch
        if chain and not travelling[0].has_head:
            first = chain[len(chain) > 1 and travelling[1].has_experts]
            first.set_modules_to_backward_prefetch([first])
        for at, (module, unit) in enumerate(zip(chain, travelling, strict=True)):
            module.set_unshard_in_backward(not (frees_forward and unit.is_looked_up))
            if depth is not None:
                module.set_modules_to_forward_prefetch(chain[at + 1 : at + 1 + depth])
                if at > 0:
                    module.set_modules_to_backward_prefetch(chain[max(0, at - depth) : at][::-1])

    def part(self, module: nn.Module, attribute: str) -> OptimizerPart:
        over = self._of_experts if isinstance(module, ExpertWeights) else self._reduction
        find = partial(getattr, module, attribute)
        return OptimizerPart(find, over.shard, frozenset({Role.REPLICATE}))

    def before_backward(self, last: bool) -> None:
        # `head_cross_entropy` reads the weight of the head before torch all-gathers it.
        for head in self._heads:
            head.unshard()
        self._tell(last)

    def _tell(self, last: bool) -> None:
        if last == self._current:  # Avoids the calls below, which traverse the model.
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
        # If all parameters are frozen, no backward pass has resharded them.
        self.free_gathered()

    def free_gathered(self) -> None:
        for module in self._units:
            module.reshard()


def _sharded(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
