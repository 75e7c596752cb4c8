"""The data dimension: parameters, gradients and optimizer states sharded over dp_shard and repeated over dp_replicate.

torch's `fully_shard` does the work; here is how it is asked. Gradients are summed, not averaged, over the data ranks,
because the loss of a microbatch is already divided by the tokens of the global batch. Over several microbatches,
parameters are gathered once a step and gradients reduced once, in the last backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from parallel3d.config import Precision

COMPUTE_DTYPE: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard(model: nn.Module, mesh: DeviceMesh, *, precision: Precision, once_a_step: bool) -> None:
    """FULL_SHARD (ZeRO-3, Rajbhandari et al. 2020, arXiv 1910.02054) over dp_shard; with dp_replicate > 1 HYBRID_SHARD:
    the shards' gradients are also summed over the replicas. Each block of `model.layers` is a group of its own.

    `once_a_step`: gathered parameters are kept from the first forward to the last backward of a step; else they are
    freed after each block's forward and gathered again for its backward.
    With bf16, parameters are kept and reduced in float32 and computed with in bf16.
    One data rank and float32 need none of this, and nothing is done.
    """
    replicas, shards = mesh["dp_replicate"].size(), mesh["dp_shard"].size()
    if replicas * shards == 1 and precision == "fp32":
        return
    data_mesh = mesh["dp_replicate", "dp_shard"] if replicas > 1 else mesh["dp_shard"]
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = model.layers
    assert isinstance(blocks, nn.ModuleDict)
    for block in blocks.values():
        fully_shard(block, mesh=data_mesh, mp_policy=policy, reshard_after_forward=not once_a_step)
    fully_shard(model, mesh=data_mesh, mp_policy=policy, reshard_after_forward=False)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # Summed by a plain sum, which gloo has too, and divided by nothing.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def reduce_in_last_backward(model: nn.Module) -> Callable[[bool], None]:
    """A function to call before each backward of `model` with whether it is the step's last: only then are gradients
    reduced and parameters freed."""
    if not isinstance(model, FSDPModule):
        return lambda last: None
    sharded: FSDPModule = model
    current: bool | None = None

    def before_backward(last: bool) -> None:
        nonlocal current
        if last == current:  # the three calls below walk the whole model
            return
        current = last
        sharded.set_requires_gradient_sync(last)
        sharded.set_is_last_backward(last)
        sharded.set_reshard_after_backward(last)

    return before_backward


def reduce_after_weights(model: nn.Module, before_backward: Callable[[bool], None]) -> Callable[[bool], None]:
    """A function to call after each second half of a split backward of `model`, with whether its gradients are then
    complete; `before_backward` is what `reduce_in_last_backward` gave for it. What `fully_shard` does at the end of a
    backward it did after the first half, without those gradients: here it is done with them."""
    if not isinstance(model, FSDPModule):
        return lambda last: None
    root = fully_shard.state(model)  # type: ignore[attr-defined]  # torch's own pipeline reaches its groups so, too

    def after_weights(last: bool) -> None:
        groups = [group for state in root._state_ctx.all_states for group in _parameter_groups(state)]
        if not last:
            for parameter in (parameter for group in groups for parameter in group.fsdp_params):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            return
        before_backward(True)
        for group in reversed(groups):
            group.post_backward()
        root._root_post_backward_final_callback()

    return after_weights


def _parameter_groups(state: Any) -> list[Any]:
    """A module's, of which torch 2.11 has one or none and 2.13 a list."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def free_gathered(model: nn.Module) -> None:
    """Frees the gathered parameters that a forward without a backward leaves behind."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
