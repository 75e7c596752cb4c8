"""Seconds of collectives by the alpha-beta model, over groups whose ranks sit on one node or on several, and what data
parallelism adds to a step with them: gradients reduced, parameters gathered, as far as it shows.

Rank order is the mesh's: pp, dp_replicate, dp_shard, (cp,) tp, the last innermost. A ring over n ranks moves
(n - 1) / n of the bytes through its slowest link; NCCL builds a ring for each network port of a node, so that a group
with g ranks on a node has g ports (Thakur et al. 2005; NCCL's tuning model in src/graph/tuning.cc).
"""

from __future__ import annotations

from math import ceil, log2

from parallel3d.planner.hardware.cluster import Cluster, Group
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice


def ring_bandwidth(cluster: Cluster, group: Group, *, one_ring: bool = False) -> float:
    """Bytes per second through the slowest link that the group crosses."""
    if group.nodes == 1:
        return cluster.node.sustained
    ports = 1 if one_ring else group.per_node
    return min(cluster.node.sustained, ports * cluster.network.sustained / _spread(cluster, group.span))


def all_gather_s(cluster: Cluster, group: Group, whole_bytes: float, *, one_ring: bool = False) -> float:
    """Seconds until each rank has `whole_bytes`; a reduce-scatter of them takes the same."""
    if group.size == 1:
        return 0.0
    hops = (group.size - group.nodes) * cluster.node.latency_s + (group.nodes - 1) * cluster.network.latency_s
    share = (group.size - 1) / group.size
    return share * whole_bytes / ring_bandwidth(cluster, group, one_ring=one_ring) + hops


def all_reduce_s(cluster: Cluster, group: Group, whole_bytes: float, *, one_ring: bool = False) -> float:
    """Seconds of a reduce-scatter and an all-gather; small tensors go by trees, of logarithmic latency."""
    if group.size == 1:
        return 0.0
    ring = 2 * all_gather_s(cluster, group, whole_bytes, one_ring=one_ring)
    bandwidth = ring_bandwidth(cluster, group, one_ring=one_ring)
    inside = 2 * ceil(log2(group.per_node)) * cluster.node.latency_s if group.per_node > 1 else 0.0
    across = 2 * ceil(log2(group.nodes)) * cluster.network.latency_s if group.nodes > 1 else 0.0
    tree = 2 * whole_bytes / (0.9 * bandwidth) + inside + across
    return min(ring, tree)


def send_s(cluster: Cluster, bytes_: float, *, nodes: int) -> float:
    """Returns the seconds of a transfer between pipeline stages that lie on so many nodes, by the slowest link."""
    link = cluster.network if nodes > 1 else cluster.node
    return bytes_ / (link.sustained / _spread(cluster, nodes)) + link.latency_s


def _spread(cluster: Cluster, nodes: int) -> float:
    """Returns what the network's upper tiers divide its bandwidth by where so many nodes share it."""
    return cluster.oversubscription if nodes > cluster.whole_nodes else 1.0


def reduced_once_s(run: PlannedRun, rank_parameters: int, backward_s: float) -> float:
    """Seconds that show where parameters are whole on each rank (ZeRO-0 and ZeRO-1): one reduction a step, and with a
    sharded optimizer one gather of what it wrote. `backward_s`: of a rank's last microbatch, beside which some send."""
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
    the last reduction always do. `forward`, `backward`: seconds of a block; `ends_s`: of embedding and head in both."""
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
    backward_slow = (
        max(0.0, both - program.prefetch * backward) + program.contention * moved / run.cluster.node.sustained
    )
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
