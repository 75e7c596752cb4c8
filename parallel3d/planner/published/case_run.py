"""A published case as a `PlannedRun`: from the fields that it states, what its source lets one infer, and defaults."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from parallel3d.planner.hardware.cluster import Cluster, load_cluster, with_links
from parallel3d.planner.hardware.program import TrainingProgram
from parallel3d.planner.model.planned_run import PlannedRun, RecomputeKind, RunLayout
from parallel3d.planner.model.shapes import FeedForward, ModelShape, Positions
from parallel3d.planner.published.fields import Fields
from parallel3d.planner.published.programs import NEMO, in_precision, program_of

_DEVICES = (  # of `hardware.gpu`, the first that is part of it in lower case -> hardware file
    ("h100-96", "h100-96gb-hbm2e"),
    ("h100-80gb-pcie", "h100-pcie"),
    ("h100", "h100-80gb"),
    ("h800", "h100-80gb"),
    ("h200", "h200"),
    ("gb200", "gb200"),
    ("b200", "b200"),
    ("a800", "a800-80gb"),
    ("a100-40", "a100-40gb"),
    ("a100", "a100-80gb"),
    ("v100", "v100-32gb"),
    ("mi300", "mi300x"),
    ("mi250", "mi250x"),
)
_DEFAULT_DEVICE = "a100-80gb"
_DEFAULT_VOCAB = 50257  # GPT-2's
_NVLINK_GB_PER_S = 25.0  # one NVLink 3 or 4, a direction
_OMNI_PATH_GBIT = 100.0  # one link (Intel Omni-Path 100 series)
_SCHEDULES = {"gpipe": "gpipe", "afab": "gpipe", "zb-1p": "zb-1p", "zb-2p": "zb-2p"}  # others are taken as 1F1B


def run_of_case(fields: Fields, hardware: list[Path], clusters: dict[str, Cluster]) -> PlannedRun:
    """The run of a case. `clusters`: those already read, by hardware file."""
    program = _program(fields)
    shape = _shape(fields)
    layout = _layout(fields, shape, program)
    return PlannedRun(
        shape=shape,
        cluster=_cluster(fields, hardware, clusters),
        layout=layout,
        program=program,
        seq_len=fields.number("model", "seq_len", 2048),
        precision=_precision(fields),
        stage_layers=_stage_layers(fields, shape, layout),
    )


def _program(f: Fields) -> TrainingProgram:
    gpu = str(f.stated("hardware", "gpu")).upper()
    new_device = any(name in gpu for name in ("H100", "H200", "H800", "B200"))
    # On older devices Megatron-LM is Megatron-Core where a source names its options, else the program of the papers.
    notes, framework = f.text("notes"), f.text("framework")
    core = "transformer-impl" in notes or "core" in framework.lower()
    early = not new_device and not core
    year = max((int(found) for found in re.findall(r"(?<!\d)20[12]\d(?=[-_./01]|\b)", f.text("source"))), default=0)
    program = program_of(
        framework, compiled=bool(f.stated("train", "compile")), early=early, year=year, fsdp=_is_plain_fsdp(f)
    )
    if "deterministic-mode" in notes:  # attention's backward without atomics, gradients added by kernels of their own
        program = replace(program, attention_speed=0.6 * program.attention_speed, fused_weight_gradient=False)
    if "attention backend unfused" in notes or "transformer-impl local" in notes:
        program = replace(program, attention="softmax")
    if re.search(r"async[ -]?tp(?: on\b|;)", notes.lower()):  # in pieces beside the matmuls, as NeMo's userbuffers
        program = replace(program, tp_hidden=max(program.tp_hidden, NEMO.tp_hidden))
    dropout = re.search(r"dropout (\d*\.\d+)", notes)
    if dropout:
        program = replace(program, dropout=float(dropout.group(1)) > 0)
    program = in_precision(program, _precision(f))
    if "flash_attention2'" in notes:  # the norm as the framework's own operators (Hagemann et al. 2023, section 4)
        program = replace(program, norm_passes=8.0, norm_extra_bytes=8.0)
    return program


def _is_plain_fsdp(f: Fields) -> bool:
    is_sharded = f.flag("parallel", "fsdp", False) or f.number("parallel", "zero_stage", 0, least=0) >= 3
    return is_sharded and f.number("parallel", "pp", 1) == 1


def is_float8(f: Fields) -> bool:
    return bool(f.stated("train", "fp8")) or "fp8" in str(f.stated("train", "precision") or "").lower()


def _precision(f: Fields) -> str:
    if is_float8(f):
        return "fp8"
    text = str(f.stated("train", "precision") or "").lower()
    return "fp16" if "fp16" in text and "bf16" not in text or "V100" in str(f.stated("hardware", "gpu")) else "bf16"


def _shape(f: Fields) -> ModelShape:
    kind = str(f.get("model", "ffn_kind", "gelu")).lower()
    feed_forward: FeedForward = "swiglu" if "glu" in kind else "relu2" if "relu" in kind else "gelu"
    hidden = f.number("model", "hidden")
    heads = f.number("model", "heads", max(1, hidden // 128))
    if hidden < heads:
        raise ValueError(f"model.heads = {heads}: must not exceed model.hidden = {hidden}")
    position = str(f.get("model", "positional", "learned" if feed_forward == "gelu" else "rope")).lower()
    positions: Positions = (
        "learned"
        if "learned" in position
        else "alibi"
        if "alibi" in position
        else "rope"
        if "ro" in position
        else "none"
    )
    gpt = feed_forward == "gelu"
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
        tied_embeddings=f.flag("model", "tied_embeddings", gpt),
        biases=gpt,
        layer_norm=feed_forward != "swiglu",
        embedding_norm=positions == "alibi",
    )


def _layout(f: Fields, shape: ModelShape, program: TrainingProgram) -> RunLayout:
    tp, pp, cp, dp = _ways(f, shape)
    microbatch = f.number("train", "micro_batch", 1)
    batch = f.number("train", "global_batch_sequences", dp * microbatch * max(1, 8 * (pp > 1)))
    shards = f.number("parallel", "dp_shard", 1) if f.stated("parallel", "dp_shard") is not None else 1
    sharded = bool(f.stated("parallel", "fsdp")) or shards > 1
    zero = f.number("parallel", "zero_stage", 3 if sharded else 1, least=0)
    everyone = dp * cp
    # Replicas of what is sharded (HSDP) have the optimizer's states sharded alike.
    spread_over = 1 if zero < 1 else shards * cp if zero >= 3 and 1 < shards < dp else everyone
    optimizer = min(everyone, max(1, f.number("parallel", "optimizer_shard", spread_over, least=0)))
    schedule = str(f.get("parallel", "schedule", program.default_schedule)).lower()
    interleaved = schedule.startswith("interleaved")
    virtual = max(1, f.number("parallel", "vpp", _virtual_stages(shape.layers, pp) if interleaved else 1, least=0))
    if shape.layers + 2 < pp * virtual:
        virtual = 1
    return RunLayout(
        pp=pp,
        dp=dp,
        tp=tp,
        cp=cp,
        virtual_stages=virtual,
        schedule="interleaved_1f1b" if virtual > 1 else _SCHEDULES.get(schedule, "1f1b"),
        microbatch_size=microbatch,
        microbatches=max(1, round(batch / (dp * microbatch))),
        parameter_shards=optimizer if zero >= 3 else 1,
        gradient_shards=optimizer if zero >= 2 else 1,
        optimizer_shards=optimizer,
        sequence_parallel=f.flag("parallel", "sequence_parallel", program.default_sequence_parallel),
        recompute=_recompute(f, program),
        recompute_share=0.5,
    )


def _ways(f: Fields, shape: ModelShape) -> tuple[int, int, int, int]:
    """tp, pp, cp and dp, whose product is the number of GPUs: where a case's dp is not what the others leave, what they
    leave is taken, and noted."""
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
    """Where a run interleaves and does not say how finely: as finely as divides the layers, at most 8 times."""
    if pp == 1:
        return 1
    even = [v for v in range(1, 9) if layers % (pp * v) == 0]
    return even[-1] if even else 2 if layers >= 2 * pp else 1


def _recompute(f: Fields, program: TrainingProgram) -> RecomputeKind:
    text = str(f.get("train", "activation_recompute", program.default_recompute)).lower()
    kinds: tuple[RecomputeKind, ...] = ("selective", "op", "layer", "full")
    for kind in kinds:
        if text.startswith(kind):
            return kind
    return "none"


def _stage_layers(f: Fields, shape: ModelShape, layout: RunLayout) -> tuple[int, ...]:
    """Where the notes say so: the first and the last stage one layer less, two of every stage's share in all."""
    if "one layer less" not in f.text("notes") or layout.stages < 2 or (shape.layers + 2) % layout.stages:
        return ()
    each = (shape.layers + 2) // layout.stages
    return (each - 1, *[each] * (layout.stages - 2), each - 1)


def _cluster(f: Fields, hardware: list[Path], clusters: dict[str, Cluster]) -> Cluster:
    gpu = str(f.get("hardware", "gpu", _DEFAULT_DEVICE)).lower()
    name = next((file for part, file in _DEVICES if part in gpu), None)
    if name is None:
        own = {path.stem for folder in hardware for path in folder.glob("*.yaml")}
        if gpu not in own:
            raise ValueError(f"hardware.gpu = {gpu}: no hardware file; --hardware FOLDER with {gpu}.yaml would tell")
        name = gpu
    if name not in clusters:
        clusters[name] = load_cluster(name, hardware)
    per_node = f.number("hardware", "gpus_per_node", clusters[name].gpus_per_node)
    stated = network_gb_per_s(str(f.stated("hardware", "inter_bw") or ""), per_node)
    links = re.search(r"(\d+) inter-gpu connects", str(f.stated("hardware", "intra_bw") or "").lower())
    return with_links(
        clusters[name],
        network_gb_per_s=stated,
        node_gb_per_s=int(links.group(1)) * _NVLINK_GB_PER_S if links else None,
        gpus_per_node=per_node,
    )


def network_gb_per_s(text: str, gpus_per_node: int) -> float | None:
    """GB/s per device and direction from a source's own words, None where they state no figure."""
    words = text.lower()
    omni = re.search(r"(\d+|eight|four)\s*(?:x\s*)?opa links", words)
    if omni:
        return _count(omni.group(1)) * _OMNI_PATH_GBIT / 8 / gpus_per_node
    found = re.search(
        r"(?:\b(\d+|eight|four)(?:\s*x\s*|\s+)(?:[a-z]+\s+)?)?\b(\d{2,4})\s*(?:gbps|gb/s|gb\b|gbit)", words
    )
    if not found:
        return None
    ports, gbit = _count(found.group(1)), float(found.group(2))
    per_device = "per gpu" in words
    return ports * gbit / 8 / (1 if per_device else gpus_per_node)


def _count(text: str | None) -> int:
    if text is None:
        return 1
    return {"eight": 8, "four": 4}[text] if text in ("eight", "four") else int(text)
