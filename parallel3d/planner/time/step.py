"""The time of a training step, by cause."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from parallel3d.optimizers.step_bytes import busiest_shapes
from parallel3d.planner.model.flops import hardware_flops_per_token, model_flops_per_token
from parallel3d.planner.model.muon import hidden_tables, muon_matrices, muon_shards
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.time.block import BlockTimes, block_times, embedding_times, head_times
from parallel3d.planner.time.calibrated import measured_parts
from parallel3d.planner.time.collectives import all_gather_s, all_reduce_s, send_s
from parallel3d.planner.time.data_parallel import reduced_once_s, sharded_s
from parallel3d.planner.time.parts import TimeParts
from parallel3d.planner.time.pipeline import closed_form_s, pipeline_s, split_backward_s
from parallel3d.planner.time.roofline import Kernels, matmul_s, memory_bound_s
from parallel3d.timeline.simulate import StageTimes

ZERO_BUBBLE = {"zb-1p": False, "zb-2p": True}  # published schedules, and whether they double the memory
EARLY_HOPPER = (0.92, 0.66)  # matmul, attention: share of what the device does since


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step takes, and what that is worth."""

    parts: TimeParts
    step_time_s: float
    tokens_per_s_per_gpu: float
    model_flops_per_gpu: float  # per second
    mfu: float  # model FLOPs (`flops.model_flops_per_token`) over the device's dense peak
    hfu: float  # the same with what recompute repeats


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


def kernels_of(run: PlannedRun) -> Kernels:
    """Returns the device as the program's kernels use it."""
    program, matmul, attention = run.program, 1.0, 1.0
    if run.cluster.device.family == "hopper":
        matmul, attention = EARLY_HOPPER if program.early_hopper else (1.0, program.hopper_attention)
    return Kernels(
        device=run.cluster.device,
        precision=run.precision,
        matmul_speed=program.matmul_speed * matmul,
        attention_speed=program.attention_speed * attention,
    )


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """What a step's microbatches take, whatever the data dimension adds."""

    micro: _Microbatch
    rank_s: list[float]
    stage_layers: int  # layers of the largest stage
    seconds: float


BlockTimeCache = dict[tuple[object, ...], _Microbatch]  # one model's on one kind of cluster, by all that they depend on


@dataclass(frozen=True)
class CostCache:
    """What has been computed for other layouts: pipelines by recompute, of those that differ in nothing else but the
    split of the data ranks; a microbatch's times, of any."""

    blocks: BlockTimeCache = field(default_factory=dict)
    pipelines: dict[str, _Pipeline] = field(default_factory=dict)


def step_cost(run: PlannedRun, *, exact: bool = True, known: CostCache | None = None) -> Cost:
    """Prices a step. `exact` simulates the schedule; without, its closed form ranks candidates quickly. This
    project's own program on a calibrated host is priced by what was measured there. `known` is filled, and read."""
    parts = _calibrated(run, exact=exact) or _modelled(run, exact=exact, known=known)
    tokens = run.tokens_per_step / parts.total / run.layout.world_size
    flops = tokens * model_flops_per_token(run.shape, run.seq_len)
    layout = run.layout
    hardware = hardware_flops_per_token(run.shape, run.seq_len, layout.recompute, layout.recompute_every)
    return Cost(
        parts=parts,
        step_time_s=parts.total,
        tokens_per_s_per_gpu=tokens,
        model_flops_per_gpu=flops,
        mfu=flops / run.cluster.device.peak(run.precision),
        hfu=tokens * hardware / run.cluster.device.peak(run.precision),
    )


def stage_times(run: PlannedRun) -> tuple[list[StageTimes], float]:
    """Returns what the schedule is simulated with: every stage's seconds for one microbatch, and those of a
    transfer."""
    return _stage_times(run, _microbatch(run, kernels_of(run))), _send_s(run)


def least_step_s(run: PlannedRun, *, known: CostCache) -> float:
    """Seconds that no layout with this pipeline goes below, however it uses its data ranks: its microbatches, and what
    every step has. It is 0.0 where measurements price the step as a whole."""
    if run.cluster.measured is not None and run.program.is_parallel3d:
        return 0.0
    return _known_pipeline(run, kernels_of(run), exact=False, known=known).seconds + run.program.step_overhead_s


def _calibrated(run: PlannedRun, *, exact: bool) -> TimeParts | None:
    measured = run.cluster.measured
    if measured is None or not run.program.is_parallel3d:
        return None
    return measured_parts(run, measured, exact=exact)


def _modelled(run: PlannedRun, *, exact: bool, known: CostCache | None) -> TimeParts:
    kernels = kernels_of(run)
    pipeline = _known_pipeline(run, kernels, exact=exact, known=known)
    rank_parameters = max(run.stage_parameters(part) for part in {*run.ranks})
    data_s = _data_parallel_s(run, pipeline, rank_parameters)
    optimizer = _optimizer_s(run, kernels, rank_parameters) + _muon_s(run, kernels)
    return _parts(run, pipeline, data_s, optimizer + _tied_embeddings_s(run))


def _known_pipeline(run: PlannedRun, kernels: Kernels, *, exact: bool, known: CostCache | None) -> _Pipeline:
    if known is None:
        return _pipeline(run, _microbatch(run, kernels), exact=exact)
    layout = run.layout
    if layout.recompute not in known.pipelines:
        is_one = layout.microbatches == 1
        key = (layout.tp, layout.sequence_parallel, layout.microbatch_size, layout.recompute, is_one)
        if key not in known.blocks:
            known.blocks[key] = _microbatch(run, kernels)
        known.pipelines[layout.recompute] = _pipeline(run, known.blocks[key], exact=exact)
    return known.pipelines[layout.recompute]


def _pipeline(run: PlannedRun, micro: _Microbatch, *, exact: bool) -> _Pipeline:
    times = _stage_times(run, micro)
    rank_s = [0.0] * run.layout.pp
    for rank, stage in zip(run.placement, times, strict=True):
        rank_s[rank] += stage.forward + stage.backward
    seconds = _pipeline_s(run, micro, times, exact=exact)
    largest = max(part.layers for part in run.stages)
    return _Pipeline(micro=micro, rank_s=rank_s, stage_layers=largest, seconds=seconds)


def _microbatch(run: PlannedRun, kernels: Kernels) -> _Microbatch:
    block = block_times(run, kernels)
    forward, backward, again = _tp_s(run)
    return _Microbatch(
        block=block,
        tp_forward_s=forward,
        tp_backward_s=backward,
        tp_again_s=again,
        cp_s=_cp_s(run, block),
        head_s=head_times(run, kernels),
        embedding_s=embedding_times(run, kernels),
    )


def _tp_s(run: PlannedRun) -> tuple[float, float, float]:
    """Seconds of a block's tp traffic that show: forward, backward, and what recompute repeats. Two all-reduces each
    way, or as many reduce-scatters and all-gathers; sequence parallelism gathers the inputs once more for the weights'
    gradients, beside other work (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2)."""
    layout, cluster, group = run.layout, run.cluster, run.tp_group
    if layout.tp == 1:
        return 0.0, 0.0, 0.0
    size = run.tokens * run.shape.hidden * run.item_bytes
    one = 2 * all_gather_s(cluster, group, size) if layout.sequence_parallel else all_reduce_s(cluster, group, size)
    forward = 2 * one * (1 - run.program.tp_hidden) / run.program.tp_speed
    # Nobody reads the output of a block that is recomputed, and its last collective is sent all the same.
    again = {"full": 1.0, "every_n": 1 / layout.recompute_every, "op": 0.5}.get(layout.recompute, 0.0) * forward
    return forward, forward, again


def _cp_s(run: PlannedRun, block: BlockTimes) -> float:
    """Returns the seconds of context parallelism in a forward: keys and values go round a ring beside the attention
    (Liu et al. 2023, arXiv 2310.01889)."""
    layout = run.layout
    if layout.cp == 1:
        return 0.0
    kv = max(run.shape.kv_hidden // layout.tp, run.shape.head_dim)
    bytes_ = 2 * 2.0 * layout.microbatch_size * run.seq_len * kv
    return 0.5 * all_gather_s(run.cluster, run.cp_group, bytes_)


def _stage_times(run: PlannedRun, micro: _Microbatch) -> list[StageTimes]:
    forward = micro.block.forward_wall_s + micro.tp_forward_s + micro.cp_s
    backward = micro.block.backward_wall_s + micro.tp_backward_s + micro.tp_again_s + 2 * micro.cp_s
    # What of a transfer is not beside compute holds up the stage that sends, in the steady state too.
    blocked = _send_s(run) * (1 - run.program.p2p_hidden) + run.program.action_s
    made: dict[tuple[int, bool, bool], StageTimes] = {}  # stages in the middle are alike
    times = []
    for stage in run.stages:
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


def _pipeline_s(run: PlannedRun, micro: _Microbatch, times: list[StageTimes], *, exact: bool) -> float:
    layout = run.layout
    send = _send_s(run)
    if layout.schedule in ZERO_BUBBLE:
        weight = micro.block.weight_s * run.shape.layers / layout.pp
        return split_backward_s(
            layout.pp, layout.microbatches, times, send, weight_s=weight, double=ZERO_BUBBLE[layout.schedule]
        )
    form = pipeline_s if exact else closed_form_s
    return form(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages, times, send)


def _send_s(run: PlannedRun) -> float:
    """Seconds of an activation on its way to the next stage; with tp and without sequence parallelism each rank sends
    its part and gathers (Narayanan et al. 2021, arXiv 2104.04473, section 4.1)."""
    layout = run.layout
    if layout.pp == 1:
        return 0.0
    ranks_between = layout.dp * layout.cp * layout.tp
    bytes_ = run.tokens * run.shape.hidden * run.item_bytes / layout.tp
    nodes = -(-ranks_between * layout.pp // run.cluster.gpus_per_node)
    return send_s(run.cluster, bytes_, nodes=nodes)


def _data_parallel_s(run: PlannedRun, pipeline: _Pipeline, rank_parameters: int) -> float:
    micro = pipeline.micro
    tp = (micro.tp_forward_s, micro.tp_backward_s + micro.tp_again_s)
    if run.layout.parameter_shards > 1:
        ends = (micro.head_s[0] + micro.embedding_s[0], micro.head_s[1] + micro.embedding_s[1])
        return sharded_s(run, micro.block, tp, ends)
    return reduced_once_s(run, rank_parameters, (micro.block.backward_wall_s + tp[1]) * pipeline.stage_layers)


def _optimizer_s(run: PlannedRun, kernels: Kernels, rank_parameters: int) -> float:
    """Seconds of AdamW: weights, two moments and gradients read, all but the last written, the computing copy written;
    before it the gradient norm reads every gradient, and clipping writes it."""
    program, layout = run.program, run.layout
    own = rank_parameters / layout.optimizer_shards
    gradients = rank_parameters / layout.gradient_shards
    return memory_bound_s(
        kernels, own * 30.0 * program.elementwise + gradients * 3 * program.gradient_bytes, launches=40
    )


def _muon_s(run: PlannedRun, kernels: Kernels) -> float:
    """Returns the seconds of Muon's iterations on the busiest ranks, each of three products, and its two all-to-alls of
    a rank's part, through one port each (`optimizers.muon`)."""
    if run.optimizer.muon is None:
        return 0.0
    layout, blocks = run.layout, max(part.layers for part in run.ranks)
    ranks, matrices = layout.dp * layout.tp, muon_matrices(run, blocks)
    precision = "fp32" if run.optimizer.muon.item_bytes == 4 else "bf16"
    seconds = 0.0
    for shape, count in Counter(busiest_shapes(matrices, ranks=ranks)).items():
        short, long = sorted(shape)
        products = ((short, short, long), (short, short, short), (short, long, short))
        seconds += (
            run.optimizer.muon.iterations
            * count
            * sum(matmul_s(kernels, *sizes, precision=precision) for sizes in products)
        )
    own = blocks * sum(table.shard(muon_shards(run)) for table in hidden_tables(run.shape, layout.tp))
    group, sent = run.stage_group, float(run.optimizer.muon.item_bytes * own)
    return seconds + 2 * all_gather_s(run.cluster, group, sent, one_ring=True)


def _tied_embeddings_s(run: PlannedRun) -> float:
    """Seconds for tied tables: the two copies, on the first and the last stage, sum their gradients: a ring of two,
    each sends one half to be summed and then the other, summed."""
    if not run.shape.tied_embeddings or run.layout.pp == 1:
        return 0.0
    bytes_ = run.shape.vocab * run.shape.hidden / run.layout.tp * run.program.reduce_bytes
    return 2 * send_s(run.cluster, bytes_ / 2, nodes=-(-run.layout.world_size // run.cluster.gpus_per_node))


def _parts(run: PlannedRun, pipeline: _Pipeline, data_s: float, optimizer_s: float) -> TimeParts:
    micro, rank_s = pipeline.micro, pipeline.rank_s
    layout, m = run.layout, run.layout.microbatches
    busiest = rank_s.index(max(rank_s))
    layers = run.ranks[busiest].layers
    recompute = m * layers * micro.block.again_s
    tp = m * layers * (micro.tp_forward_s + micro.tp_backward_s + micro.tp_again_s)
    cp = m * layers * 3 * micro.cp_s
    work = m * rank_s[busiest]
    send = _send_s(run)
    blocked = 2 * m * layout.virtual_stages * send * (1 - run.program.p2p_hidden)
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
        overhead=run.program.step_overhead_s,
    )
