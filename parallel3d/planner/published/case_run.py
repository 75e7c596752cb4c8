"""A published case as a `PlannedRun`: from the fields that it states, what its source lets one infer, and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from parallel3d.config.recipe import Recompute
from parallel3d.planner.hardware.cluster import Cluster, load_cluster, with_links
from parallel3d.planner.hardware.program import TrainingProgram
from parallel3d.planner.model.planned_run import PlannedRun, RunLayout
from parallel3d.planner.model.shapes import FeedForward, ModelShape, Positions
from parallel3d.planner.published.fields import Fields
from parallel3d.planner.published.programs import NEMO, in_precision, program_of
from parallel3d.planner.published.words import (
    RunOption,
    dropout_of,
    hardware_file,
    network_gb_per_s,
    node_gb_per_s,
    precision_of,
    run_options,
    schedule_of,
    year_of,
)
from parallel3d.schedules.registry import ScheduleName

_DEFAULT_DEVICE = "a100-80gb"
_DEFAULT_VOCAB = 50257  # GPT-2's
_NEW_DEVICES = ("H100", "H200", "H800", "B200")


def run_of_case(fields: Fields, hardware: list[Path], clusters: dict[str, Cluster]) -> PlannedRun:
    """Returns the run of a case. `clusters` has the clusters that were read before, by hardware file, and gets those
    read now.

    Raises ValueError where the case lacks what no default can fill, or states what cannot be."""
    gpu = str(fields.stated("hardware", "gpu"))
    options = run_options(fields.section("options"), fields.text("notes"))
    precision = precision_of(fields.section("train"), gpu)
    program = _program(fields, options, gpu, precision)
    shape = _shape(fields)
    layout = _layout(fields, shape, program)
    if "light_ends" in options:
        layout = replace(layout, stage_boundaries=_light_ends(shape.layers, layout.stages))
    return PlannedRun(
        shape=shape,
        cluster=_cluster(fields, hardware, clusters),
        layout=layout,
        program=program,
        seq_len=fields.number("model", "seq_len", 2048),
        precision=precision,
    )


def _program(f: Fields, options: frozenset[RunOption], gpu: str, precision: str) -> TrainingProgram:
    """The program that a case's framework is, with what its options change of it."""
    framework = f.text("framework")
    # On older devices Megatron-LM is Megatron-Core where a source names its options, else the program of the papers.
    is_core = "names_transformer_impl" in options or "core" in framework.lower()
    is_new_device = any(name in gpu.upper() for name in _NEW_DEVICES)
    is_sharded = f.flag("parallel", "fsdp", False) or f.number("parallel", "zero_stage", 0, least=0) >= 3
    program = program_of(
        framework,
        compiled=bool(f.stated("train", "compile")),
        early=not is_new_device and not is_core,
        year=year_of(f.text("source")),
        fsdp=is_sharded and f.number("parallel", "pp", 1) == 1,
    )
    if "deterministic" in options:
        program = replace(program, attention_speed=0.6 * program.attention_speed, fused_weight_gradient=False)
    if "softmax_attention" in options:
        program = replace(program, attention="softmax")
    if "async_tp" in options:  # as NeMo's userbuffers
        program = replace(program, tp_hidden=max(program.tp_hidden, NEMO.tp_hidden))
    if (dropout := dropout_of(f.text("notes"))) is not None:
        program = replace(program, dropout=dropout > 0)
    if "framework_norms" in options:
        program = replace(program, norm_passes=8.0, norm_extra_bytes=8.0)
    return in_precision(program, precision)


def _shape(f: Fields) -> ModelShape:
    kind = str(f.get("model", "ffn_kind", "gelu")).lower()
    feed_forward: FeedForward = "swiglu" if "glu" in kind else "relu2" if "relu" in kind else "gelu"
    hidden = f.number("model", "hidden")
    heads = f.number("model", "heads", max(1, hidden // 128))
    if hidden < heads:
        raise ValueError(f"model.heads = {heads}: must not exceed model.hidden = {hidden}")
    position = str(f.get("model", "positional", "learned" if feed_forward == "gelu" else "rope")).lower()
    names: Mapping[str, Positions] = {"learned": "learned", "alibi": "alibi", "ro": "rope"}  # rope, rotary
    positions: Positions = next((each for part, each in names.items() if part in position), "none")
    is_gpt = feed_forward == "gelu"
    return ModelShape(
        name=str(f.stated("model", "name") or "unnamed"),
        layers=f.number("model", "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=min(heads, f.number("model", "kv_heads", heads)),
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


def _layout(f: Fields, shape: ModelShape, program: TrainingProgram) -> RunLayout:
    tp, pp, cp, dp = _axes(f, shape)
    microbatch = f.number("train", "micro_batch", 1)
    batch = f.number("train", "global_batch_sequences", dp * microbatch * max(1, 8 * (pp > 1)))
    shards = f.number("parallel", "dp_shard", 1) if f.stated("parallel", "dp_shard") is not None else 1
    is_sharded = bool(f.stated("parallel", "fsdp")) or shards > 1
    zero = f.number("parallel", "zero_stage", 3 if is_sharded else 1, least=0)
    # Replicas of what is sharded (HSDP) have the optimizer's states sharded alike.
    spread_over = 1 if zero < 1 else shards * cp if zero >= 3 and 1 < shards < dp else dp * cp
    optimizer = min(dp * cp, max(1, f.number("parallel", "optimizer_shard", spread_over, least=0)))
    schedule = str(f.get("parallel", "schedule", program.default_schedule)).lower()
    usual_virtual = _virtual_stages(shape.layers, pp) if schedule.startswith("interleaved") else 1
    virtual = max(1, f.number("parallel", "vpp", usual_virtual, least=0))
    if shape.layers + 2 < pp * virtual:
        virtual = 1
    sequence_parallel = f.flag("parallel", "sequence_parallel", program.default_sequence_parallel)
    recompute = str(f.get("train", "activation_recompute", program.default_recompute)).lower()
    kinds = {"selective": "selective", "op": "op", "layer": "every_n", "full": "full"}
    kind = next((ours for word, ours in kinds.items() if recompute.startswith(word)), "none")
    return RunLayout(
        pp=pp,
        dp_shard=dp,
        tp=tp,
        cp=cp,
        virtual_stages=virtual,
        # Casts, because some schedules and a recompute are of those programs alone.
        schedule=cast(ScheduleName, "interleaved_1f1b" if virtual > 1 else schedule_of(schedule)),
        microbatch_size=microbatch,
        microbatches=max(1, round(batch / (dp * microbatch))),
        parameter_shards=optimizer if zero >= 3 else 1,
        gradient_shards=optimizer if zero >= 2 else 1,
        optimizer_shards=optimizer,
        sequence_parallel=sequence_parallel,
        recompute=cast(Recompute, kind),
        recompute_every=2,
    )


def _axes(f: Fields, shape: ModelShape) -> tuple[int, int, int, int]:
    """The sizes tp, pp, cp and dp, whose product is the number of GPUs. A case's dp that differs from what the other
    axes leave of the GPUs is replaced by that, and noted."""
    tp, pp, cp = (f.number("parallel", axis, 1) for axis in ("tp", "pp", "cp"))
    if pp > shape.layers:
        raise ValueError(f"parallel.pp = {pp}: must not exceed model.layers = {shape.layers}")
    stated = f.stated("parallel", "dp")
    gpus = f.number("hardware", "gpus", tp * pp * cp * f.number("parallel", "dp", 1) if stated is not None else None)
    if gpus % (tp * pp * cp):
        raise ValueError(f"hardware.gpus = {gpus}: must be a multiple of tp x pp x cp = {tp * pp * cp}")
    left = gpus // (tp * pp * cp)
    if f.number("parallel", "dp", left) != left:
        f.note("parallel", "dp", f"{stated} said, {left} left by {gpus} GPUs")
    return tp, pp, cp, left


def _virtual_stages(layers: int, pp: int) -> int:
    """The virtual stages of a run that interleaves and does not say how finely: as many as divide the layers, at most
    8."""
    if pp == 1:
        return 1
    even = [v for v in range(1, 9) if layers % (pp * v) == 0]
    return even[-1] if even else 2 if layers >= 2 * pp else 1


def _light_ends(layers: int, stages: int) -> tuple[int, ...] | None:
    """The first layer of each stage but the first, where embedding and head stand for a layer each; None where that is
    uneven."""
    each, left = divmod(layers + 2, stages)
    return None if left or stages < 2 else tuple(each * stage - 1 for stage in range(1, stages))


def _cluster(f: Fields, hardware: list[Path], clusters: dict[str, Cluster]) -> Cluster:
    gpu = str(f.get("hardware", "gpu", _DEFAULT_DEVICE)).lower()
    known = hardware_file(gpu)
    if known is None and gpu not in {path.stem for folder in hardware for path in folder.glob("*.yaml")}:
        raise ValueError(f"hardware.gpu = {gpu}: no hardware file; --hardware FOLDER with {gpu}.yaml would tell")
    name = known or gpu
    if name not in clusters:
        clusters[name] = load_cluster(name, hardware)
    per_node = f.number("hardware", "gpus_per_node", clusters[name].gpus_per_node)
    return with_links(
        clusters[name],
        network_gb_per_s=network_gb_per_s(str(f.stated("hardware", "inter_bw") or ""), per_node),
        node_gb_per_s=node_gb_per_s(str(f.stated("hardware", "intra_bw") or "")),
        gpus_per_node=per_node,
    )
