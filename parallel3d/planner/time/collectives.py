"""Seconds of collectives by the alpha-beta model, and the exposed data-parallel communication.

Ranks are in mesh order: pp, dp_replicate, dp_shard, cp, tp. The last varies fastest. A ring over
n ranks moves (n - 1) / n of the bytes through its slowest link. NCCL builds a ring for each network
port of a node, so a group with g ranks per node uses g ports (Thakur et al. 2005; NCCL's tuning
model in src/graph/tuning.cc).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, log2

from parallel3d.planner.hardware.cluster import Cluster, Group
from parallel3d.planner.model.planned_run import PlannedRun
from parallel3d.planner.model.shapes import StageSlice
from parallel3d.planner.time.block import MicrobatchTimes

# A ring over this many nodes has half the bandwidth between neighbours, because of stragglers
# and congestion in the upper network tiers. Fitted on the runs of tools/cases with 1 to 2,048 GPUs.
_HALF_SPEED_NODES = 256
_BLOCK = StageSlice(layers=1)
_ENDS = StageSlice(embedding=True, head=True)
_HIDDEN = 0.5  # overlapped fraction of collectives that run once per step, fitted on the same runs


def ring_bandwidth(cluster: Cluster, group: Group) -> float:
    """Returns the bytes per second through the slowest link of a ring over the group."""
    if group.nodes == 1:
        return cluster.node.sustained
    network = group.per_node * _port_bandwidth(cluster, group.span)
    return min(cluster.node.sustained, network)


def all_gather_s(cluster: Cluster, group: Group, whole_bytes: float) -> float:
    """Returns the seconds of an all-gather with `whole_bytes` of output, or of a reduce-scatter
    with that much input."""
    hops_inside = (group.size - group.nodes) * cluster.node.latency_s
    hops_across = (group.nodes - 1) * cluster.network.latency_s
    hops = hops_inside + hops_across
    share = (group.size - 1) / group.size
    if group.nodes > 1:
        share *= 1 + group.nodes / _HALF_SPEED_NODES
    return share * whole_bytes / ring_bandwidth(cluster, group) + hops


def all_reduce_s(cluster: Cluster, group: Group, whole_bytes: float) -> float:
    """Returns the seconds of an all-reduce by a ring or a tree, whichever is faster."""
    ring = 2 * all_gather_s(cluster, group, whole_bytes)
    bandwidth = ring_bandwidth(cluster, group)
    inside = 2 * ceil(log2(group.per_node)) * cluster.node.latency_s
    across = 2 * ceil(log2(group.nodes)) * cluster.network.latency_s
    tree = 2 * whole_bytes / (0.9 * bandwidth) + inside + across
    return min(ring, tree)


def hidden_bytes(run: PlannedRun) -> float:
    """Returns the bytes of a microbatch's hidden states, not split over tp."""
    return run.tokens * run.shape.hidden * run.item_bytes


def tp_exchange_s(run: PlannedRun) -> float:
    """Returns the seconds of an all-reduce of the hidden states over tp, or with sequence
    parallelism, of a reduce-scatter and an all-gather."""
    group = run.group(run.layout.tp, 1)
    if run.layout.sequence_parallel:
        return 2 * all_gather_s(run.cluster, group, hidden_bytes(run))
    return all_reduce_s(run.cluster, group, hidden_bytes(run))


def tp_block_s(run: PlannedRun) -> tuple[float, float]:
    """Returns the seconds of a block's tp collectives in one pass: those of the hidden states, and
    those of the rows of ranks that shard an expert.

    These are two all-reduces, or two pairs of reduce-scatter and all-gather. Sequence parallelism
    gathers the inputs once more for weight gradients, overlapped with other work (Korthikanti et
    al. 2022, arXiv 2205.05198, section 4.2).
    """
    layout = run.layout
    hidden_s = 2 * tp_exchange_s(run)
    experts = run.shape.experts
    if experts is None:
        return hidden_s, 0.0
    # Each rank routes its own tokens, so routed experts do not need the tp all-gather.
    share = 1.0 if experts.shared_hidden else 0.5
    if run.framework.is_parallel3d and not layout.sequence_parallel:
        share += 0.25  # An all-gather of the results.
    rows_bytes = run.routed_rows * run.shape.hidden * run.item_bytes
    neighbours = run.group(layout.expert_tp, 1)
    return share * hidden_s, 2 * all_gather_s(run.cluster, neighbours, rows_bytes)


def passes(run: PlannedRun) -> float:
    """Returns the number of times that a microbatch runs a block's tp and ep communication.

    A recomputed block repeats its last collective, although its output is unused.
    """
    repeated = {"full": 1.0, "every_n": 1 / run.layout.recompute_every, "op": 0.5}
    return 2 + repeated.get(run.layout.recompute, 0.0)


def context_gather_s(run: PlannedRun) -> float:
    """Returns the seconds to send a layer's keys and values, or their gradients, over cp."""
    layout = run.layout
    kv_hidden = max(run.shape.kv_hidden // layout.tp, run.shape.head_dim)
    bytes_ = 2 * run.item_bytes * layout.microbatch_size * run.seq_len * kv_hidden
    return all_gather_s(run.cluster, run.group(layout.cp, layout.tp), bytes_)


def experts_exchange_s(run: PlannedRun) -> float:
    """Returns the seconds of the all-to-all that sends a microbatch's tokens to their experts.

    The all-to-all back takes the same time. Transfers within the node and through the rank's
    network port overlap.
    """
    experts = run.shape.experts
    layout = run.layout
    cluster = run.cluster
    if experts is None or layout.ep == 1:
        return 0.0
    group = run.group(layout.ep, layout.expert_tp)
    bytes_ = hidden_bytes(run) / layout.tp
    # Tokens from another node are forwarded within this node to the ranks of their experts.
    copies_within = experts.per_token * (1 - 1 / group.per_node)
    within_s = bytes_ * copies_within / cluster.node.sustained + cluster.node.latency_s
    if group.nodes == 1:
        return within_s
    away = 1 - 1 / group.nodes  # Fraction of evenly distributed traffic that leaves the node.
    copies = experts.per_token
    if experts.most_groups is not None:  # A token is sent to each node at most once.
        copies = min(copies, experts.most_groups, group.nodes)
    bandwidth = min(cluster.node.sustained, _port_bandwidth(cluster, group.span))
    across_s = bytes_ * copies * away / bandwidth + group.nodes * cluster.network.latency_s
    return max(within_s, across_s)


def send_s(run: PlannedRun, bytes_: float) -> float:
    """Returns the seconds of a transfer between pipeline stages, over the network if the run has
    several nodes."""
    cluster = run.cluster
    nodes = ceil(run.layout.world_size / cluster.gpus_per_node)
    if nodes == 1:
        return bytes_ / cluster.node.sustained + cluster.node.latency_s
    return bytes_ / _port_bandwidth(cluster, nodes) + cluster.network.latency_s


def _port_bandwidth(cluster: Cluster, nodes: int) -> float:
    """Returns the bytes per second of a network port that connects this number of nodes."""
    network = cluster.network
    if nodes > network.whole_nodes:
        return network.sustained / network.oversubscription
    return network.sustained


def reduced_once_s(run: PlannedRun, part: StageSlice) -> float:
    """Returns the exposed data-parallel seconds per step without sharded parameters (up to ZeRO-2).

    Gradients are reduced once per step. If the optimizer is sharded, updated parameters are
    all-gathered.
    """
    gather_s, reduce_s = _unit_s(run, part)
    return (reduce_s + gather_s) * (1 - _HIDDEN)


def sharded_s(run: PlannedRun, micro: MicrobatchTimes) -> float:
    """Returns the exposed data-parallel seconds per step with sharded parameters (FSDP, ZeRO-3).

    While a block computes, the next block is all-gathered and the gradients of the previous one are
    reduced. The first all-gather and the last reduction are never overlapped.
    """
    gather_s, reduce_s = _unit_s(run, _BLOCK)
    ends_gather_s, ends_reduce_s = _unit_s(run, _ENDS)
    layers = max(part.layers for part in run.ranks)
    gathers, reductions = run.sharding_rounds
    regather_s = gather_s if _regathers(run) else 0.0

    def exposed(gathered_s: float, reduced_s: float, compute_s: float) -> float:
        both_s = reductions * max(0.0, gathered_s + reduced_s - compute_s)
        return both_s + max(0, gathers - reductions) * max(0.0, gathered_s - compute_s)

    blocks_s = gathers * max(0.0, gather_s - micro.forward_s)
    blocks_s += exposed(regather_s, reduce_s, micro.backward_s)
    both_ends_s = exposed(2 * ends_gather_s, ends_reduce_s, micro.ends_s) + gathers * gather_s
    return layers * blocks_s + both_ends_s + reduce_s + ends_reduce_s / 2


def all_data_parallel_s(run: PlannedRun) -> tuple[float, float]:
    """Returns the seconds per step of data-parallel collectives, overlapped or not, over the shards
    and over the replicas of a parameter.

    With sharded parameters, they are of a rank with the most blocks, the embedding and the head.
    """
    # Slices, each with its number, all-gathers and reductions per step.
    slices = [(max({*run.ranks}, key=run.stage_parameters), 1, 1, 1)]
    if run.layout.parameter_shards > 1:
        gathers, reductions = run.sharding_rounds
        layers = max(part.layers for part in run.ranks)
        block_gathers = 2 * gathers if _regathers(run) else gathers
        slices = [(_BLOCK, layers, block_gathers, reductions), (_ENDS, 1, 2 * gathers, reductions)]
    sharded_s = replicated_s = 0.0
    for part, count, gathers, reductions in slices:
        for _, gather_s, scatter_s, replicas_s in _collectives_s(run, part):
            sharded_s += count * (gathers * gather_s + reductions * scatter_s)
            replicated_s += count * reductions * replicas_s
    return sharded_s, replicated_s


def _regathers(run: PlannedRun) -> bool:
    """Returns True if the backward pass of a block all-gathers its parameters again."""
    gathers, _ = run.sharding_rounds
    layout = run.layout
    return gathers > 1 and (layout.pp == 1 or layout.gather_cadence == "microbatch")


def _unit_s(run: PlannedRun, part: StageSlice) -> tuple[float, float]:
    """Returns the seconds to all-gather the parameters of a slice and to reduce their gradients."""
    gathers_s = reduce_s = 0.0
    for inner, gather_s, scatter_s, replicas_s in _collectives_s(run, part):
        gathers_s += gather_s
        if inner.nodes == 1 and inner.size > 1:
            # Links in the node and the network are used in parallel.
            reduce_s += max(scatter_s, replicas_s)
        else:
            reduce_s += scatter_s + replicas_s
    return gathers_s, reduce_s


def _collectives_s(
    run: PlannedRun, part: StageSlice
) -> Iterator[tuple[Group, float, float, float]]:
    """Yields the group that shards the parameters of a slice, and the seconds of an all-gather, a
    reduce-scatter, and an all-reduce between replicas. Then the same for its experts, if any.

    Experts are sharded over the ranks that hold the same experts.
    """
    layout = run.layout
    framework = run.framework
    cluster = run.cluster
    reduce_bytes = framework.reduce_bytes
    if framework.is_parallel3d:
        reduce_bytes = layout.reduce_bytes
    # Parameters, and the ranks that share them, in replicas of `shards` ranks, `stride` apart.
    shards = layout.optimizer_shards
    shared = [(run.stage_parameters(part), layout.replicas, shards, layout.tp)]
    if experts := run.stage_experts(part):
        stride = layout.ep * layout.expert_tp
        own_shards = layout.expert_shards(shards)
        shared.append((experts, layout.expert_replicas, own_shards, stride))
    for parameters, ranks, shards, stride in shared:
        gradients = parameters * reduce_bytes
        inner = run.group(shards, stride)
        outer = run.group(ranks // shards, stride * shards)
        gather_s = all_gather_s(cluster, inner, parameters * run.item_bytes)
        scatter_s = all_gather_s(cluster, inner, gradients)
        yield inner, gather_s, scatter_s, all_reduce_s(cluster, outer, gradients / shards)
