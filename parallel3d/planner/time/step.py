"""The time of a training step, by cause."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from parallel3d.planner.hardware.program import PARALLEL3D
from parallel3d.planner.model.flops import hardware_flops_per_token, model_flops_per_token
from parallel3d.planner.model.job import Job
from parallel3d.planner.own.muon import busiest_shapes, hidden_matrices, ranks_of
from parallel3d.planner.time.block import BlockTimes, block_times, embedding_times, head_times
from parallel3d.planner.time.calibrated import measured_parts
from parallel3d.planner.time.collectives import all_gather_s, all_reduce_s, send_s
from parallel3d.planner.time.data_parallel import reduced_once_s, sharded_s
from parallel3d.planner.time.parts import TimeParts
from parallel3d.planner.time.pipeline import StageTimes, closed_form_s, pipeline_s, split_backward_s
from parallel3d.planner.time.roofline import Kernels, matmul_s, memory_bound_s
from parallel3d.schedules.registry import ScheduleName

ZERO_BUBBLE = ("zb-1p", "zb-2p")
EARLY_HOPPER = (0.92, 0.66)  # matmul, attention: of what the device does since


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step takes and what that is worth."""

    parts: TimeParts
    step_time_s: float
    tokens_per_s_per_gpu: float
    model_flops_per_gpu: float  # per second
    mfu: float  # model FLOPs (`flops.model_flops_per_token`) over the device's dense peak
    hfu: float  # likewise with what recompute repeats


@dataclass(frozen=True, kw_only=True)
class _Microbatch:
    """Seconds of the stages for one microbatch, with what they consist of."""

    block: BlockTimes
    tp_forward_s: float
    tp_backward_s: float
    tp_again_s: float
    cp_s: float  # forward; the backward has twice that
    head_s: tuple[float, float]
    embedding_s: tuple[float, float]


def kernels_of(job: Job) -> Kernels:
    """The device as the engine's kernels use it."""
    engine, matmul, attention = job.engine, 1.0, 1.0
    if job.cluster.device.family == "hopper":
        matmul, attention = EARLY_HOPPER if engine.early_hopper else (1.0, engine.hopper_attention)
    return Kernels(
        device=job.cluster.device,
        precision=job.precision,
        matmul_speed=engine.matmul_speed * matmul,
        attention_speed=engine.attention_speed * attention,
    )


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """What a step's microbatches take, whatever the data dimension adds."""

    micro: _Microbatch
    rank_s: list[float]
    stage_layers: int  # of the largest
    seconds: float


Blocks = dict[tuple[object, ...], _Microbatch]  # of one model on one kind of cluster, by all that they depend on


@dataclass(frozen=True)
class Known:
    """What has been computed for other layouts: pipelines by recompute, of those that differ in nothing else but the
    split of the data ranks; a microbatch's times, of any."""

    blocks: Blocks = field(default_factory=dict)
    pipelines: dict[str, _Pipeline] = field(default_factory=dict)


def step_cost(job: Job, *, exact: bool = True, known: Known | None = None) -> Cost:
    """The cost of a step. `exact` simulates the schedule; without, its closed form ranks candidates quickly. This
    project's own program on a calibrated host is priced by what was measured there. `known` is filled, and read."""
    parts = _calibrated(job, exact=exact) or _modelled(job, exact=exact, known=known)
    tokens = job.tokens_per_step / parts.total / job.layout.world_size
    flops = tokens * model_flops_per_token(job.shape, job.seq_len)
    layout = job.layout
    hardware = hardware_flops_per_token(job.shape, job.seq_len, layout.recompute, layout.recompute_share)
    return Cost(
        parts=parts,
        step_time_s=parts.total,
        tokens_per_s_per_gpu=tokens,
        model_flops_per_gpu=flops,
        mfu=flops / job.cluster.device.peak(job.precision),
        hfu=tokens * hardware / job.cluster.device.peak(job.precision),
    )


def stage_times(job: Job) -> tuple[list[StageTimes], float]:
    """Seconds of every stage for one microbatch, and of a transfer between two: what the schedule is simulated with."""
    return _stage_times(job, _microbatch(job, kernels_of(job))), _send_s(job)


def least_step_s(job: Job, *, known: Known) -> float:
    """What no layout with this pipeline takes less than, however it uses its data ranks: its microbatches, and what
    every step has. 0.0 where measurements price the step as a whole."""
    if job.cluster.measured is not None and job.engine.name == PARALLEL3D.name:
        return 0.0
    return _known_pipeline(job, kernels_of(job), exact=False, known=known).seconds + job.engine.step_overhead_s


def _calibrated(job: Job, *, exact: bool) -> TimeParts | None:
    measured = job.cluster.measured
    if measured is None or job.engine.name != PARALLEL3D.name:
        return None
    return measured_parts(job, measured, exact=exact)


def _modelled(job: Job, *, exact: bool, known: Known | None) -> TimeParts:
    kernels = kernels_of(job)
    pipeline = _known_pipeline(job, kernels, exact=exact, known=known)
    rank_parameters = max(job.stage_parameters(part) for part in {*job.ranks})
    data_s = _data_parallel_s(job, pipeline, rank_parameters)
    optimizer = _optimizer_s(job, kernels, rank_parameters) + _muon_s(job, kernels)
    return _parts(job, pipeline, data_s, optimizer + _tied_embeddings_s(job))


def _known_pipeline(job: Job, kernels: Kernels, *, exact: bool, known: Known | None) -> _Pipeline:
    if known is None:
        return _pipeline(job, _microbatch(job, kernels), exact=exact)
    layout = job.layout
    if layout.recompute not in known.pipelines:
        is_one = layout.microbatches == 1
        key = (layout.tp, layout.sequence_parallel, layout.microbatch_size, layout.recompute, is_one)
        if key not in known.blocks:
            known.blocks[key] = _microbatch(job, kernels)
        known.pipelines[layout.recompute] = _pipeline(job, known.blocks[key], exact=exact)
    return known.pipelines[layout.recompute]


def _pipeline(job: Job, micro: _Microbatch, *, exact: bool) -> _Pipeline:
    times = _stage_times(job, micro)
    rank_s = [0.0] * job.layout.pp
    for rank, stage in zip(job.placement, times, strict=True):
        rank_s[rank] += stage.forward + stage.backward
    seconds = _pipeline_s(job, micro, times, exact=exact)
    largest = max(part.layers for part in job.stages)
    return _Pipeline(micro=micro, rank_s=rank_s, stage_layers=largest, seconds=seconds)


def _microbatch(job: Job, kernels: Kernels) -> _Microbatch:
    block = block_times(job, kernels)
    forward, backward, again = _tp_s(job)
    return _Microbatch(
        block=block,
        tp_forward_s=forward,
        tp_backward_s=backward,
        tp_again_s=again,
        cp_s=_cp_s(job, block),
        head_s=head_times(job, kernels),
        embedding_s=embedding_times(job, kernels),
    )


def _tp_s(job: Job) -> tuple[float, float, float]:
    """Exposed tp traffic of a block: forward, backward, and what recompute repeats. Two all-reduces each way, or as
    many reduce-scatters and all-gathers; sequence parallelism gathers the inputs once more for the weights' gradients,
    beside other work (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2)."""
    layout, cluster, group = job.layout, job.cluster, job.tp_group
    if layout.tp == 1:
        return 0.0, 0.0, 0.0
    size = job.tokens * job.shape.hidden * job.item_bytes
    one = 2 * all_gather_s(cluster, group, size) if layout.sequence_parallel else all_reduce_s(cluster, group, size)
    forward = 2 * one * (1 - job.engine.tp_hidden) / job.engine.tp_speed
    # Nobody reads the output of a block that is recomputed, and its last collective is sent all the same.
    again = {"full": 1.0, "layer": layout.recompute_share, "op": 0.5}.get(layout.recompute, 0.0) * forward
    return forward, forward, again


def _cp_s(job: Job, block: BlockTimes) -> float:
    """Context parallelism: keys and values go round a ring beside the attention (Liu et al. 2023, arXiv 2310.01889)."""
    layout = job.layout
    if layout.cp == 1:
        return 0.0
    kv = max(job.shape.kv_hidden // layout.tp, job.shape.head_dim)
    bytes_ = 2 * 2.0 * layout.microbatch_size * job.seq_len * kv
    return 0.5 * all_gather_s(job.cluster, job.cp_group, bytes_)


def _stage_times(job: Job, micro: _Microbatch) -> list[StageTimes]:
    forward = micro.block.forward_wall_s + micro.tp_forward_s + micro.cp_s
    backward = micro.block.backward_wall_s + micro.tp_backward_s + micro.tp_again_s + 2 * micro.cp_s
    # What of a transfer is not beside compute holds up the stage that sends, in the steady state too.
    blocked = _send_s(job) * (1 - job.engine.p2p_hidden) + job.engine.action_s
    made: dict[tuple[int, bool, bool], StageTimes] = {}  # stages in the middle are alike
    times = []
    for stage in job.stages:
        key = (stage.layers, stage.embedding, stage.head)
        if key not in made:
            f, b = stage.layers * forward + blocked, stage.layers * backward + blocked
            for is_here, extra in ((stage.embedding, micro.embedding_s), (stage.head, micro.head_s)):
                if is_here:
                    f, b = f + extra[0], b + extra[1]
            weight = stage.layers * micro.block.weight_s
            made[key] = StageTimes(forward=f, input=b - weight, weight=weight)
        times.append(made[key])
    return times


def _pipeline_s(job: Job, micro: _Microbatch, times: list[StageTimes], *, exact: bool) -> float:
    layout = job.layout
    send = _send_s(job)
    if layout.schedule in ZERO_BUBBLE:
        weight = micro.block.weight_s * job.shape.layers / layout.pp
        return split_backward_s(
            layout.pp, layout.microbatches, times, send, weight_s=weight, double=layout.schedule == "zb-2p"
        )
    # A cast, because a published run's schedule is a name of its own framework's.
    name = cast(ScheduleName, layout.schedule)
    form = pipeline_s if exact else closed_form_s
    return form(name, layout.pp, layout.microbatches, layout.virtual_stages, times, send)


def _send_s(job: Job) -> float:
    """An activation on its way to the next stage; with tp and without sequence parallelism each rank sends its part
    and gathers (Narayanan et al. 2021, arXiv 2104.04473, section 4.1)."""
    layout = job.layout
    if layout.pp == 1:
        return 0.0
    ranks_between = layout.dp * layout.cp * layout.tp
    bytes_ = job.tokens * job.shape.hidden * job.item_bytes / layout.tp
    nodes = -(-ranks_between * layout.pp // job.cluster.gpus_per_node)
    return send_s(job.cluster, bytes_, nodes=nodes)


def _data_parallel_s(job: Job, pipeline: _Pipeline, rank_parameters: int) -> float:
    micro = pipeline.micro
    tp = (micro.tp_forward_s, micro.tp_backward_s + micro.tp_again_s)
    if job.layout.parameter_shards > 1:
        ends = (micro.head_s[0] + micro.embedding_s[0], micro.head_s[1] + micro.embedding_s[1])
        return sharded_s(job, micro.block, tp, ends)
    return reduced_once_s(job, rank_parameters, (micro.block.backward_wall_s + tp[1]) * pipeline.stage_layers)


def _optimizer_s(job: Job, kernels: Kernels, rank_parameters: int) -> float:
    """AdamW: weights, two moments and gradients read, all but the last written, the computing copy written; before it
    the gradient norm reads every gradient, and clipping writes it."""
    engine, layout = job.engine, job.layout
    own = rank_parameters / layout.optimizer_shards
    gradients = rank_parameters / layout.gradient_shards
    return memory_bound_s(kernels, own * 30.0 * engine.elementwise + gradients * 3 * engine.gradient_bytes, launches=40)


def _muon_s(job: Job, kernels: Kernels) -> float:
    """Muon's iterations on the busiest ranks, each of three products, and its two all-to-alls of a rank's part, through
    one port each (`training.optimizers.muon`)."""
    if job.muon is None:
        return 0.0
    ranks, blocks = ranks_of(job), max(part.layers for part in job.ranks)
    precision = "fp32" if job.muon.item_bytes == 4 else "bf16"
    seconds = 0.0
    for shape, count in Counter(busiest_shapes(job.shape, blocks, ranks)).items():
        short, long = sorted(shape)
        products = ((short, short, long), (short, short, short), (short, long, short))
        seconds += (
            job.muon.iterations * count * sum(matmul_s(kernels, *sizes, precision=precision) for sizes in products)
        )
    own = blocks * sum(table.shard(ranks.shards) for table in hidden_matrices(job.shape, ranks.tp))
    group, sent = job.stage_group, float(job.muon.item_bytes * own)
    return seconds + 2 * all_gather_s(job.cluster, group, sent, one_ring=True)


def _tied_embeddings_s(job: Job) -> float:
    """The two copies of a tied table, on the first and the last stage, sum their gradients: a ring of two, each sends
    one half to be summed and then the other, summed."""
    if not job.shape.tied_embeddings or job.layout.pp == 1:
        return 0.0
    bytes_ = job.shape.vocab * job.shape.hidden / job.layout.tp * job.engine.reduce_bytes
    return 2 * send_s(job.cluster, bytes_ / 2, nodes=-(-job.layout.world_size // job.cluster.gpus_per_node))


def _parts(job: Job, pipeline: _Pipeline, data_s: float, optimizer_s: float) -> TimeParts:
    micro, rank_s = pipeline.micro, pipeline.rank_s
    layout, m = job.layout, job.layout.microbatches
    busiest = rank_s.index(max(rank_s))
    layers = job.ranks[busiest].layers
    recompute = m * layers * micro.block.again_s
    tp = m * layers * (micro.tp_forward_s + micro.tp_backward_s + micro.tp_again_s)
    cp = m * layers * 3 * micro.cp_s
    work = m * rank_s[busiest]
    send = _send_s(job)
    blocked = 2 * m * layout.virtual_stages * send * (1 - job.engine.p2p_hidden)
    travel = min(max(0.0, pipeline.seconds - work), 2 * (layout.pp * layout.virtual_stages - 1) * send)
    return TimeParts(
        compute=work - recompute - tp - cp - blocked,
        recompute=recompute,
        tp=tp,
        cp=cp,
        pp_bubble=max(0.0, pipeline.seconds - work - travel),
        pp_p2p=blocked + travel,
        dp=data_s,
        optimizer=optimizer_s,
        overhead=job.engine.step_overhead_s,
    )
