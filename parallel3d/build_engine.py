"""Builds the stages, parameters and pipeline of a rank from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from inspect import signature

import torch
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.diagnosis.replicas import copies_of, refuse_differences
from parallel3d.engine import Engine
from parallel3d.errors import ConfigError
from parallel3d.layers.experts import ExpertWeights
from parallel3d.layers.parameter import (
    initial_part,
    named_specs,
    set_fused_gradients,
)
from parallel3d.layers.vocabulary import VocabParallelHead
from parallel3d.mesh import Axis, Role, axes_of, expert_mesh
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.execution import LossFunction, Stage
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.pipeline.split_model import cut_stage
from parallel3d.pipeline.stage import (
    BlockRange,
    block_ranges,
    check_nothing_lost,
    names_in,
    shared_by_ends,
)
from parallel3d.schedules.blocks_per_stage import blocks_per_stage, sizes_between
from parallel3d.schedules.schedule import Schedule
from parallel3d.sharding.apply import shard
from parallel3d.sharding.optimizer_parts import ShardedData, local_parameters
from parallel3d.sharding.settings import Dtypes, ShardingOptions

# Builds the full model on the meta device, with its layers split over `tp`. Called as
# model_class(config, tp=, sequence_parallel=, recompute=, recompute_every=, device=), and with the
# axes of `LAYER_AXES` that have several ranks.
ModelClass = Callable[..., nn.Module]


def block_weights_of(model_class: ModelClass, config: ModelConfig) -> float | None:
    """Returns the number of matmul weights in a block, from which MFU is computed.

    Returns None for a custom class without the static method `block_weights(config)`.
    """
    if not config.is_custom:
        return config.block_weights
    formula: Callable[[ModelConfig], float | None] | None
    formula = getattr(model_class, "block_weights", None)
    return None if formula is None else formula(config)


def build_engine(
    model_class: ModelClass,
    recipe: Recipe,
    mesh: DeviceMesh,
    device: torch.device,
    schedule: Schedule,
    loss_fn: LossFunction,
    layer_axes: Mapping[str, Axis],
    *,
    initialize: bool,
) -> Engine:
    """Builds the stages, parameters and pipeline of this rank.

    Each stage is built on the meta device, split over tp, compiled if `train.compile`, and sharded
    over the data-parallel axes. `layer_axes` are those of `mesh.layer_axes`. Initial weights depend
    on the seed, not on the layout. Without `initialize`, parameters stay uninitialized, to be
    loaded from a checkpoint. Raises ConfigError if the model cannot mask documents as requested.
    """
    parallel = recipe.parallel
    pp = mesh[Role.SPLIT_LAYERS]
    tp = mesh[Role.SPLIT_TENSORS]
    experts = expert_mesh(mesh, parallel.expert_ranks)
    split = {name: axis for name, axis in layer_axes.items() if axis.size > 1}
    build = partial(
        model_class,
        recipe.model,
        tp=tp,
        sequence_parallel=parallel.sequence_parallel,
        recompute="full" if parallel.recompute == "every_n" else parallel.recompute,
        recompute_every=parallel.recompute_every or 1,
        device="meta",
        **split,
        **({"ep": experts[Role.SPLIT_TENSORS]} if recipe.model.experts else {}),
    )
    reference = build()
    ranges = stage_ranges(recipe, schedule)
    dtypes = dtypes_of(recipe)
    names = names_in(reference)
    masks = recipe.data.documents == "mask"
    takes = "documents" in signature(reference.forward).parameters or names.positions is not None
    if masks and not takes:
        raise ConfigError(
            f"data.documents = mask: forward() of model.architecture = "
            f"{recipe.model.architecture} has no argument documents; use data.documents=join, or "
            "add documents=None and pass it to the attention"
        )
    named = reference.named_parameters(remove_duplicate=False)
    check_nothing_lost({name for name, _ in named}, ranges, names)
    aliases = tied_names(reference)
    tied_ends = tuple(sorted(shared_by_ends(aliases, ranges, names)))
    # Compiled graphs must not contain collectives of layers, split backward passes, selective
    # recompute, or document masks and experts, whose sizes vary.
    is_cut = schedule.splits or parallel.recompute == "selective"
    sends = parallel.tp > 1 or bool(split) or recipe.model.experts is not None
    compile_parts = compile_pieces if sends or is_cut or masks else compile_blocks
    if hasattr(reference, "split_spec"):  # An existing model. Its graphs break there.
        compile_parts = partial(compile_blocks, fullgraph=False)
    stages = []
    data = []
    parameters = []
    for index in schedule.stages_of(pp.get_local_rank()):
        module = cut_stage(build(), ranges[index])
        set_fused_gradients(module, True)
        if recipe.train.compile:
            compile_parts(module)
        if device.type == "cuda":
            align_logits(module)
        sharded = shard_stage(module, mesh, experts, recipe, dtypes)
        materialize(module, device, offload=parallel.offload)
        sharded.allocate()
        stages.append(
            Stage(module, sharded.before_backward, sharded.after_weights, sharded.drop_gradients)
        )
        data.append(sharded)
        parameters += local_parameters(module, aliases, sharded, axes_of(mesh), axes_of(experts))
    if initialize:
        specs = dict(named_specs(reference))
        for own in parameters:
            tp_axis = own.axes[Role.SPLIT_TENSORS]
            draw = partial(initial_part, specs[own.name], own.name, recipe.train.seed, tp_axis)
            own.part.initialize(draw)
        # Replicas differ if a custom initializer draws from a different generator.
        advice = "an initializer must draw only from the generator that it receives"
        copies = copies_of(parameters, {})
        refuse_differences(copies, parallel, device, when="the initial weights", advice=advice)
    # Under sequence parallelism, "seq" is this tp rank's part of the sequence.
    boundary = TensorSpec(("batch", "seq", recipe.model.hidden), dtypes.compute)
    pipeline = PipelineRuntime(stages, schedule, pp, loss_fn, boundaries=boundary, device=device)
    count = sum(parameter.numel() for parameter in reference.parameters())
    return Engine(pipeline, data, parameters, axes_of(mesh), tied_ends, parameter_count=count)


def stage_ranges(recipe: Recipe, schedule: Schedule) -> list[BlockRange]:
    """Returns the range of blocks in each stage, as set in the recipe or else balanced by cost."""
    model = recipe.model
    boundaries = recipe.parallel.stage_boundaries
    if boundaries is not None:
        return block_ranges(sizes_between(boundaries, model.layers))
    costs = model.part_costs(recipe.train.seq_len)
    return block_ranges(blocks_per_stage(model.layers, schedule.stages, costs))


def dtypes_of(recipe: Recipe) -> Dtypes:
    """Returns the compute, master and reduction dtypes of a recipe."""
    named = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    precision, is_pure, _ = recipe.train.precision.partition("_pure")
    compute = named[precision]
    master = compute if is_pure else torch.float32
    return Dtypes(compute=compute, master=master, reduce=named[recipe.parallel.reduce_dtype])


def shard_stage(
    module: nn.Module, mesh: DeviceMesh, experts: DeviceMesh, recipe: Recipe, dtypes: Dtypes
) -> ShardedData:
    """Shards a stage over the data-parallel axes, and its experts over those of their own mesh.

    Gradients are summed, not averaged, because each microbatch's loss is divided by the number of
    target tokens in the global batch. Sharding units are each block, the experts in each block,
    the embedding, and the final norm with the head.
    """
    parallel = recipe.parallel
    names = names_in(module)
    # Modules that this stage has, with their parameters.
    held = {name for name, part in module.named_modules() if [*part.parameters()]}
    blocks = [name for name, _ in module.get_submodule(names.blocks).named_children()]
    wrap: list[str | tuple[str, ...]] = [f"{names.blocks}.{name}" for name in blocks]
    wrap = [name for name in wrap if name in held]
    wrap += [name for name, part in module.named_modules() if isinstance(part, ExpertWeights)]
    for end in ((*names.first, *names.added), names.last):
        wrap.append(tuple(name for name in end if name in held))
    return shard(
        module,
        mesh,
        parallel.strategy,
        wrap=[unit for unit in wrap if unit],
        dtypes=dtypes,
        average=False,
        experts=experts,
        options=ShardingOptions(
            gather=parallel.gather_cadence,
            reduce=parallel.reduce,
            offload=parallel.offload,
            prefetch=parallel.prefetch,
            bucket_mib=parallel.bucket_mib,
            publish_in_forward=True,
        ),
    )


def align_logits(module: nn.Module) -> None:
    """Pads rows of logits to a multiple of 64 elements, because fast matmuls need aligned rows.

    This helps odd vocabulary sizes, such as GPT-2's 50,257. Parameters are not padded.
    """
    for part in module.modules():
        if isinstance(part, VocabParallelHead):
            part.pad_to(64)


def materialize(module: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Allocates meta parameters on `device`, or on the CPU with `offload`, and buffers on `device`.

    Values are uninitialized. Parameters stay tied, which `to_empty` alone does not ensure.
    """
    tied = tied_names(module)
    buffers = [*module.named_buffers(remove_duplicate=False)]
    module.to_empty(device="cpu" if offload else device)
    for name, buffer in buffers:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, buffer.to(device))
    for name, original in tied.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, module.get_parameter(original))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Maps each further name of a tied parameter to its first name."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if name != original:
            tied[name] = original
    return tied


def compile_blocks(model: nn.Module, *, fullgraph: bool = True) -> None:
    """Compiles the forward pass of each block in `model.layers`, in place and on first use.

    Of blocks with a method `compute`, compiles only that, so that recompute stays outside of the
    graph. Module hooks (`fully_shard`, gradient reduction) also stay outside. With `fullgraph`, a
    graph break is an error.
    """
    for block in model.get_submodule(names_in(model).blocks).children():
        method = "compute" if hasattr(block, "compute") else "forward"
        # Shadow the method on this instance.
        setattr(block, method, torch.compile(getattr(block, method), fullgraph=fullgraph))


def compile_pieces(model: nn.Module) -> None:
    """Compiles only the memory-bound parts of a model: norms, rotary embeddings and gates.

    Other layers stay eager, so that matmuls can overlap collectives, accumulate gradients in place,
    and defer weight gradients in a split backward pass. A part with more shapes than torch's
    recompile limit runs eagerly.
    """
    compile_once = cache(torch.compile)
    for part in model.modules():
        if "pointwise" in vars(part):
            part.pointwise = compile_once(part.pointwise)  # type: ignore[assignment]
