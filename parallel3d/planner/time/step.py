"""Estimates the time of a training step, by cause."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from parallel3d.planner.hardware.units import ROUNDED
from parallel3d.planner.model.muon import MuonCosts, muon_matrices
from parallel3d.planner.model.parameters import model_flops_per_token
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.planner.model.training import master_bytes
from parallel3d.planner.time.block import (
    MicrobatchTimes,
    TimeParts,
    block_times,
    embedding_times,
    head_times,
)
from parallel3d.planner.time.calibrated import CalibratedHost
from parallel3d.planner.time.collectives import (
    all_gather_s,
    context_gather_s,
    experts_exchange_s,
    hidden_bytes,
    passes,
    reduced_once_s,
    send_s,
    sharded_s,
    tp_block_s,
)
from parallel3d.planner.time.pipeline import closed_form_s, pipeline_s
from parallel3d.planner.time.roofline import Kernels
from parallel3d.timeline.simulate import ActionTimes, StageTimes

# Speed of tp collectives relative to larger transfers. Copies and ranks that wait for each other
# slow them down. The second factor also applies if tp ranks are on several nodes.
_TP_SPEED, _TP_ACROSS_NODES = 0.7, 0.3
# Bytes per second between a GPU and its CPU (sustained PCIe 4.0 x16), and a GPU's share of CPU
# memory bandwidth (8 GPUs on two sockets of 200 GB/s).
HOST_LINK = 25e9
HOST_MEMORY = 50e9


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time and throughput of a step."""

    parts: TimeParts
    step_time_s: float
    tokens_per_s_per_gpu: float
    model_flops_per_gpu: float  # Model FLOPs per second per device.
    # Model FLOP/s (`parameters.model_flops_per_token`) divided by the device's dense peak.
    mfu: float


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """Seconds of a step's microbatches, without data parallelism."""

    micro: MicrobatchTimes
    times: list[StageTimes]  # Seconds of each stage per microbatch.
    rank_s: list[float]  # Seconds of each rank per microbatch.
    send_s: float  # Seconds to send an activation to the next stage.
    blocked_s: float  # Overhead of each pipeline action, in seconds.
    seconds: float  # makespan


# Microbatch times of one model on one cluster, keyed by every input that affects them.
BlockTimeCache = dict[tuple[object, ...], MicrobatchTimes]


@dataclass(frozen=True)
class CostCache:
    """Cached results for layouts that differ only in recompute and data parallelism. `pipelines` is
    keyed by (recompute, recompute_every). Other layouts may share `blocks`."""

    blocks: BlockTimeCache = field(default_factory=dict)
    pipelines: dict[tuple[str, int], _Pipeline] = field(default_factory=dict)


def step_cost(run: PlannedRun, *, exact: bool = True, known: CostCache | None = None) -> Cost:
    """Estimates the time of a step.

    Args:
        run: Run to estimate. For parallel3d on a calibrated host, measurements are used.
        exact: True simulates the schedule. False uses a closed form, which is faster.
        known: Cache to read and fill.
    """
    host = _calibrated_host(run)
    layout = run.layout
    pipeline = _pipeline(run, host, exact=exact, known=known or CostCache())
    rank_s = pipeline.rank_s
    busiest = rank_s.index(max(rank_s))
    part = run.ranks[busiest]
    work = layout.microbatches * rank_s[busiest]
    if host is None:
        data_s, optimizer_s = _once_s(run, pipeline.micro)
        overhead_s = 0.0
    else:
        data_s, optimizer_s, overhead_s = host.once_s(part)
        work = min(pipeline.seconds, work * host.slowdown)
    if run.offloads:
        crossing_s, optimizer_s = _offload_s(run, part)
        data_s += crossing_s
    each = work / rank_s[busiest]  # Number of microbatches, scaled by the slowdown of the host.
    p2p = 2 * each * layout.virtual_stages * pipeline.blocked_s
    travel = min(pipeline.seconds - work, 2 * (layout.stages - 1) * pipeline.send_s)
    blocks = pipeline.micro.block.scaled(part.layers * each)
    parts = replace(
        blocks,
        compute=blocks.compute + work - p2p - blocks.total,
        pp_bubble=pipeline.seconds - work - travel,
        pp_p2p=p2p + travel,
        dp=blocks.dp + data_s,
        optimizer=optimizer_s,
        overhead=blocks.overhead + overhead_s,
    ).scaled(_quality(run, host))
    tokens = run.tokens_per_step / parts.total / layout.world_size
    flops = tokens * model_flops_per_token(run.shape, run.seq_len)
    return Cost(
        parts=parts,
        step_time_s=parts.total,
        tokens_per_s_per_gpu=tokens,
        model_flops_per_gpu=flops,
        mfu=flops / run.cluster.device.peak(run.precision),
    )


def action_times(run: PlannedRun) -> ActionTimes:
    """Returns the times that `step_cost` simulates the schedule with, scaled like its result."""
    host = _calibrated_host(run)
    pipeline = _pipeline(run, host, exact=False, known=CostCache())
    quality = _quality(run, host)
    stages = tuple(
        StageTimes(
            forward=quality * each.forward, input=quality * each.input, weight=quality * each.weight
        )
        for each in pipeline.times
    )
    transfers = (quality * pipeline.send_s,) * (len(stages) - 1)
    return ActionTimes(stages=stages, transfers=transfers)


def _quality(run: PlannedRun, host: CalibratedHost | None) -> float:
    """Returns the factor on all times of a step."""
    return run.framework.quality if host is None else run.cluster.scales.arithmetic


def least_step_s(run: PlannedRun, *, known: CostCache) -> float:
    """Returns a lower bound on the step time of all layouts that differ only in data parallelism.

    It is 0 on a calibrated host, because each data-parallel layout has measured overhead.
    """
    if _calibrated_host(run) is not None:
        return 0.0
    return run.framework.quality * _pipeline(run, None, exact=False, known=known).seconds


def least_work_s(run: PlannedRun, *, known: CostCache, turns: float) -> float:
    """Returns a lower bound on the step time of all pipelines with this pp and microbatch size.

    It is an even share of the work plus the bubble with `turns` stages per rank, or 0 on a
    calibrated host. It is cheaper than `least_step_s` and never larger.
    """
    if _calibrated_host(run) is not None:
        return 0.0
    micro = _known_microbatch(run, known)
    shape = run.shape
    pp = run.layout.pp
    work = shape.layers * micro.block.total + micro.ends_s
    rounds = run.layout.microbatches + (pp - 1) / turns
    return run.framework.quality * ROUNDED * rounds * work / pp


def _calibrated_host(run: PlannedRun) -> CalibratedHost | None:
    measured = run.cluster.measured
    if measured is None or not run.framework.is_parallel3d:
        return None
    return CalibratedHost(run, measured)


def _pipeline(
    run: PlannedRun, host: CalibratedHost | None, *, exact: bool, known: CostCache
) -> _Pipeline:
    """Estimates the pipeline of a step. `known` is read and filled unless `host` is given."""
    layout = run.layout
    pp = layout.pp
    recompute = layout.recompute, layout.recompute_every
    send = 0.0
    blocked = 0.0
    if host is not None:
        micro = host.microbatch()
        blocked = host.action_s()
    elif recompute in known.pipelines:
        return known.pipelines[recompute]
    else:
        micro = _known_microbatch(run, known)
        if pp > 1:
            # Each tp rank sends its shard. Without sequence parallelism the receivers all-gather it
            # (Narayanan et al. 2021, arXiv 2104.04473, section 4.1).
            send = send_s(run, hidden_bytes(run) / layout.tp)
            blocked = send + run.framework.action_s
    times = _stage_times(run, micro, blocked)
    rank_s = [0.0] * pp
    for rank, stage in zip(run.placement, times, strict=True):
        rank_s[rank] += stage.forward + stage.backward
    form = pipeline_s if exact else closed_form_s
    seconds = form(run.schedule, pp, layout.microbatches, times, send)
    published: str = layout.schedule
    if published == "zb-2p":
        # Each live microbatch beyond the pp of zb-1p hides one more weight gradient (Qi et al.
        # 2023, arXiv 2401.10241, table 2).
        extra = max(0, min(pp - 1, layout.microbatches - pp))
        hidden_s = extra * times[0].weight
        seconds = max(layout.microbatches * max(rank_s), seconds - hidden_s)
    if host is not None:
        # Ranks that share cores take at least the sum of their work and a part of the bubble.
        even_s = layout.microbatches * sum(rank_s) / pp
        at_once = pp / host.shared
        bubble_s = (seconds - even_s) * max(0.0, at_once - 1) / max(1, pp - 1)
        seconds = host.contention * max(seconds, host.shared * even_s + bubble_s)
    found = _Pipeline(
        micro=micro, times=times, rank_s=rank_s, send_s=send, blocked_s=blocked, seconds=seconds
    )
    if host is None:
        known.pipelines[recompute] = found
    return found


def _known_microbatch(run: PlannedRun, known: CostCache) -> MicrobatchTimes:
    layout = run.layout
    key = (
        layout.tp,
        layout.microbatch_size,
        layout.cp,
        layout.ep,
        layout.sequence_parallel,
        layout.recompute,
        layout.recompute_every,
    )
    if key not in known.blocks:
        known.blocks[key] = _microbatch(run)
    return known.blocks[key]


def _kernels(run: PlannedRun) -> Kernels:
    return Kernels(device=run.cluster.device, precision=run.precision)


def _microbatch(run: PlannedRun) -> MicrobatchTimes:
    kernels = _kernels(run)
    layout = run.layout
    block = block_times(run, kernels)
    hidden_s, rows_s = tp_block_s(run)
    tp = hidden_s / _TP_SPEED
    if run.group(layout.tp, 1).nodes > 1:
        tp /= _TP_ACROSS_NODES
    tp += rows_s / _TP_SPEED
    # The backward pass sends keys, values and their gradients. parallel3d all-gathers them before
    # attention. Other frameworks send them around a ring, overlapped with attention (Liu et al.
    # 2023, arXiv 2310.01889).
    cp = context_gather_s(run)
    if not run.framework.is_parallel3d:
        cp *= 0.5
    ep = 2 * experts_exchange_s(run)
    return MicrobatchTimes(
        block=TimeParts(
            compute=block.forward_s + block.backward_s,
            recompute=block.again_s,
            tp=passes(run) * tp,
            cp=3 * cp,
            ep=passes(run) * ep,
        ),
        forward_s=block.forward_s + tp + cp + ep,
        weight_s=block.weight_s,
        head_s=head_times(run, kernels),
        embedding_s=embedding_times(run, kernels),
    )


def _stage_times(run: PlannedRun, micro: MicrobatchTimes, action_s: float) -> list[StageTimes]:
    made: dict[StageSlice, StageTimes] = {}  # Many stages are equal, so compute each kind once.
    for stage in {*run.stages}:
        forward = stage.layers * micro.forward_s + action_s
        backward = stage.layers * micro.backward_s + action_s
        if stage.embedding:
            forward += micro.embedding_s[0]
            backward += micro.embedding_s[1]
        if stage.head:
            forward += micro.head_s[0]
            backward += micro.head_s[1]
        weight = stage.layers * micro.weight_s
        made[stage] = StageTimes(forward=forward, input=backward - weight, weight=weight)
    return [made[stage] for stage in run.stages]


def _once_s(run: PlannedRun, micro: MicrobatchTimes) -> tuple[float, float]:
    """Returns the seconds per step of data-parallel communication and of the optimizer, on the rank
    with the most parameters."""
    layout = run.layout
    part = max({*run.ranks}, key=run.stage_parameters)
    data = sharded_s(run, micro) if layout.parameter_shards > 1 else reduced_once_s(run, part)
    optimizer = _optimizer_s(run, part)
    if run.optimizer.muon is not None:
        optimizer += _muon_s(run, run.optimizer.muon, part)
    if run.shape.tied_embeddings and layout.pp > 1:
        # The first and the last stage sum the gradients of the tied table in a ring of two: each
        # sends one half to be summed, then the summed other half.
        numel = run.shape.vocab * run.shape.hidden / layout.tp
        half_bytes = numel * run.framework.reduce_bytes / 2
        optimizer += 2 * send_s(run, half_bytes)
    return data, optimizer


def _offload_s(run: PlannedRun, part: StageSlice) -> tuple[float, float]:
    """Returns the seconds of transfers between GPU and CPU, and of AdamW on the CPU.

    Both rates are assumptions, and nothing is overlapped with compute.
    """
    shard = run.shard_numel(part, run.layout.parameter_shards)
    crossings = 2  # Transfers per step: parameters to the GPU, and gradients to the CPU.
    if run.gathers_each_microbatch:
        crossings = 1 + 2 * run.layout.microbatches
    crossing_s = crossings * shard * master_bytes(run.precision) / HOST_LINK
    return crossing_s, shard * 28.0 / HOST_MEMORY


def _optimizer_s(run: PlannedRun, part: StageSlice) -> float:
    """Returns the seconds of AdamW, the gradient norm and clipping.

    AdamW reads weights, two moments and gradients, and writes weights, moments and the 16-bit copy.
    The norm reads each gradient. Clipping reads and writes it.
    """
    framework = run.framework
    layout = run.layout
    bytes_ = run.shard_numel(part, layout.optimizer_shards) * 30.0
    bytes_ += run.shard_numel(part, layout.gradient_shards) * 3 * framework.gradient_bytes
    return bytes_ / _kernels(run).memory_rate


def _muon_s(run: PlannedRun, muon: MuonCosts, part: StageSlice) -> float:
    """Returns the seconds of Muon's iterations and its two all-to-alls (`optimizers.muon`).

    An iteration has three matmuls per matrix. The ranks of a stage divide the matrices.
    """
    device = run.cluster.device
    layout = run.layout
    ranks = layout.replicas * layout.tp
    matrices = muon_matrices(run.shape, *layout.splits)
    flops = 0.0
    for matrix in matrices:
        short, long = sorted(matrix.shape)
        flops += 2 * short * short * (2 * long + short)
    rate = device.peak("fp32" if muon.item_bytes == 4 else "bf16") * device.matmul_efficiency
    own = sum(matrix.own for matrix in matrices)
    sent = float(muon.item_bytes * part.layers * own)
    exchange_s = 2 * all_gather_s(run.cluster, run.group(ranks, 1), sent)
    return muon.iterations * part.layers * flops / ranks / rate + exchange_s
