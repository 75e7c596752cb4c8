"""A published case as a `PlannedRun`: from the fields that it states, what its source lets one
infer, and defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from parallel3d.config.recipe import Recompute
from parallel3d.planner.hardware.cluster import with_links
from parallel3d.planner.hardware.framework import FrameworkProfile
from parallel3d.planner.memory.ranks import memory_by_rank, needed_bytes
from parallel3d.planner.model.named import named_shape
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout, other_gather
from parallel3d.planner.model.shapes import FeedForward, ModelShape, Positions
from parallel3d.planner.published.fields import Fields, meaning
from parallel3d.planner.published.frameworks import (
    RunTraits,
    in_precision,
    with_float32_sum,
    with_options,
    with_states,
)
from parallel3d.planner.published.knowledge import Knowledge
from parallel3d.schedules.registry import ScheduleName

_DEFAULT_DEVICE = "a100-80gb"
_DEFAULT_VOCAB = 50257  # GPT-2's
_RECOMPUTES: tuple[tuple[Recompute, int], ...] = (
    ("none", 2),
    ("every_n", 4),
    ("every_n", 2),
    ("full", 2),
)
_POSITIONS_OPEN = "model.positional (default)"
# The year of a run that does not state one, by its device.
_OLD_DEVICES = ("v100", "a100", "a800")
_OLD_YEAR = 2022
_YEAR = 2024


def run_of_case(fields: Fields, knowledge: Knowledge) -> PlannedRun:
    """Returns the run of a case, by what the planner knows of frameworks and devices.

    Raises ValueError where the case lacks what no default can fill, or states what cannot be."""
    train = fields.section("train")
    gpu = str(fields.get("hardware", "gpu", _DEFAULT_DEVICE))
    cluster = knowledge.cluster(gpu)
    words = "fp8" if train.get("fp8") else f"{train.get('precision') or ''} {gpu}"
    precision = meaning("precision", words) or "bf16"
    shape = _shape(fields)
    framework = _framework(fields, gpu, precision, shape, knowledge)
    layout = _layout(fields, shape, framework)
    each, left = divmod(shape.layers + 2, layout.stages)
    # embedding and head stand for a layer each
    if fields.said("light_ends") and not left and layout.stages > 1:
        boundaries = tuple(each * stage - 1 for stage in range(1, layout.stages))
        layout = replace(layout, stage_boundaries=boundaries)
    per_node = fields.number("hardware", "gpus_per_node", cluster.gpus_per_node)
    cluster = with_links(
        cluster,
        network_gb_per_s=fields.speed("network_gb_per_s"),
        node_gb_per_s=fields.speed("node_gb_per_s"),
        gpus_per_node=per_node,
    )
    run = PlannedRun(
        shape=shape,
        cluster=cluster,
        layout=layout,
        framework=framework,
        seq_len=fields.number("model", "seq_len", 2048),
        precision=precision,
    )
    return _recomputing(fields, run)


def _recomputing(fields: Fields, run: PlannedRun) -> PlannedRun:
    """Returns a run that recomputes as few blocks as fit, where neither it nor its framework says
    what is recomputed."""
    is_open = "train.activation_recompute (default)" in fields.filled
    if run.layout.recompute != "none" or not is_open:
        return run
    for recompute, every in _RECOMPUTES:
        layout = replace(run.layout, recompute=recompute, recompute_every=every)
        tried = replace(run, layout=layout)
        if needed_bytes(tried, memory_by_rank(tried)) <= run.cluster.device.memory_bytes:
            fields.note("train", "activation_recompute", f"{recompute}, because less does not fit")
            return tried
    return run


def _framework(
    f: Fields, gpu: str, precision: str, shape: ModelShape, knowledge: Knowledge
) -> FrameworkProfile:
    """The framework that a case's framework is, with what its options change of it."""
    is_sharded = (
        f.flag("parallel", "fsdp", False) or f.number("parallel", "zero_stage", 0, least=0) >= 3
    )
    year = f.tree.get("year")
    usual_year = _YEAR
    if any(name in gpu.lower() for name in _OLD_DEVICES):
        usual_year = _OLD_YEAR
    is_gpt = shape.feed_forward == "gelu" and shape.positions == "learned"
    may_write = f.said("softmax_attention") is not False and _POSITIONS_OPEN not in f.filled
    traits = RunTraits(
        year=int(year or usual_year),
        dated=year is not None,
        compiled=bool(f.stated("train", "compile")),
        sharded=is_sharded and f.number("parallel", "pp", 1) == 1,
        gpt=is_gpt and may_write,
    )
    framework = knowledge.profile(f.text("framework"), traits)
    framework = with_options(framework, f.said)
    framework = in_precision(framework, precision)
    return _states(f, framework)


def _states(f: Fields, framework: FrameworkProfile) -> FrameworkProfile:
    """Returns the framework with the states that a run says it keeps: in pure bf16, of another
    optimizer than AdamW."""
    precision = str(f.stated("train", "precision") or "")
    if f.said("float32_sum") or meaning("float32_sum", precision):
        framework = with_float32_sum(framework)
    states = meaning("optimizer_bytes", str(f.stated("train", "optimizer") or ""))
    pure_bf16 = bool(f.said("pure_bf16") or meaning("pure_bf16", precision))
    return with_states(framework, states, pure_bf16=pure_bf16)


def _shape(f: Fields) -> ModelShape:
    # a shape with a name, cut to the layers of the run
    if (name := f.stated("model", "shape")) is not None:
        named = named_shape(str(name), {})
        return replace(named, layers=f.number("model", "layers", named.layers))
    ffn_kind = str(f.get("model", "ffn_kind", "gelu"))
    feed_forward: FeedForward = meaning("feed_forward", ffn_kind) or "gelu"
    is_gpt = feed_forward == "gelu"
    hidden = f.number("model", "hidden")
    heads = f.number("model", "heads", max(1, hidden // 128))
    if hidden < heads:
        raise ValueError(f"model.heads = {heads}: must not exceed model.hidden = {hidden}")
    position = str(f.get("model", "positional", "learned" if is_gpt else "rope"))
    positions: Positions = meaning("positions", position) or "none"
    return ModelShape(
        name=str(f.stated("model", "name") or "unnamed"),
        layers=f.number("model", "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=min(heads, f.number("model", "kv_heads", heads)),
        head_dim=hidden // heads,
        ffn_hidden=f.number("model", "ffn_hidden", 4 * hidden),
        vocab=f.number("model", "vocab", _DEFAULT_VOCAB),
        feed_forward=feed_forward,
        positions=positions,
        position_rows=f.number("model", "seq_len", 2048) if positions == "learned" else 0,
        tied_embeddings=f.flag("model", "tied_embeddings", is_gpt),
        biases=is_gpt,
        layer_norm=feed_forward != "swiglu",
        embedding_norm=positions == "alibi",
    )


def _layout(f: Fields, shape: ModelShape, framework: FrameworkProfile) -> RunLayout:
    tp = f.number("parallel", "tp", 1)
    pp = f.number("parallel", "pp", 1)
    cp = f.number("parallel", "cp", 1)
    if pp > shape.layers:
        raise ValueError(f"parallel.pp = {pp}: must not exceed model.layers = {shape.layers}")
    others = tp * pp * cp
    usual = None
    if f.stated("parallel", "dp") is not None:
        usual = others * f.number("parallel", "dp")
    gpus = f.number("hardware", "gpus", usual)
    dp, rest = divmod(gpus, others)
    if rest:
        rule = f"must be a multiple of tp x pp x cp = {others}"
        raise ValueError(f"hardware.gpus = {gpus}: {rule}")
    if f.number("parallel", "dp", dp) != dp:
        f.note("parallel", "dp", f"{f.stated('parallel', 'dp')} said, {dp} left by {gpus} GPUs")
    microbatch = f.number("train", "micro_batch", 1)
    usual_batch = dp * microbatch
    if pp > 1:
        usual_batch *= 8
    batch = f.number("train", "global_batch_sequences", usual_batch)
    shards = 1
    if f.stated("parallel", "dp_shard") is not None:
        shards = f.number("parallel", "dp_shard", 1)
    is_sharded = bool(f.stated("parallel", "fsdp")) or shards > 1
    usual_zero = 1
    if is_sharded:
        usual_zero = 3
    zero = f.number("parallel", "zero_stage", usual_zero, least=0)
    # Replicas of what is sharded (HSDP) have the optimizer's states sharded alike.
    if zero < 1:
        usual_shards = 1
    elif zero >= 3 and 1 < shards < dp:
        usual_shards = shards * cp
    else:
        usual_shards = dp * cp
    said_shards = f.number("parallel", "optimizer_shard", usual_shards, least=0)
    optimizer = min(dp * cp, max(1, said_shards))
    schedule = str(f.get("parallel", "schedule", framework.default_schedule)).lower()
    # A run that interleaves and does not say how finely has as many stages a rank as divide the
    # layers, at most 8.
    even = [v for v in range(1, 9) if shape.layers % (pp * v) == 0]
    usual_virtual = 1
    if schedule.startswith("interleaved") and pp > 1:
        usual_virtual = max(even, default=min(2, shape.layers // pp))
    virtual = max(1, f.number("parallel", "vpp", usual_virtual, least=0))
    if shape.layers + 2 < pp * virtual:
        virtual = 1
    sequence_parallel = f.flag("parallel", "sequence_parallel", framework.default_sequence_parallel)
    recompute = str(f.get("train", "activation_recompute", framework.default_recompute))
    microbatches = max(1, round(batch / (dp * microbatch)))
    return RunLayout(
        pp=pp,
        dp_shard=dp,
        tp=tp,
        cp=cp,
        ep=f.number("parallel", "ep", 1),
        expert_tp=f.number("parallel", "etp", 1),
        virtual_stages=virtual,
        # Casts, because some schedules and a recompute are of those frameworks alone.
        schedule=cast(
            ScheduleName,
            "interleaved_1f1b" if virtual > 1 else meaning("schedule", schedule) or "1f1b",
        ),
        microbatch_size=microbatch,
        microbatches=microbatches,
        gather=other_gather(pp, microbatches),
        parameter_shards=optimizer if zero >= 3 else 1,
        gradient_shards=optimizer if zero >= 2 else 1,
        optimizer_shards=optimizer,
        sequence_parallel=sequence_parallel,
        recompute=cast(Recompute, meaning("recompute", recompute) or "none"),
        recompute_every=2,
    )
