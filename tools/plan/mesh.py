"""The mesh of a layout: how its axes lie on the nodes, and the bytes that each axis sends."""

from __future__ import annotations

from math import ceil
from typing import Any

from parallel3d.planner.hardware.units import GIB
from parallel3d.planner.search.request import Strategy
from parallel3d.planner.time.traffic import sent_bytes


def mesh_tree(best: Strategy) -> dict[str, Any]:
    """Returns the axes of a layout, the innermost first. The ranks of an axis are `stride` apart.

    The ranks of ep are also those of other axes.
    """
    run = best.run
    layout = run.layout
    sent = sent_bytes(run)
    strides = {"ep": layout.expert_tp} if run.shape.experts else {}
    stride = 1
    for axis, size in reversed(layout.axes.items()):
        strides[axis] = stride
        stride *= size
    axes = []
    for axis, stride in strides.items():
        size = getattr(layout, axis)
        group = run.group(size, stride)
        tree = {
            "axis": axis,
            "size": size,
            "stride": stride,
            "ranks_per_node": group.per_node,
            "nodes": group.nodes,
            "sent_gib": sent[axis] / GIB,
        }
        axes.append(tree)
    per_node = run.cluster.gpus_per_node
    nodes = ceil(layout.world_size / per_node)
    return {"gpus_per_node": per_node, "nodes": nodes, "axes": axes}
