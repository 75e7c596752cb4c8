"""Bytes that a GPU sends per step over each axis of the mesh."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from parallel3d.planner.hardware.cluster import NodeLink
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.time.collectives import (
    all_data_parallel_s,
    context_gather_s,
    experts_exchange_s,
    hidden_bytes,
    passes,
    tp_block_s,
)


def sent_bytes(run: PlannedRun) -> dict[str, float]:
    """Returns the bytes by axis that `step_cost` prices, on the pipeline rank that sends most.

    cp shards and replicates parameters together with dp_shard and dp_replicate. This counts as
    theirs unless their size is 1. The optimizer, the gradients of tied embeddings and offloading
    are not counted.
    """
    layout = run.layout
    blocks = layout.microbatches * max(part.layers for part in run.ranks)
    neighbours = Counter[int]()  # Number of stages on other ranks that a rank sends to.
    for pair in pairwise(run.placement):
        if pair[0] != pair[1]:
            neighbours.update(pair)
    messages = layout.microbatches * max(neighbours.values(), default=0)
    # On a single node with links of one byte per second, seconds are bytes.
    link = NodeLink(gb_per_s=1e-9, latency_us=0, efficiency=1, gpus=layout.world_size)
    run = replace(run, cluster=replace(run.cluster, node=link))
    sharded, replicated = all_data_parallel_s(run)
    sent = {
        "pp": messages * hidden_bytes(run) / layout.tp,
        "dp_replicate": replicated,
        "dp_shard": sharded,
        "cp": 3 * blocks * context_gather_s(run),
        "tp": passes(run) * blocks * sum(tp_block_s(run)),
        "ep": passes(run) * 2 * blocks * experts_exchange_s(run),
    }
    for axis in ("dp_shard", "dp_replicate"):
        if getattr(layout, axis) == 1:
            sent["cp"] += sent[axis]
            sent[axis] = 0.0
    return sent
