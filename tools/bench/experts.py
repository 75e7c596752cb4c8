"""Benchmark of a mixture of experts, forward and backward, in one process and over ranks.

In one process the peers are the Mixtral block of transformers, with either of its implementations,
and a dense MLP with as many active features. Over ep ranks, each with its part of the tokens, the
peer is one process. On 4 ranks that shard the parameters, the peer is the same layer without ep.
All mixtures start from the same weights. Their outputs and input gradients must agree before
timing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.config.recipe import ParallelConfig
from parallel3d.layers.experts import ParallelExperts
from parallel3d.layers.mlp import ParallelMLP
from parallel3d.layers.parameter import ParallelContext, initialize, set_fused_gradients
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.mesh import Role, build_mesh, expert_mesh
from parallel3d.sharding.apply import shard
from parallel3d.tools.bench.harness import (
    Case,
    TimedCase,
    check_agreement,
    pass_both_ways,
    time_in_turn,
)
from parallel3d.tools.bench.report import Round

HIDDEN = 512
FFN_HIDDEN = 1376
COUNT = 8
PER_TOKEN = 2
TOKENS = 2048
# "contestant vs peer" -> ep, number of ranks, largest ratio of CPU time.
CASES = {
    "one process vs Mixtral eager": (1, 1, 0.95),
    "one process vs Mixtral grouped_mm": (1, 1, 0.95),
    "one process vs dense MLP": (1, 1, 1.2),
    "ep 2 vs one process": (2, 2, 1.25),
    "ep 4 vs one process": (4, 4, 1.25),
    "ep 4 vs fully_shard": (4, 4, 0.5),
    "ep 2 x dp_shard 2 vs fully_shard": (2, 4, 0.8),
}


def expert_cases() -> dict[str, Case]:
    has_transformers = find_spec("transformers") is not None
    if not has_transformers:
        print("skipped Mixtral; run pip install 'parallel3d[dev]'", file=sys.stderr)
    cases: dict[str, Case] = {}
    for name, (ep, ranks, bar) in CASES.items():
        if has_transformers or "Mixtral" not in name:
            cases[f"experts: {name}"] = TimedCase(
                measure=measure,
                arguments=(ep, name.partition(" vs ")[2]),
                world_size=ranks,
                rounds=5,
                steps=2,
                cpu_bar=bar,
            )
    return cases


def measure(ep: int, peer: str, rounds: int, steps: int) -> list[Round]:
    """Times a layer over all ranks, and its peer. Runs on every rank."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    is_sharded = peer == "fully_shard"
    ours = own_layer(ep, is_sharded)
    other = peer_layer(peer)
    whole = torch.randn(2, 1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    own = whole.chunk(ranks, dim=2)[rank]
    seen = own if is_sharded else whole
    found = pass_both_ways(ours, *own)
    wanted: Sequence[Tensor] = pass_both_ways(other, *seen)
    if not is_sharded:
        wanted = [each.chunk(ranks, dim=1)[rank] for each in wanted]
    if peer != "dense MLP":
        check_agreement(zip(("output", "input gradient"), found, wanted, strict=True))

    def step_peer(_: int) -> None:
        if is_sharded or rank == 0:
            pass_both_ways(other, *seen)

    return time_in_turn(
        lambda _: pass_both_ways(ours, *own),
        step_peer,
        rounds=rounds,
        steps=steps,
    )


def own_layer(ep: int, is_sharded: bool) -> ParallelExperts:
    """Returns our layer. With `is_sharded`, `fully_shard` splits its parameters over the ranks."""
    mesh = build_mesh(ParallelConfig(dp_shard=dist.get_world_size(), ep=ep), "cpu")
    experts = expert_mesh(mesh, ep)
    context = ParallelContext(ep=experts[Role.SPLIT_TENSORS])
    layer = ParallelExperts(HIDDEN, FFN_HIDDEN, COUNT, PER_TOKEN, tp=context)
    initialize(layer, 0, "cpu")
    set_fused_gradients(layer, True)
    if is_sharded:
        shard(layer, mesh, "FULL_SHARD", wrap=["experts"], average=False, experts=experts)
    return layer


def peer_layer(peer: str) -> nn.Module:
    name, _, implementation = peer.partition(" ")
    if name == "dense":
        dense = ParallelMLP(HIDDEN, PER_TOKEN * FFN_HIDDEN)
        set_fused_gradients(dense, True)
        return dense
    if name == "Mixtral":
        return mixtral(own_layer(1, is_sharded=False), implementation)
    return own_layer(1, is_sharded=name == "fully_shard")


@torch.no_grad()
def mixtral(ours: ParallelExperts, implementation: str) -> nn.Module:
    """Returns the block of transformers with the weights of our layer."""
    module = import_module("transformers.models.mixtral.modeling_mixtral")
    config = module.MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN_HIDDEN,
        num_local_experts=COUNT,
        num_experts_per_tok=PER_TOKEN,
    )
    config._experts_implementation = implementation
    block: nn.Module = module.MixtralSparseMoeBlock(config)
    router, gate, up, down = (
        local_tensor(each).unflatten(0, (COUNT, -1)) for each in ours.parameters()
    )
    wide = torch.cat((gate, up), dim=1)
    for theirs, own in zip(block.parameters(), (router[:, 0], wide, down), strict=True):
        theirs.copy_(own)
    return block
