"""Seconds of collectives by the alpha-beta model, over groups whose ranks sit on one node or on several.

Rank order is the mesh's: pp, dp_replicate, dp_shard, (cp,) tp, the last innermost. A ring over n ranks moves
(n - 1) / n of the bytes through its slowest link; NCCL builds a ring for each network port of a node, so that a group
with g ranks on a node has g ports (Thakur et al. 2005; NCCL's tuning model in src/graph/tuning.cc).
"""

from __future__ import annotations

from math import ceil, log2

from parallel3d.planner.hardware.cluster import Cluster, Group


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
    hops = (group.per_node - 1) * cluster.node.latency_s + (group.nodes - 1) * cluster.network.latency_s
    share = (group.size - 1) / group.size
    return share * whole_bytes / ring_bandwidth(cluster, group, one_ring=one_ring) + hops


def all_reduce_s(cluster: Cluster, group: Group, whole_bytes: float, *, one_ring: bool = False) -> float:
    """Seconds of a reduce-scatter and an all-gather; small tensors go by trees, whose latency grows with the
    logarithm."""
    if group.size == 1:
        return 0.0
    ring = 2 * all_gather_s(cluster, group, whole_bytes, one_ring=one_ring)
    bandwidth = ring_bandwidth(cluster, group, one_ring=one_ring)
    inside = 2 * ceil(log2(group.per_node)) * cluster.node.latency_s if group.per_node > 1 else 0.0
    across = 2 * ceil(log2(group.nodes)) * cluster.network.latency_s if group.nodes > 1 else 0.0
    tree = 2 * whole_bytes / (0.9 * bandwidth) + inside + across
    return min(ring, tree)


def send_s(cluster: Cluster, bytes_: float, *, nodes: int) -> float:
    """Seconds of one transfer between neighbouring stages of a pipeline that lies on so many nodes, by the slowest link
    between any two of them."""
    link = cluster.network if nodes > 1 else cluster.node
    return bytes_ / (link.sustained / _spread(cluster, nodes)) + link.latency_s


def _spread(cluster: Cluster, nodes: int) -> float:
    """Returns what the network's upper tiers divide its bandwidth by where so many nodes share it."""
    return cluster.oversubscription if nodes > cluster.whole_nodes else 1.0
