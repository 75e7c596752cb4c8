"""`parallelize` wraps a model in a `ParallelModel`, whose training step works in every layout.

    model = parallelize(model, mesh, sharding="FULL_SHARD", schedule="1f1b", microbatches=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for inputs, labels in loader:
        loss = model.forward_backward(inputs, labels, loss_fn)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.zero_grad()

[Note: two kinds of parameters] The modules of a stage compute with one set of tensors, and the
optimizer updates a second set, because a strategy may all-gather, cast or split the first.
`ParallelModel` holds the second set under the names of the full model, as DTensors if a parameter
is split over ranks. torch's optimizers, norms and state dicts therefore see global tensors. Hooks
on all optimizers check the order of calls, and copy updated values to the modules after each step.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from parallel3d.config.sharding_strategies import ShardingName
from parallel3d.engine import Engine, gradient_of
from parallel3d.layers.collectives import all_reduce_over
from parallel3d.layers.parameter import ParallelModule
from parallel3d.layers.weight_gradients import like_parameter
from parallel3d.mesh import DATA_ROLES, Axis, Role
from parallel3d.pipeline.boundary import Boundary, Message, TensorSpec
from parallel3d.pipeline.execution import LossFunction, Stage
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.pipeline.split_model import SplitSpec, spec_of, split_model
from parallel3d.pipeline.stage import cut_by_names
from parallel3d.schedules.build import build_schedule
from parallel3d.schedules.registry import ScheduleName
from parallel3d.sharding.apply import shard
from parallel3d.sharding.optimizer_parts import LocalParameter, local_parameters
from parallel3d.sharding.settings import Dtypes, ShardingOptions
from parallel3d.sharding.units import Wrap

Split = SplitSpec | Sequence[str]


def parallelize(
    model: nn.Module | Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    sharding: ShardingName = "FULL_SHARD",
    schedule: ScheduleName = "1f1b",
    microbatches: int = 1,
    virtual_stages: int = 1,
    split: Split | None = None,
    boundaries: Sequence[int] | None = None,
    wrap: Wrap = None,
    dtypes: Dtypes | None = None,
    options: ShardingOptions | None = None,
) -> ParallelModel:
    """Distributes a model over the ranks of a mesh for training.

    Call it on every rank with the same arguments. Then build the optimizer from `parameters()` of
    the result.

    Args:
        model: Full model, identical on every rank, or the list of this rank's stages. If tp > 1,
            its layers must already be split over tp.
        mesh: Mesh with axes among pp, dp_replicate, dp_shard and tp. Missing axes have size 1.
        sharding: Data-parallel strategy (docs/reference/sharding.md).
        schedule: Pipeline schedule. Without a pipeline, microbatches run one after another.
        microbatches: Number of equal parts into which each rank's batch is split.
        virtual_stages: Number of stages per pipeline rank. "zb_v" and "dualpipe_v" need 2.
        split: How to split the model into stages: names of modules that run in sequence, or a
            `SplitSpec`. Default: the children of a Sequential, or the built-in `SplitSpec` for a
            Hugging Face model.
        boundaries: Index of the first module or block of each stage except the first. Default:
            similar numbers of parameters, or of blocks with a `SplitSpec`.
        wrap: Modules whose parameters are all-gathered together, as in `shard`.
        dtypes: Data types, as in `shard`. Default: the dtype of the model's parameters.
        options: Communication options, as in `shard`.

    Returns:
        `ParallelModel`, which has the methods of a training step.

    Raises:
        ValueError: The arguments are invalid or do not fit together.

    Example:
        >>> model = parallel3d.parallelize(model, mesh, schedule="1f1b", microbatches=8)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> loss = model.forward_backward(inputs, labels, loss_fn)
        >>> optimizer.step()
        >>> model.zero_grad()
    """
    axes = _axes(mesh)
    layers = axes[Role.SPLIT_LAYERS]
    plan = build_schedule(
        schedule, pp=layers.size, microbatches=microbatches, virtual_stages=virtual_stages
    )
    indices = plan.stages_of(layers.rank)
    if isinstance(model, nn.Module):
        stages = _split(model, plan.stages, split, boundaries)
        own = [stages[index] for index in indices]
    else:
        own = list(model)
    options = options or ShardingOptions(publish_in_forward=True)
    given = [*model.parameters()] if isinstance(model, nn.Module) else []
    data, parameters, calls = [], list[LocalParameter](), []
    for module in own:
        given += module.parameters()
        for part in module.modules():
            if isinstance(part, ParallelModule):
                part.fused_gradients = True
        sharded = shard(module, mesh, sharding, wrap=wrap, dtypes=dtypes, options=options)
        data.append(sharded)
        parameters += local_parameters(module, {}, sharded, axes)
        calls.append(
            Stage(module, sharded.before_backward, sharded.after_weights, sharded.drop_gradients)
        )
    pipeline = PipelineRuntime(
        calls,
        plan,
        mesh[Role.SPLIT_LAYERS] if layers.size > 1 else None,
        boundaries=[()] * (plan.stages - 1),  # The first batch determines them.
        device=mesh.device_type,
    )
    return ParallelModel(Engine(pipeline, data, parameters, axes), given)


class ParallelModel(nn.Module):
    """Distributed model with the methods of a training step. `parallelize` creates it.

    `parameters()` has the parameters that an optimizer updates on this rank.

    Call the methods in the order of the example; a missing or misplaced call raises RuntimeError.
    Exceptions: several `forward_backward` calls accumulate gradients, `clip_grad_norm_` is
    optional, and `zero_grad` without `optimizer.step` discards the gradients.

    Example:
        >>> loss = model.forward_backward(inputs, labels, loss_fn)
        >>> norm = model.clip_grad_norm_(1.0)
        >>> optimizer.step()
        >>> model.zero_grad()
        >>> validation_loss = model.evaluate(inputs, labels, loss_fn)
    """

    def __init__(self, engine: Engine, given: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self._engine = engine
        self._shapes: object = None  # Input shapes for which the boundaries were determined.
        self._stepped: set[nn.Parameter] = set()
        owner = weakref.ref(self)
        self._held: list[tuple[LocalParameter, nn.Parameter]] = []
        names: dict[int, nn.Parameter] = {}
        for own in engine.parameters:
            whole = own.part.distributed(own.local.detach())
            parameter = nn.Parameter(whole, requires_grad=own.local.requires_grad)
            parameter.parallel_model = owner  # type: ignore[attr-defined]
            self._held.append((own, parameter))
            attribute = own.name.rpartition(".")[2]
            names[id(own.module.get_parameter(attribute))] = parameter
        for stage in engine.pipeline.stages.values():
            for path, module in stage.module.named_modules():
                holder = self._holder(path)
                for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
                    holder.register_parameter(name, names[id(tensor)])
                for name, buffer in module.named_buffers(recurse=False):
                    is_saved = name not in module._non_persistent_buffers_set
                    holder.register_buffer(name, buffer, persistent=is_saved)
        for parameter in given:
            parameter.was_parallelized = True  # type: ignore[attr-defined]
        self.register_load_state_dict_post_hook(lambda model, keys: engine.publish())
        _watch_optimizers()

    def _holder(self, path: str) -> nn.Module:
        """Returns the submodule at `path`, which mirrors that of a stage. Creates it if needed."""
        holder: nn.Module = self
        for name in filter(None, path.split(".")):
            if name not in holder._modules:
                holder.add_module(name, nn.Module())
            holder = holder.get_submodule(name)
        return holder

    @property
    def stages(self) -> list[nn.Module]:
        """Modules of this rank's stages."""
        return [stage.module for stage in self._engine.pipeline.stages.values()]

    def forward_backward(
        self, inputs: Any, labels: Any, loss_fn: LossFunction, **keywords: Any
    ) -> Tensor:
        """Runs the forward and backward passes of a batch and accumulates gradients.

        Args:
            inputs: This data-parallel rank's part of the batch, identical on its tp and pipeline
                ranks: a tensor [batch, ...] or a tuple of them.
            labels: Labels of the same part: a tensor [batch, ...], or a tuple or dict of them.
            loss_fn: `loss_fn(output, labels)` returns the mean loss of a microbatch.
            keywords: Tensors [batch, ...] passed to the forward pass of every stage.

        Returns:
            Mean loss over the microbatches and data-parallel ranks, the same on every rank.

        Raises:
            RuntimeError: `zero_grad` was not called after the previous optimizer step.
            ValueError: The batch size is not a multiple of `microbatches`.
        """
        earlier = [parameter.grad for _, parameter in self._held]
        if self._stepped and any(grad is not None for grad in earlier):
            raise RuntimeError(
                "forward_backward: the gradients of the last step were not cleared; call "
                "model.zero_grad() after optimizer.step()"
            )
        earlier = [None if grad is None else grad.clone() for grad in earlier]
        self.zero_grad()
        loss = self._run(inputs, labels, loss_fn, keywords)
        self._engine.finish_gradients()
        for (own, parameter), grad in zip(self._held, earlier, strict=True):
            if own.local.grad is not None:
                parameter.grad = like_parameter(parameter, own.local.grad)
                if grad is not None:
                    parameter.grad += grad
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Any, labels: Any, loss_fn: LossFunction, **keywords: Any) -> Tensor:
        """Computes the loss of a batch without gradients.

        Args:
            inputs: As in `forward_backward`.
            labels: As in `forward_backward`.
            loss_fn: As in `forward_backward`.
            keywords: As in `forward_backward`.

        Returns:
            Mean loss over the microbatches and data-parallel ranks, the same on every rank.
        """
        return self._run(inputs, labels, loss_fn, keywords)

    @torch.compiler.disable
    def forward(self, inputs: Any, **keywords: Any) -> Any:
        """Computes the outputs of a batch. Call it under `torch.no_grad()`.

        Args:
            inputs: As in `forward_backward`.
            keywords: As in `forward_backward`.

        Returns:
            Outputs for `inputs` on ranks with the last stage, None on other ranks.

        Raises:
            RuntimeError: Gradients are enabled.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "model(inputs): cannot run with gradients enabled; use torch.no_grad() for "
                "outputs, or call model.forward_backward(inputs, labels, loss_fn)"
            )
        outputs: list[Any] = self._run(inputs, None, None, keywords)
        return torch.cat(outputs) if outputs else None

    def _run(
        self, inputs: Any, labels: Any, loss_fn: LossFunction | None, keywords: Mapping[str, Any]
    ) -> Any:
        pipeline, axes = self._engine.pipeline, self._engine.axes
        count = pipeline.schedule.microbatches
        parts = _microbatches(inputs, count)
        named = _microbatches(keywords, count)
        shapes = [x.shape for x in _as_tuple(parts[0])]
        if pipeline.schedule.stages > 1 and shapes != self._shapes:
            pipeline.set_boundaries(self._find_boundaries(parts[0], named[0]))
            self._shapes = shapes
        if loss_fn is None:
            outputs = pipeline.forward(parts, keywords=named)
            self._engine.free_gathered()
            return outputs
        pipeline.loss_fn = lambda output, label: loss_fn(output, label) / count
        targets = _microbatches(labels, count)
        if torch.is_grad_enabled():
            loss = pipeline.run(parts, targets, keywords=named)
        else:
            loss = pipeline.evaluate(parts, targets, keywords=named)
            self._engine.free_gathered()
        ranks = {name: axis for name, axis in axes.items() if name != Role.SPLIT_TENSORS}
        return all_reduce_over(ranks, loss) / math.prod(axes[role].size for role in DATA_ROLES)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales gradients so that their norm is at most `max_norm`.

        Args:
            max_norm: Maximum norm of the gradients of the full model.

        Returns:
            Norm of these gradients before clipping, the same on every rank.

        Raises:
            RuntimeError: There are no gradients, or an optimizer has already used them.
        """
        self._need_gradients("clip_grad_norm_", self.parameters())
        square = all_reduce_over(self._engine.axes, self._engine.squared_norm_share())
        norm = square.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for own in self._engine.trained:
            gradient = gradient_of(own)
            gradient.mul_(factor.to(gradient))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets all gradients to None, even if `set_to_none` is False."""
        for _, parameter in self._held:
            parameter.grad = None
        self._stepped.clear()
        self._engine.clear_gradients()

    def publish(self) -> None:
        """Copies or all-gathers the values of `parameters()` into the stages.

        An optimizer step and `load_state_dict` do so automatically. After any other change, call
        this method on every rank.
        """
        self._engine.publish()

    def train(self, mode: bool = True) -> ParallelModel:
        super().train(mode)
        for module in self.stages:
            module.train(mode)
        return self

    def check_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises RuntimeError if there are no unused gradients of `parameters` for an optimizer."""
        self._need_gradients("optimizer.step()", parameters)

    def finish_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Marks the gradients of `parameters` as used, and copies updates into the stages."""
        self._stepped.update(parameters)
        self._engine.publish()

    def _need_gradients(self, call: str, parameters: Iterable[nn.Parameter]) -> None:
        parameters = [*parameters]
        if not self._stepped.isdisjoint(parameters):
            raise RuntimeError(
                f"{call}: the optimizer has already used these gradients; call "
                "model.zero_grad() and model.forward_backward(...) first"
            )
        if all(parameter.grad is None for parameter in parameters):
            raise RuntimeError(
                f"{call}: there are no gradients; call model.forward_backward(...) first"
            )

    @torch.no_grad()
    def _find_boundaries(self, inputs: Any, keywords: Mapping[str, Any]) -> list[Boundary]:
        """Runs the stages once to determine the shapes and dtypes of the tensors between them.

        Collective. Only shapes and dtypes are sent, so later stages get zeros as inputs.
        """
        pipeline, boundaries = self._engine.pipeline, list[Boundary]()
        device = pipeline.links.device
        taken = _as_tuple(inputs)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for index, rank in enumerate(pipeline.schedule.placement[:-1]):
                boundary: Boundary = ()
                if index in pipeline.stages:
                    module = pipeline.stages[index].module
                    was_training = module.training
                    outputs = _as_tuple(module.eval()(*taken, **keywords))
                    module.train(was_training)
                    boundary = tuple(TensorSpec(tuple(y.shape), y.dtype) for y in outputs)
                boundaries.append(pipeline.links.broadcast(boundary, rank))
                taken = tuple(x.zero_() for x in Message(boundaries[-1]).empty(device))
        self._engine.free_gathered()
        return boundaries

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "a parallelized model cannot be moved or cast; do so before parallelize(), or pass "
            "dtypes=Dtypes(...)"
        )

    def __deepcopy__(self, memo: object) -> Any:
        raise RuntimeError(
            "a parallelized model cannot be copied; copy its values with "
            "copy.deepcopy(model.state_dict()), or average lists of model.parameters()"
        )


def _axes(mesh: DeviceMesh) -> dict[str, Axis]:
    """Returns the axis of each role by name. Raises ValueError if the mesh has any other axes."""
    names = mesh.mesh_dim_names or ()
    if not names or {*names} - {*Role}:
        raise ValueError(
            f"mesh with the axes {list(names)}: axes must be among {', '.join(Role)}; try "
            "init_device_mesh(..., mesh_dim_names=('dp_shard',))"
        )
    return {role.value: Axis.of(mesh[role] if role in names else None) for role in Role}


def _split(
    model: nn.Module, stages: int, split: Split | None, boundaries: Sequence[int] | None
) -> Sequence[nn.Module]:
    """Splits a model into stages, by default with similar numbers of parameters or blocks."""
    if stages == 1:
        return [model]
    if split is None and isinstance(model, nn.Sequential):
        split = [name for name, _ in model.named_children()]
    if split is None or isinstance(split, SplitSpec):
        if boundaries is None:
            rules = split or spec_of(model)
            blocks = len([*model.get_submodule(rules.blocks).children()])
            boundaries = [blocks * stage // stages for stage in range(1, stages)]
        return split_model(model, boundaries, split)
    if boundaries is None:
        sizes = []
        for name in split:
            sizes.append(sum(x.numel() for x in model.get_submodule(name).parameters()))
        boundaries = _even_boundaries(sizes, stages)
    return cut_by_names(model, split, boundaries)


def _even_boundaries(sizes: Sequence[int], stages: int) -> list[int]:
    """Returns the index of the first module of stages 1, 2, ..., for stages of similar size."""
    totals, boundaries = list(accumulate(sizes)), [0]
    for stage in range(1, stages):
        at = 1 + bisect_left(totals, totals[-1] * stage / stages)
        first, last = boundaries[-1] + 1, len(sizes) - (stages - stage)
        boundaries.append(min(max(at, first), last))
    return boundaries[1:]


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _microbatches(batch: Any, count: int) -> Sequence[Any]:
    """Splits tensors, or tuples or dicts of them, into `count` equal parts along dim 0."""
    if isinstance(batch, Tensor):
        if batch.shape[0] % count:
            raise ValueError(
                f"batch size {batch.shape[0]}: must be a multiple of microbatches = {count}"
            )
        return batch.chunk(count)
    if isinstance(batch, Mapping):
        parts = {name: _microbatches(x, count) for name, x in batch.items()}
        return [{name: part[at] for name, part in parts.items()} for at in range(count)]
    return list(zip(*(_microbatches(x, count) for x in batch), strict=True))


def _parallelized(optimizer: Optimizer) -> dict[ParallelModel, list[nn.Parameter]]:
    """Returns the parameters that an optimizer updates, grouped by their ParallelModel.

    Raises RuntimeError for an optimizer that was built with the original parameters.
    """
    found: dict[ParallelModel, list[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, "was_parallelized"):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step(): the optimizer was built before "
                    "parallelize(), which replaces parameters; build it on model.parameters() of "
                    "the result"
                )
            model = getattr(parameter, "parallel_model", lambda: None)()
            if model is not None:
                found.setdefault(model, []).append(parameter)
    return found


@cache
def _watch_optimizers() -> None:
    """Registers hooks for all optimizers: `check_step` before a step, `finish_step` after it."""

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for model, parameters in _parallelized(optimizer).items():
            model.check_step(parameters)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for model, parameters in _parallelized(optimizer).items():
            model.finish_step(parameters)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
