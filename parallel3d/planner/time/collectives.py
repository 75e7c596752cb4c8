"""Seconds of collectives by the alpha-beta model, over groups whose ranks sit on one node or on
several, and what data parallelism adds to a step with them: gradients reduced, parameters gathered,
as far as it shows.

Rank order is the mesh's: pp, dp_replicate, dp_shard, (cp,) tp, the last innermost. A ring over n
ranks moves (n - 1) / n of the bytes through its slowest link; NCCL builds a ring for each network
port of a node, so that a group with g ranks on a node has g ports (Thakur et al. 2005; NCCL's
tuning model in src/graph/tuning.cc).
"""

from __future__ import annotations

from math import ceil, log2

from parallel3d.planner.hardware.cluster import Cluster, Group
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice

# Nodes over which a ring keeps half of the bandwidth between neighbours: stragglers, and rings that
# meet in the network's upper tiers. Set on the runs of tools/cases, of 1 to 2,048 GPUs.
_HALF_SPEED_NODES = 256
_HIDDEN = 0.5  # share of a step's one reduction or gather beside compute; set on the same runs


def ring_bandwidth(cluster: Cluster, group: Group) -> float:
    """Bytes per second through the slowest link that the group crosses."""
    if group.nodes == 1:
        return cluster.node.sustained
    network = group.per_node * cluster.network.sustained / _spread(cluster, group.span)
    return min(cluster.node.sustained, network)


def all_gather_s(cluster: Cluster, group: Group, whole_bytes: float) -> float:
    """Seconds until each rank has `whole_bytes`; a reduce-scatter of them takes the same."""
    hops_inside = (group.size - group.nodes) * cluster.node.latency_s
    hops_across = (group.nodes - 1) * cluster.network.latency_s
    hops = hops_inside + hops_across
    share = (group.size - 1) / group.size
    if group.nodes > 1:
        share *= 1 + group.nodes / _HALF_SPEED_NODES
    return share * whole_bytes / ring_bandwidth(cluster, group) + hops


def all_reduce_s(cluster: Cluster, group: Group, whole_bytes: float) -> float:
    """Seconds of a reduce-scatter and an all-gather; small tensors go by trees, of logarithmic
    latency."""
    ring = 2 * all_gather_s(cluster, group, whole_bytes)
    bandwidth = ring_bandwidth(cluster, group)
    inside = 2 * ceil(log2(group.per_node)) * cluster.node.latency_s
    across = 2 * ceil(log2(group.nodes)) * cluster.network.latency_s
    tree = 2 * whole_bytes / (0.9 * bandwidth) + inside + across
    return min(ring, tree)


def hidden_bytes(run: PlannedRun) -> float:
    """Returns the bytes of a microbatch's hidden features."""
    return run.tokens * run.shape.hidden * run.item_bytes


def tp_exchange_s(run: PlannedRun) -> float:
    """Returns the seconds of an all-reduce of the hidden features over tp, or of a reduce-scatter
    and an all-gather."""
    group = run.group(run.layout.tp, 1)
    if run.layout.sequence_parallel:
        return 2 * all_gather_s(run.cluster, group, hidden_bytes(run))
    return all_reduce_s(run.cluster, group, hidden_bytes(run))


def experts_exchange_s(run: PlannedRun) -> float:
    """Returns the seconds in which a microbatch's tokens go to the ranks of their experts, as they
    come back. In this all-to-all each rank sends to ranks of its own node, and at once to others
    through its own port."""
    experts = run.shape.experts
    layout = run.layout
    cluster = run.cluster
    if experts is None or layout.ep == 1:
        return 0.0
    group = run.group(layout.ep, layout.expert_tp)
    bytes_ = hidden_bytes(run) / layout.tp
    # What came from another node goes on within this one to those of its ranks that have the
    # experts.
    copies_within = experts.per_token * (1 - 1 / group.per_node)
    within_s = bytes_ * copies_within / cluster.node.sustained + cluster.node.latency_s
    if group.nodes == 1:
        return within_s
    away = 1 - 1 / group.nodes  # the share of what is sent evenly that goes to other nodes
    copies = experts.per_token
    if experts.most_groups is not None:  # a token goes to each of its nodes once
        copies = min(copies, experts.most_groups, group.nodes)
    port = cluster.network.sustained / _spread(cluster, group.span)
    bandwidth = min(cluster.node.sustained, port)
    across_s = bytes_ * copies * away / bandwidth + group.nodes * cluster.network.latency_s
    return max(within_s, across_s)


def send_s(cluster: Cluster, bytes_: float, *, nodes: int) -> float:
    """Returns the seconds of a transfer between pipeline stages that lie on so many nodes, by the
    slowest link."""
    link = cluster.network if nodes > 1 else cluster.node
    bandwidth = link.sustained / _spread(cluster, nodes)
    return bytes_ / bandwidth + link.latency_s


def _spread(cluster: Cluster, nodes: int) -> float:
    """Returns what the network's upper tiers divide its bandwidth by where so many nodes share
    it."""
    if nodes > cluster.network.whole_nodes:
        return cluster.network.oversubscription
    return 1.0


def reduced_once_s(run: PlannedRun, part: StageSlice) -> float:
    """Returns the exposed seconds of data parallelism with unsharded parameters (ZeRO-0 to ZeRO-2):
    one reduction a step, and with a sharded optimizer one gather of what it wrote. `part`: what a
    rank has of the model."""
    shards = run.layout.optimizer_shards
    gather_s, reduce_s = _unit_s(run, part, shards)
    return (reduce_s + gather_s) * (1 - _HIDDEN)


def sharded_s(
    run: PlannedRun,
    forward: float,
    backward: float,
    ends_s: float,
) -> float:
    """Seconds that show where parameters are sharded (FSDP, ZeRO-3): while a block computes, the
    next one's parameters are gathered and the last one's gradients reduced; what takes longer than
    the compute shows. The first gather and the last reduction always do. `forward`, `backward`:
    seconds of a block; `ends_s`: of embedding and head in both."""
    layout = run.layout
    block = StageSlice(layers=1, embedding=False, head=False)
    gather_s, reduce_s = _unit_s(run, block, layout.parameter_shards)
    ends = StageSlice(layers=0, embedding=True, head=True)
    ends_gather_s, ends_reduce_s = _unit_s(run, ends, layout.parameter_shards)
    layers = max(part.layers for part in run.ranks)
    gathers, reductions = run.sharding_rounds
    regather_s = 0.0
    if gathers > 1 and (layout.pp == 1 or layout.gather_cadence == "microbatch"):
        regather_s = gather_s

    def exposed(gathered_s: float, reduced_s: float, compute_s: float) -> float:
        both_s = reductions * max(0.0, gathered_s + reduced_s - compute_s)
        return both_s + max(0, gathers - reductions) * max(0.0, gathered_s - compute_s)

    blocks_s = gathers * max(0.0, gather_s - forward) + exposed(regather_s, reduce_s, backward)
    both_ends_s = exposed(2 * ends_gather_s, ends_reduce_s, ends_s) + gathers * gather_s
    return layers * blocks_s + both_ends_s + reduce_s + ends_reduce_s / 2


def _unit_s(run: PlannedRun, part: StageSlice, shards: int) -> tuple[float, float]:
    """Returns the seconds to gather the parameters that a rank has of a part of the model, split
    over `shards` ranks, and to reduce their gradients; experts are split over those ranks that have
    the same ones."""
    layout = run.layout
    ranks = layout.dp * layout.cp
    gather_s, reduce_s = _split_s(run, run.stage_parameters(part), shards, ranks, layout.tp)
    experts = run.stage_experts(part)
    if experts:
        more_gather_s, more_reduce_s = _split_s(
            run,
            experts,
            shards=layout.expert_shards(shards),
            ranks=layout.expert_replicas,
            stride=layout.ep * layout.expert_tp,
        )
        gather_s += more_gather_s
        reduce_s += more_reduce_s
    return gather_s, reduce_s


def _split_s(
    run: PlannedRun,
    parameters: int,
    shards: int,
    ranks: int,
    stride: int,
) -> tuple[float, float]:
    """Returns the seconds to gather so many parameters, split over `shards` of the `ranks` that
    have them in common, which are `stride` apart, and to reduce their gradients."""
    framework = run.framework
    cluster = run.cluster
    gradients = parameters * framework.reduce_bytes
    if framework.is_parallel3d:
        gradients = parameters * run.layout.reduce_bytes
    inner = run.group(shards, stride)
    outer = run.group(ranks // shards, stride * shards)
    gather_s = all_gather_s(cluster, inner, parameters * run.item_bytes)
    scatter_s = all_gather_s(cluster, inner, gradients)
    replicas_s = all_reduce_s(cluster, outer, gradients / shards)
    if inner.nodes == 1 and shards > 1:  # two streams: links in the node, and the network
        return gather_s, max(scatter_s, replicas_s)
    return gather_s, scatter_s + replicas_s
