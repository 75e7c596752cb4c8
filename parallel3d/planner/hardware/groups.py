"""How the ranks that a mesh axis joins lie on the nodes of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from parallel3d.planner.hardware.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of one axis: how many, how many of them share a node, and from how many nodes they are picked."""

    size: int
    per_node: int
    span: int = 1

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def axis_group(cluster: Cluster, size: int, stride: int, *, world: int) -> Group:
    """Returns the group of `size` ranks, `stride` apart, among `world` ranks. Where a node is no multiple of such
    groups some of them lie across two nodes, and the slowest counts, unless all ranks are on one node."""
    node = cluster.gpus_per_node
    if world <= node:
        return Group(size=size, per_node=size)
    span = size * stride
    per_node = gcd(node, span) // stride if span < node and node % span else min(size, node // stride)
    return Group(size=size, per_node=max(1, per_node), span=-(-span // node))
