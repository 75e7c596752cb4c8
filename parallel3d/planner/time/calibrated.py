"""The time of a step on a host that was calibrated: its own curves, and what this program adds to them as measured.

The parts are those of `step`, put together otherwise: a CPU dispatches before each kernel and not beside it, and ranks
that are more than the cores share them. So a pipeline is simulated with as many of its ranks at full speed as there are
cores for (`pipeline.shared_makespan_s`), and everything that all ranks do at once takes `slowdown` longer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from parallel3d.config.sharding_strategies import REPLICATED
from parallel3d.planner.hardware.calibration import Calibration, ManyRanks, OneProcess, Overhead
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.time.block import block_times, embedding_times, head_times
from parallel3d.planner.time.collectives import all_gather_s, all_reduce_s, send_s
from parallel3d.planner.time.parts import TimeParts
from parallel3d.planner.time.pipeline import closed_form_s, pipeline_s, shared_makespan_s
from parallel3d.planner.time.roofline import Kernels
from parallel3d.timeline.simulate import StageTimes

_FORWARD = 0.4  # the forward's share of what a block dispatches
_NONE = Overhead(block=0.0, microbatch=0.0, layer=0.0, step=0.0, parameter=0.0)


@dataclass(frozen=True, kw_only=True)
class _Way:
    """Seconds of one block and one microbatch in one direction, by cause."""

    compute: float
    recompute: float
    tp: float
    dp: float
    overhead: float

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.tp + self.dp + self.overhead


@dataclass(frozen=True, kw_only=True)
class _Host:
    """The measurements that hold for a job."""

    measured: Calibration
    process: OneProcess
    ranks: ManyRanks | None
    on_host: int  # ranks of a host
    tp: Overhead
    dp: Overhead

    @property
    def slowdown(self) -> float:
        return self.measured.slowdown(self.on_host)


def measured_parts(run: PlannedRun, measured: Calibration, *, exact: bool) -> TimeParts:
    """Prices a step by cause, in seconds. `exact` simulates the schedule."""
    host = _host(run, measured)
    forward, backward = _block(run, host)
    times, ends_s = _stage_times(run, host, forward, backward)
    pipeline = _pipeline_s(run, host, times, exact=exact)
    rank_s = [0.0] * run.layout.pp
    for rank, stage in zip(run.placement, times, strict=True):
        rank_s[rank] += stage.forward + stage.backward
    busiest = rank_s.index(max(rank_s))
    m, layers, part = run.layout.microbatches, run.ranks[busiest].layers, run.ranks[busiest]
    work = min(pipeline, m * rank_s[busiest] * host.slowdown)
    each = work / rank_s[busiest]  # m, slowed
    both = {f.name: layers * (getattr(forward, f.name) + getattr(backward, f.name)) * each for f in fields(_Way)}
    ends = sum(ends_s[: len(run.stages)][i] for i, rank in enumerate(run.placement) if rank == busiest) * each
    p2p = 2 * run.layout.virtual_stages * _action_s(run, host) * each
    once = _once(run, host, run.stage_parameters(part), layers)
    return TimeParts(
        compute=max(0.0, work - p2p - sum(both.values()) + both["compute"] - host.process.overhead.microbatch * each),
        recompute=both["recompute"],
        tp=both["tp"],
        cp=0.0,
        pp_bubble=pipeline - work,
        pp_p2p=p2p,
        dp=both["dp"] + once["dp"],
        optimizer=once["optimizer"],
        overhead=both["overhead"] + min(ends, host.process.overhead.microbatch * each) + once["overhead"],
    )


def _host(run: PlannedRun, measured: Calibration) -> _Host:
    layout = run.layout
    on_host = min(layout.world_size, run.cluster.gpus_per_node)
    # What splits, and what repeats: FULL_SHARD stands for all whose parameters are split.
    strategy = layout.strategy or "FULL_SHARD"
    whole = strategy in REPLICATED
    shards = 1 if strategy == "NO_SHARD" else layout.dp_shard
    added = [
        measured.overhead("SHARD_OPTIMIZER" if whole else "FULL_SHARD", shards),
        measured.overhead("NO_SHARD" if whole else "HYBRID_SHARD", layout.dp // shards),
    ]
    return _Host(
        measured=measured,
        process=measured.process(on_host),
        ranks=measured.together(on_host),
        on_host=on_host,
        tp=measured.overhead("tp_sequence" if layout.sequence_parallel else "tp", layout.tp) or _NONE,
        dp=_sum([each for each in added if each is not None]),
    )


def _sum(parts: list[Overhead]) -> Overhead:
    return Overhead(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(Overhead)})


def _kernels(run: PlannedRun, host: _Host) -> tuple[PlannedRun, Kernels]:
    """Returns the run without what its program assumes of kernels, and the kernels as they were measured."""
    program = replace(run.program, elementwise=1.0, launches=0, blocking=False, loss_passes=0.0)
    return replace(run, program=program), Kernels(
        device=run.cluster.device, precision=run.precision, process=host.process
    )


def _block(run: PlannedRun, host: _Host) -> tuple[_Way, _Way]:
    calibrated_run, kernels = _kernels(run, host)
    block = block_times(calibrated_run, kernels)
    tp_forward, tp_backward = _tp_s(run, host)
    full = run.layout.recompute == "full"
    # What recompute repeats costs its dispatch too, which was measured.
    again = block.again_s + host.process.recompute.get(run.layout.recompute, 0.0)
    ways = []
    for share, compute, repeated, tp in (
        (_FORWARD, block.forward_s, 0.0, tp_forward),
        (1 - _FORWARD, block.backward_s, again, tp_backward + (tp_forward if full else 0.0)),
    ):
        dispatch = share * host.process.overhead.block
        if not host.measured.synchronous:  # launched ahead: only what takes longer than the kernels shows
            dispatch = max(0.0, dispatch - compute - repeated)
        ways.append(
            _Way(
                compute=compute,
                recompute=repeated,
                tp=tp + share * host.tp.block,
                dp=share * host.dp.block,
                overhead=dispatch,
            )
        )
    return ways[0], ways[1]


def _tp_s(run: PlannedRun, host: _Host) -> tuple[float, float]:
    """The layers' collectives beyond their smallest messages: two each way, of which those of sequence parallelism are
    a gather and a reduce-scatter, with two more gathers in the backward."""
    layout = run.layout
    if layout.tp == 1:
        return 0.0, 0.0
    bytes_ = run.tokens * run.shape.hidden * run.item_bytes
    if host.ranks is None or run.tp_group.nodes > 1:
        whole = all_gather_s if layout.sequence_parallel else all_reduce_s
        one = whole(run.cluster, run.tp_group, bytes_) * (2 if layout.sequence_parallel else 1)
        return 2 * one, 2 * one
    if not layout.sequence_parallel:
        one = host.measured.collective_s("all_reduce", layout.tp, bytes_)
        return 2 * one, 2 * one
    gather = host.measured.collective_s("all_gather", layout.tp, bytes_)
    scatter = host.measured.collective_s("reduce_scatter", layout.tp, bytes_)
    return 2 * (gather + scatter), 4 * gather + 2 * scatter


def _stage_times(run: PlannedRun, host: _Host, forward: _Way, backward: _Way) -> tuple[list[StageTimes], list[float]]:
    """Returns the seconds of each stage, and those that its embedding and head take."""
    calibrated_run, kernels = _kernels(run, host)
    head, embedding = head_times(calibrated_run, kernels), embedding_times(calibrated_run, kernels)
    loss = host.process.logit_s * run.tokens * run.loss_vocab / 2
    micro = host.process.overhead.microbatch + host.tp.microbatch + host.dp.microbatch
    action = _action_s(run, host)
    times, ends = [], []
    for stage in run.stages:
        f, b = stage.layers * forward.total, stage.layers * backward.total
        ends_f, ends_b = 0.0, 0.0
        if stage.embedding:
            ends_f, ends_b = ends_f + embedding[0] + _FORWARD * micro / 2, ends_b + embedding[1] + 0.6 * micro / 2
        if stage.head:
            ends_f, ends_b = ends_f + head[0] + loss + _FORWARD * micro / 2, ends_b + head[1] + loss + 0.6 * micro / 2
        half_s = (b + ends_b + action) / 2
        times.append(StageTimes(forward=f + ends_f + action, input=half_s, weight=half_s))
        ends.append(ends_f + ends_b)
    return times, ends


def _action_s(run: PlannedRun, host: _Host) -> float:
    """Seconds that an action of a pipeline takes beside its stage: its place in the schedule, and a message."""
    layout = run.layout
    if layout.pp == 1:
        return 0.0
    bytes_ = run.tokens * run.shape.hidden * run.item_bytes / (layout.tp if layout.sequence_parallel else 1)
    if host.ranks is None or layout.world_size > run.cluster.gpus_per_node:
        return send_s(run.cluster, bytes_, nodes=1 if host.ranks is None else 2)
    return host.ranks.action_s + max(0.0, host.ranks.transfer.at(bytes_) - host.ranks.transfer.points[0][1])


def _pipeline_s(run: PlannedRun, host: _Host, times: list[StageTimes], *, exact: bool) -> float:
    layout = run.layout
    name = layout.schedule
    if layout.pp == 1:
        return layout.microbatches * sum(t.forward + t.backward for t in times) * host.slowdown
    cores = host.measured.cores or host.on_host
    at_once = layout.pp * cores / host.on_host  # pipeline ranks that have a core for each of their processes
    arguments = (name, layout.pp, layout.microbatches, layout.virtual_stages, times)
    contention = host.slowdown / max(1.0, host.on_host / cores)
    if at_once >= layout.pp:
        return (pipeline_s if exact else closed_form_s)(*arguments, 0.0) * contention
    if exact:
        return shared_makespan_s(*arguments, at_once) * contention
    work = layout.microbatches * sum(t.forward + t.backward for t in times) / at_once
    return max(work, closed_form_s(*arguments, 0.0)) * contention


def _once(run: PlannedRun, host: _Host, parameters: int, layers: int) -> dict[str, float]:
    """Returns the seconds, by cause, of what comes once a step."""
    base, slow = host.process.overhead, host.slowdown
    own = parameters / run.layout.optimizer_shards
    added = _sum([host.tp, host.dp])
    rounds = run.layout.microbatches if "microbatch" in (run.layout.gather, run.layout.reduce) else 1
    return {
        "optimizer": slow * (base.parameter * own + layers * base.layer),
        "dp": rounds * slow * (host.dp.step + layers * host.dp.layer + parameters * host.dp.parameter),
        "overhead": slow * (base.step + added.step - host.dp.step + layers * host.tp.layer),
    }
