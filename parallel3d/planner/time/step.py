"""The time of a training step, by cause."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import ceil, inf

from parallel3d.planner.hardware.units import ROUNDED
from parallel3d.planner.model.muon import MuonCosts, busiest_shapes, muon_matrices
from parallel3d.planner.model.parameters import hidden_tables, model_flops_per_token
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.planner.model.training import master_bytes
from parallel3d.planner.time.block import (
    BlockParts,
    MicrobatchTimes,
    block_times,
    embedding_times,
    head_times,
)
from parallel3d.planner.time.calibrated import CalibratedHost
from parallel3d.planner.time.collectives import (
    all_gather_s,
    all_reduce_s,
    experts_exchange_s,
    reduced_once_s,
    send_s,
    sharded_s,
)
from parallel3d.planner.time.pipeline import closed_form_s, pipeline_s, split_backward_s
from parallel3d.planner.time.roofline import Kernels, matmul_s, memory_bound_s
from parallel3d.timeline.simulate import StageTimes

# published schedules, and whether they double the memory
ZERO_BUBBLE = {"zb-1p": False, "zb-2p": True}
# The layers' collectives reach this share of the speed that larger transfers have: copies around
# each, and ranks that wait for each other. The second: on ranks of several nodes, beside the first.
_TP_SPEED, _TP_ACROSS_NODES = 0.7, 0.3
# Bytes per second between a GPU and its CPU, what PCIe 4.0 x16 sustains, and a GPU's share of the
# CPU's memory bandwidth: 8 GPUs beside two sockets of 200 GB/s.
HOST_LINK = 25e9
HOST_MEMORY = 50e9


@dataclass(frozen=True, kw_only=True)
class TimeParts:
    """Seconds of a step on the busiest rank, by cause; they add up to the step."""

    compute: float
    recompute: float
    tp: float
    cp: float
    pp_bubble: float
    pp_p2p: float
    dp: float
    optimizer: float
    overhead: float
    ep: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    def scaled(self, devices: float, links: float) -> TimeParts:
        """Returns the parts with their own work, and what ranks send, so many times as long."""
        found = {}
        for cause, seconds in vars(self).items():
            is_sent = cause in ("tp", "cp", "pp_p2p", "dp", "ep")
            found[cause] = seconds * (links if is_sent else devices)
        return TimeParts(**found)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step takes, and what that is worth."""

    parts: TimeParts
    step_time_s: float
    tokens_per_s_per_gpu: float
    model_flops_per_gpu: float  # per second
    mfu: float  # model FLOPs (`parameters.model_flops_per_token`) over the device's dense peak


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """What a step's microbatches take, whatever the data dimension adds."""

    micro: MicrobatchTimes
    rank_s: list[float]
    send_s: float  # seconds of an activation on its way to the next stage
    blocked_s: float  # what of that holds up the stage that sends
    seconds: float
    most: StageSlice  # what the rank with most parameters has of the model


# one model's on one cluster, by all that they depend on
BlockTimeCache = dict[tuple[object, ...], MicrobatchTimes]


@dataclass(frozen=True)
class CostCache:
    """What has been computed for other layouts: pipelines by recompute, of those that differ in
    nothing else but the split of the data ranks; a microbatch's times, of any."""

    blocks: BlockTimeCache = field(default_factory=dict)
    pipelines: dict[tuple[str, int], _Pipeline] = field(default_factory=dict)


def step_cost(run: PlannedRun, *, exact: bool = True, known: CostCache | None = None) -> Cost:
    """Prices a step. `exact` simulates the schedule; without, its closed form ranks candidates
    quickly. This project's own framework on a calibrated host is priced by what was measured there.
    `known` is filled, and read."""
    host = _calibrated_host(run)
    layout = run.layout
    pipeline = _pipeline(run, host, exact=exact, known=known or CostCache())
    micro = pipeline.micro
    rank_s = pipeline.rank_s
    busiest = rank_s.index(max(rank_s))
    part = run.ranks[busiest]
    block = micro.block
    slowdown = 1.0
    if host is None:
        data_s, optimizer_s = _once_s(run, pipeline)
        overhead_s = 0.0
    else:
        data_s, optimizer_s, overhead_s = host.once_s(part)
        slowdown = host.slowdown
    if run.offloads:
        crossing_s, optimizer_s = _offload_s(run, part)
        data_s += crossing_s
    work = min(pipeline.seconds, layout.microbatches * rank_s[busiest] * slowdown)
    each = work / rank_s[busiest]  # the microbatches, each as much longer as all take
    p2p = 2 * each * layout.virtual_stages * pipeline.blocked_s
    travel = min(pipeline.seconds - work, 2 * (layout.stages - 1) * pipeline.send_s)
    blocks = part.layers * each
    end_overhead = each * micro.end_overhead_s * (part.embedding + part.head)
    dense = part.dense * each  # a dense layer has no exchange
    parts = TimeParts(
        compute=work
        - p2p
        - end_overhead
        - blocks * (block.total - block.compute)
        + dense * block.ep,
        recompute=blocks * block.recompute,
        tp=blocks * block.tp,
        cp=blocks * block.cp,
        pp_bubble=pipeline.seconds - work - travel,
        pp_p2p=p2p + travel,
        dp=blocks * block.dp + data_s,
        optimizer=optimizer_s,
        overhead=blocks * block.overhead + end_overhead + overhead_s,
        ep=(part.layers - part.dense) * each * block.ep,
    )
    if host is None:
        quality = run.framework.quality
        parts = parts.scaled(quality, quality)
    else:  # one node, as runs there have corrected it
        scales = run.cluster.scales
        parts = parts.scaled(scales.arithmetic, scales.node)
    tokens = run.tokens_per_step / parts.total / layout.world_size
    flops = tokens * model_flops_per_token(run.shape, run.seq_len)
    return Cost(
        parts=parts,
        step_time_s=parts.total,
        tokens_per_s_per_gpu=tokens,
        model_flops_per_gpu=flops,
        mfu=flops / run.cluster.device.peak(run.precision),
    )


def least_step_s(run: PlannedRun, *, known: CostCache) -> float:
    """Seconds that no layout with this pipeline goes below, however it uses its data ranks: its
    microbatches, and what every step has. It is 0.0 where measurements price each use of the data
    ranks for itself."""
    if _calibrated_host(run) is not None:
        return 0.0
    return run.framework.quality * _pipeline(run, None, exact=False, known=known).seconds


def least_work_s(run: PlannedRun, *, known: CostCache, turns: float) -> float:
    """Seconds that no pipeline of these microbatches goes below, whatever its stages: an even share
    of all work for each rank, and the bubble of ranks that have at most so many `turns`
    (`pipeline.closed_form_s`; none where they are infinite). It is known much sooner than
    `least_step_s`, and never more."""
    if _calibrated_host(run) is not None:
        return 0.0
    micro = _known_microbatch(run, known)
    shape = run.shape
    pp = run.layout.pp
    work = shape.layers * (micro.forward.total + micro.backward.total)
    work += shape.first_dense * sum(micro.dense_s)
    work += sum(micro.head_s) + sum(micro.embedding_s)
    rounds = run.layout.microbatches + (pp - 1) / turns
    return run.framework.quality * ROUNDED * rounds * work / pp


def _nodes(run: PlannedRun) -> int:
    return ceil(run.layout.world_size / run.cluster.gpus_per_node)


def _calibrated_host(run: PlannedRun) -> CalibratedHost | None:
    measured = run.cluster.measured
    if measured is None or not run.framework.is_parallel3d:
        return None
    return CalibratedHost(run, measured)


def _pipeline(
    run: PlannedRun, host: CalibratedHost | None, *, exact: bool, known: CostCache
) -> _Pipeline:
    """Prices the microbatches of a step, or finds them in `known`, where no measurement depends on
    more than that."""
    layout = run.layout
    recompute = layout.recompute, layout.recompute_every
    if host is not None:
        micro = host.microbatch()
    elif recompute in known.pipelines:
        return known.pipelines[recompute]
    else:
        micro = _known_microbatch(run, known)
    # An activation on its way to the next stage; what of that is not beside compute and holds up
    # the stage that sends, in the steady state too; and what an action takes beside both.
    send = 0.0
    blocked = 0.0
    action = run.framework.action_s
    if host is not None:  # whose message is a part of the action
        blocked = host.action_s()
        action = 0.0
    elif layout.pp > 1:
        # With tp each rank sends its part, and without sequence parallelism gathers (Narayanan et
        # al. 2021, arXiv 2104.04473, section 4.1).
        bytes_ = run.tokens * run.shape.hidden * run.item_bytes / layout.tp
        send = send_s(run.cluster, bytes_, nodes=_nodes(run))
        blocked = send
    times = _stage_times(run, micro, blocked + action)

    def numel(part: StageSlice) -> int:
        return run.stage_parameters(part) + run.stage_experts(part)

    rank_s = [0.0] * layout.pp
    for rank, stage in zip(run.placement, times, strict=True):
        rank_s[rank] += stage.forward + stage.backward
    if layout.schedule in ZERO_BUBBLE:
        weight_s = micro.weight_s * run.shape.layers / layout.pp
        double = ZERO_BUBBLE[layout.schedule]
        seconds = split_backward_s(
            layout.pp, layout.microbatches, times, send, weight_s=weight_s, double=double
        )
    else:
        form = pipeline_s if exact else closed_form_s
        at_once = inf if host is None else host.at_once
        seconds = form(layout.schedule, layout.pp, layout.microbatches, times, send, at_once)
    if host is not None:
        seconds *= host.contention
    found = _Pipeline(
        micro=micro,
        rank_s=rank_s,
        send_s=send,
        blocked_s=blocked,
        seconds=seconds,
        most=max({*run.ranks}, key=numel),
    )
    if host is None:
        known.pipelines[recompute] = found
    return found


def _known_microbatch(run: PlannedRun, known: CostCache) -> MicrobatchTimes:
    layout = run.layout
    numbers = (layout.tp, layout.microbatch_size, layout.microbatches == 1, layout.cp, layout.ep)
    key = (*numbers, layout.sequence_parallel, layout.recompute, layout.recompute_every)
    if key not in known.blocks:
        known.blocks[key] = _microbatch(run)
    return known.blocks[key]


def _kernels(run: PlannedRun) -> Kernels:
    return Kernels(device=run.cluster.device, precision=run.precision)


def _microbatch(run: PlannedRun) -> MicrobatchTimes:
    kernels = _kernels(run)
    layout = run.layout
    block = block_times(run, kernels)
    # A block's tp traffic that shows, each way: two all-reduces, or as many reduce-scatters and
    # all-gathers. Sequence parallelism gathers the inputs once more for the weights' gradients,
    # beside other work (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2).
    size = run.tokens * run.shape.hidden * run.item_bytes
    group = run.group(layout.tp, 1)
    if layout.sequence_parallel:
        one = 2 * all_gather_s(run.cluster, group, size)
    else:
        one = all_reduce_s(run.cluster, group, size)
    speed = _TP_SPEED
    if group.nodes > 1:
        speed *= _TP_ACROSS_NODES
    tp = 2 * one / speed
    dense_tp = tp
    experts = run.shape.experts
    # each rank routes its own tokens: the feed-forward half gathers for what is shared alone
    if experts is not None:
        if not experts.shared_hidden:
            tp *= 0.5
        if layout.expert_tp > 1:  # a part of an expert needs the rows of all its neighbours
            rows = run.routed_rows * run.shape.hidden * run.item_bytes
            neighbours = run.group(layout.expert_tp, 1)
            within = 2 * all_gather_s(run.cluster, neighbours, rows)
            tp += within / _TP_SPEED
    # Keys and values go round a ring beside the attention (Liu et al. 2023, arXiv 2310.01889).
    kv_hidden = max(run.shape.kv_hidden // layout.tp, run.shape.head_dim)
    bytes_ = 2 * 2.0 * layout.microbatch_size * run.seq_len * kv_hidden
    ring = run.group(layout.cp, layout.tp)
    cp = 0.5 * all_gather_s(run.cluster, ring, bytes_)
    # Nobody reads the output of a block that is recomputed, and its last collective is sent all the
    # same.
    repeated = {"full": 1.0, "every_n": 1 / layout.recompute_every}
    ep = 2 * experts_exchange_s(run)
    ep_again = ep * repeated.get(layout.recompute, 0.0)
    repeated["op"] = 0.5
    tp_again = tp * repeated.get(layout.recompute, 0.0)
    forward = BlockParts(compute=block.forward_s, tp=tp, cp=cp, ep=ep)
    backward = BlockParts(
        compute=block.backward_s,
        recompute=block.again_s,
        tp=tp + tp_again,
        cp=2 * cp,
        ep=ep + ep_again,
    )
    dense_s = (0.0, 0.0)
    if run.shape.first_dense:
        dense = block_times(run, kernels, dense=True)
        dense_s = (
            dense.forward_s + dense_tp + cp - forward.total,
            dense.backward_s + dense.again_s + dense_tp + 2 * cp - backward.total,
        )
    return MicrobatchTimes(
        forward=forward,
        backward=backward,
        dense_s=dense_s,
        weight_s=block.weight_s,
        head_s=head_times(run, kernels),
        embedding_s=embedding_times(run, kernels),
    )


def _stage_times(run: PlannedRun, micro: MicrobatchTimes, action_s: float) -> list[StageTimes]:
    dense_forward_s, dense_backward_s = micro.dense_s
    made: dict[StageSlice, StageTimes] = {}  # stages in the middle are alike
    for stage in run.stages:
        if stage in made:
            continue
        forward = stage.layers * micro.forward.total + stage.dense * dense_forward_s + action_s
        backward = stage.layers * micro.backward.total + stage.dense * dense_backward_s + action_s
        if stage.embedding:
            forward += micro.embedding_s[0]
            backward += micro.embedding_s[1]
        if stage.head:
            forward += micro.head_s[0]
            backward += micro.head_s[1]
        weight = stage.layers * micro.weight_s
        made[stage] = StageTimes(forward=forward, input=backward - weight, weight=weight)
    return [made[stage] for stage in run.stages]


def _once_s(run: PlannedRun, pipeline: _Pipeline) -> tuple[float, float]:
    """Returns the seconds of the data dimension and of the optimizer that come once a step."""
    micro = pipeline.micro
    layout = run.layout
    forward = micro.forward.total - micro.forward.cp
    backward = micro.backward.total - micro.backward.cp
    if layout.parameter_shards > 1:
        ends_s = sum(micro.head_s) + sum(micro.embedding_s)
        data = sharded_s(run, forward, backward, ends_s)
    else:
        data = reduced_once_s(run, pipeline.most)
    optimizer = _optimizer_s(run, pipeline.most)
    if run.optimizer.muon is not None:
        optimizer += _muon_s(run, run.optimizer.muon)
    if run.shape.tied_embeddings and layout.pp > 1:
        # The two copies of the table, on the first and the last stage, sum their gradients: a ring
        # of two, each sends one half to be summed and then the other, summed.
        numel = run.shape.vocab * run.shape.hidden / layout.tp
        half_bytes = numel * run.framework.reduce_bytes / 2
        optimizer += 2 * send_s(run.cluster, half_bytes, nodes=_nodes(run))
    return data, optimizer


def _offload_s(run: PlannedRun, part: StageSlice) -> tuple[float, float]:
    """Returns the seconds in which parameters and gradients cross between GPU and CPU, and those of
    AdamW on the CPU. Both are set, not measured, and nothing is hidden behind the compute."""
    shard = run.stage_parameters(part) / run.layout.parameter_shards
    crossings = 2  # a gather, and the gradients
    if run.gathers_each_microbatch:
        crossings = 1 + 2 * run.layout.microbatches
    crossing_s = crossings * shard * master_bytes(run.precision) / HOST_LINK
    return crossing_s, shard * 28.0 / HOST_MEMORY


def _optimizer_s(run: PlannedRun, most: StageSlice) -> float:
    """AdamW reads weights, two moments and gradients, and writes all but the last, and the
    computing copy; before it the gradient norm reads every gradient, and clipping writes it."""
    framework = run.framework
    layout = run.layout
    parameters = run.stage_parameters(most)
    experts = run.stage_experts(most)

    def split(shards: int) -> float:
        return parameters / shards + experts / layout.expert_shards(shards)

    bytes_ = split(layout.optimizer_shards) * 30.0
    bytes_ += split(layout.gradient_shards) * 3 * framework.gradient_bytes
    return memory_bound_s(_kernels(run), bytes_)


def _muon_s(run: PlannedRun, muon: MuonCosts) -> float:
    """Muon's iterations on the busiest ranks, each of three products, and its two all-to-alls of a
    rank's part, through one port each (`optimizers.muon`)."""
    layout = run.layout
    ranks = layout.dp * layout.tp
    shards = layout.optimizer_shards
    blocks = max(part.layers for part in run.ranks)
    kernels = replace(_kernels(run), precision="fp32" if muon.item_bytes == 4 else "bf16")
    matrices = muon_matrices(run.shape, layout.tp, shards) * blocks
    seconds = 0.0
    for shape, count in Counter(busiest_shapes(matrices, ranks=ranks)).items():
        short, long = sorted(shape)
        for sizes in ((short, short, long), (short, short, short), (short, long, short)):
            seconds += muon.iterations * count * matmul_s(kernels, *sizes)
    tables = hidden_tables(run.shape, layout.tp)
    own = sum(table.shard(shards) for table in tables)
    sent = float(muon.item_bytes * blocks * own)
    stage = run.group(ranks, 1)
    return seconds + 2 * all_gather_s(run.cluster, stage, sent)
