"""Builds what a rank trains from a recipe: stages, sharded and initialised, and their pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature

import torch
from torch import nn
from torch.distributed import DeviceMesh

from parallel3d.config.recipe import ModelConfig, Recipe
from parallel3d.diagnosis.replicas import copies_of, refuse_differences
from parallel3d.engine import Engine
from parallel3d.errors import ConfigError
from parallel3d.layers.parameter import (
    initial_part,
    named_specs,
    set_fused_gradients,
)
from parallel3d.layers.vocabulary import VocabParallelHead
from parallel3d.mesh import Axis, Role, axes_of
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.execution import LossFunction, Stage
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.pipeline.stage import (
    FIRST_PARTS,
    LAST_PARTS,
    BlockRange,
    block_ranges,
    check_nothing_lost,
    cut,
    shared_by_ends,
)
from parallel3d.schedules.balance import balanced_cut, sizes_between
from parallel3d.schedules.schedule import Schedule
from parallel3d.sharding.apply import shard
from parallel3d.sharding.optimizer_parts import ShardedData, local_parameters
from parallel3d.sharding.settings import Dtypes, ShardingOptions

# The constructor of a model, which is built whole, on the meta device, with its layers split over
# `tp`: model_class(config, tp=, sequence_parallel=, recompute=, recompute_every=, device=).
ModelClass = Callable[..., nn.Module]


def block_weights_of(model_class: ModelClass, config: ModelConfig) -> int | None:
    """Returns the weights of one block's matrices, from which MFU is counted. A class of the user's
    may have a static method `block_weights(config)` that knows them; None where it has none."""
    if not config.is_custom:
        return config.block_weights
    formula = getattr(model_class, "block_weights", None)
    return None if formula is None else int(formula(config))


def build_engine(
    model_class: ModelClass,
    recipe: Recipe,
    mesh: DeviceMesh,
    device: torch.device,
    schedule: Schedule,
    loss_fn: LossFunction,
    *,
    initialize: bool,
) -> Engine:
    """Builds the stages, parameters and pipeline of this rank.

    A stage is built on the meta device, split over tp, compiled, sharded over the data axes, and
    filled with weights that depend only on the seed and their names. Without `initialize` it holds
    what the memory held."""
    parallel = recipe.parallel
    pp = mesh[Role.SPLIT_LAYERS]
    tp = mesh[Role.SPLIT_TENSORS]
    build = partial(
        model_class,
        recipe.model,
        tp=tp,
        sequence_parallel=parallel.sequence_parallel,
        recompute="full" if parallel.recompute == "every_n" else parallel.recompute,
        recompute_every=parallel.recompute_every or 1,
        device="meta",
    )
    reference = build()
    ranges = stage_ranges(recipe, schedule)
    dtypes = dtypes_of(recipe)
    masks = recipe.data.documents == "mask"
    if masks and "documents" not in signature(reference.forward).parameters:
        raise ConfigError(
            f"data.documents = mask: the forward of model.architecture = "
            f"{recipe.model.architecture} takes no documents; try data.documents=join, or "
            "documents=None among its arguments, which attention is to stay within"
        )
    named = reference.named_parameters(remove_duplicate=False)
    check_nothing_lost({name for name, _ in named}, ranges)
    aliases = tied_names(reference)
    tied_ends = tuple(sorted(shared_by_ends(aliases, ranges)))
    # Collectives of tp, a split backward, selective recompute and documents, whose lengths change,
    # stay outside of graphs.
    is_cut = schedule.splits or parallel.recompute == "selective"
    compile_parts = compile_pieces if parallel.tp > 1 or is_cut or masks else compile_blocks
    stages = []
    data = []
    parameters = []
    for index in schedule.stages_of(pp.get_local_rank()):
        module = cut(build(), ranges[index])
        set_fused_gradients(module, True)
        if recipe.train.compile:
            compile_parts(module)
        if device.type == "cuda":
            align_logits(module)
        sharded = shard_stage(module, mesh, recipe, dtypes)
        materialize(module, device, offload=parallel.offload)
        sharded.allocate()
        stages.append(
            Stage(module, sharded.before_backward, sharded.after_weights, sharded.drop_gradients)
        )
        data.append(sharded)
        parameters += local_parameters(module, aliases, sharded)
    if initialize:
        specs = dict(named_specs(reference))
        for own in parameters:
            draw = partial(initial_part, specs[own.name], own.name, recipe.train.seed, Axis.of(tp))
            own.part.initialize(draw)
        # Copies differ if a user's initializer has drawn from another generator.
        advice = "an initializer must draw from the generator that it is given, and from no other"
        copies = copies_of(parameters, {}, axes_of(mesh))
        refuse_differences(copies, parallel, device, when="the initial weights", advice=advice)
    # "seq" is this rank's part of the sequence under sequence parallelism.
    boundary = TensorSpec(("batch", "seq", recipe.model.hidden), dtypes.compute)
    pipeline = PipelineRuntime(stages, schedule, pp, loss_fn, boundaries=boundary, device=device)
    count = sum(parameter.numel() for parameter in reference.parameters())
    return Engine(pipeline, data, parameters, axes_of(mesh), tied_ends, parameter_count=count)


def stage_ranges(recipe: Recipe, schedule: Schedule) -> list[BlockRange]:
    """Returns the blocks of each stage: those of the recipe, or balanced by cost."""
    model = recipe.model
    boundaries = recipe.parallel.stage_boundaries
    if boundaries is not None:
        return block_ranges(sizes_between(boundaries, model.layers))
    costs = model.part_costs(recipe.train.seq_len)
    return block_ranges(balanced_cut(model.layers, schedule.stages, costs))


def dtypes_of(recipe: Recipe) -> Dtypes:
    """Returns the dtypes of compute, master weights and gradient reduction."""
    named = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    precision, is_pure, _ = recipe.train.precision.partition("_pure")
    compute = named[precision]
    master = compute if is_pure else torch.float32
    return Dtypes(compute=compute, master=master, reduce=named[recipe.parallel.reduce_dtype])


def shard_stage(module: nn.Module, mesh: DeviceMesh, recipe: Recipe, dtypes: Dtypes) -> ShardedData:
    """Lays a stage over the data ranks. Gradients are summed: a microbatch's loss is divided by the
    tokens of the global batch. Each block travels by itself, and so do the embedding, and the last
    norm with the head."""
    parallel = recipe.parallel
    layers = module.layers
    assert isinstance(layers, nn.ModuleDict)
    blocks = ["layers.*"] if layers else []  # a head may stand alone
    ends = [parts for parts in (FIRST_PARTS, LAST_PARTS) if getattr(module, parts[0]) is not None]
    return shard(
        module,
        mesh,
        parallel.strategy,
        wrap=[*blocks, *ends],
        dtypes=dtypes,
        average=False,
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
    """Lets a GPU multiply into aligned rows of logits, which its fast kernels need, where the
    vocabulary is odd (GPT-2's 50,257). No parameter changes."""
    for part in module.modules():
        if isinstance(part, VocabParallelHead):
            part.pad_to(64)


def materialize(module: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Gives parameters on the meta device memory, on the CPU with `offload`. Tied ones stay tied,
    which `to_empty` alone would undo."""
    tied = tied_names(module)
    module.to_empty(device="cpu" if offload else device)
    for name, buffer in [*module.named_buffers()]:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, buffer.to(device))
    for name, original in tied.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, module.get_parameter(original))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Maps the later name of each parameter that has two names to the first."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if name != original:
            tied[name] = original
    return tied


def compile_blocks(model: nn.Module) -> None:
    """Compiles, in place and at its first use, the forward of each block of `model.layers`; of a
    block that is recomputed its `compute`. Hooks of the block (`fully_shard`'s, the reduction of
    gradients) and recompute stay outside, in any order; collectives of tp are in the graph. A
    forward that `torch.compile` cannot trace whole is an error at its first use, not a slow graph
    in pieces."""
    for block in model.get_submodule("layers").children():
        method = "compute" if hasattr(block, "compute") else "forward"
        # this instance's own
        setattr(block, method, torch.compile(getattr(block, method), fullgraph=True))


def compile_pieces(model: nn.Module) -> None:
    """Compiles, in place and at their first use, the norms, the rotations and the gated products of
    a model: what reads and writes memory most for what it computes. The layers around them stay as
    they are, so that products hide collectives, add their gradients up themselves, and put them off
    for a split backward. A piece that is given more shapes than torch makes graphs for is computed
    as without this."""
    compile_once = cache(torch.compile)
    for part in model.modules():
        if "pointwise" in vars(part):
            part.pointwise = compile_once(part.pointwise)  # type: ignore[assignment]
