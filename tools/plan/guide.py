"""`parallel3d-plan guide`: shows a table of strategies by cluster and model size."""

from __future__ import annotations

import argparse
import tomllib
from dataclasses import replace
from pathlib import Path

from parallel3d.config.recipe import ParallelConfig
from parallel3d.planner.search.request import PlanRequest, Strategy
from parallel3d.tools.cli_output import Reply
from parallel3d.tools.plan.inputs import usual_request

# This many GPUs share the states, so that each holds little more than one layer.
_MANY = 4096
_FAST_NODE = 100e9  # A node is fast with at least this bandwidth per device, in bytes per second.
_FAST_NETWORK = 20e9


def answer(options: argparse.Namespace) -> Reply:
    """Returns the table, with the row for the model and cluster marked if a model is given."""
    guide = tomllib.loads(Path(__file__).with_name("guide.toml").read_text())
    cell = None
    if options.model or options.layers:
        cell = find_cell(usual_request(options, gpus=options.gpus))
    lines = []
    for place, sizes in guide["clusters"].items():
        lines.append(place)
        for size, (strategy, flags) in sizes.items():
            mark = ">" if (place, size) == cell else " "
            lines.append(f"{mark} {size:<19}{strategy:<44}{flags}".rstrip())
    return Reply(
        page=[*lines, guide["ask"]],
        tree=lambda: {"schema": "parallel3d.guide/1", "cell": cell, **guide},
    )


def find_cell(request: PlanRequest) -> tuple[str, str]:
    """Returns the cluster type and model size that guide.toml uses for a request."""
    cluster = request.cluster
    place = "many nodes, slow links"
    if request.gpus == 1:
        place = "one GPU"
    elif request.gpus <= cluster.gpus_per_node:
        place = f"one node, {'fast' if cluster.node.bandwidth >= _FAST_NODE else 'slow'} links"
    elif cluster.network.bandwidth >= _FAST_NETWORK:
        place = "many nodes, fast links"
    for gpus, size in ((1, "the model fits"), (_MANY, "only a layer fits")):
        layout = ParallelConfig(dp_shard=gpus, recompute="full")
        shared = replace(request, gpus=gpus, global_batch_size=gpus)
        if Strategy(shared, layout).memory.total <= request.usable_bytes:
            return place, size
    return place, "no layer fits"
