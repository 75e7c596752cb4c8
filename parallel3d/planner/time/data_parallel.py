"""The seconds that data parallelism adds to a step: gradients reduced, parameters gathered, as far as it shows."""

from __future__ import annotations

from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.planner.time.collectives import all_gather_s, all_reduce_s

_CONTENTION = 0.45  # share of a hidden collective's time at the node's speed that kernels beside it lose


def reduced_once_s(run: PlannedRun, rank_parameters: int, backward_s: float) -> float:
    """Seconds that show where parameters are whole on each rank (ZeRO-0 and ZeRO-1): one reduction a step, and with a
    sharded optimizer one gather of what it wrote. `backward_s`: of a rank's last microbatch, beside which a program may
    send in buckets."""
    program, shards = run.program, run.layout.optimizer_shards
    gather_s, reduce_s = _unit_s(run, rank_parameters, shards)
    host_s = 0.0
    if shards > 1:
        gather_s += shards * program.broadcast_s
        # Each slice is a view and a copy of its own, and so it is where gradients are reduced.
        slices = shards * program.cut_tensors * max(part.layers for part in run.ranks)
        host_s = 4 * slices * run.cluster.device.launch_s
    shown = max(0.1 * reduce_s, reduce_s - backward_s) if program.sends_in_last_backward else reduce_s
    return shown * (1 - program.gradients_hidden) + gather_s * (1 - program.gathers_hidden) + host_s


def sharded_s(run: PlannedRun, forward: float, backward: float, ends_s: float) -> float:
    """Seconds that show where parameters are sharded (FSDP, ZeRO-3): while a block computes, the next one's parameters
    are gathered and the last one's gradients reduced; what takes longer than the compute shows. The first gather and
    the last reduction always do. `forward`, `backward`: seconds of a block; `ends_s`: of embedding and head, both
    ways."""
    program, layout = run.program, run.layout
    gather_s, reduce_s = _unit_s(run, run.block_parameters, layout.parameter_shards)
    ends = run.stage_parameters(StageSlice(layers=0, embedding=True, head=True))
    ends_gather_s, ends_reduce_s = _unit_s(run, ends, layout.parameter_shards)
    layers = max(part.layers for part in run.ranks)
    freed = layout.pp == 1 or layout.gather == "microbatch"
    regathers = 1.0 if freed and run.gathers_each_microbatch else 0.0
    both = regathers * gather_s + reduce_s
    moved = run.block_parameters * ((1 + regathers) * program.gather_bytes + program.reduce_bytes)
    forward_slow = max(0.0, gather_s - program.prefetch * forward)
    backward_slow = max(0.0, both - program.prefetch * backward) + _CONTENTION * moved / run.cluster.node.sustained
    ends_slow = max(0.0, 2 * ends_gather_s + ends_reduce_s - ends_s) + gather_s
    rounds = layout.microbatches if run.gathers_each_microbatch else 1
    each = layers * (forward_slow + backward_slow) + ends_slow
    return rounds * each + reduce_s + ends_reduce_s / 2


def _unit_s(run: PlannedRun, parameters: int, shards: int) -> tuple[float, float]:
    """Returns the seconds to gather so many parameters, split over `shards` ranks, and to reduce their gradients."""
    program, layout, cluster, gradients = run.program, run.layout, run.cluster, parameters * run.program.reduce_bytes
    # The ranks that share a parameter, and those of the data and context dimensions that hold the same shard.
    inner, outer = run.group(shards, layout.tp), run.group(layout.dp * layout.cp // shards, layout.tp * shards)
    gather_s = all_gather_s(cluster, inner, parameters * program.gather_bytes, one_ring=program.one_ring)
    reduce_s = all_gather_s(cluster, inner, gradients, one_ring=program.one_ring)
    return gather_s, reduce_s + all_reduce_s(cluster, outer, gradients / shards, one_ring=program.one_ring)
