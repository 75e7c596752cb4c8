"""Benchmark of a mixture of experts, forward and backward, in one process and over ranks.

In one process the peers are the Mixtral block of transformers, with either of its implementations,
and a dense MLP with as many active features. Over ep ranks, each with its part of the tokens, the
peer is one process. On 4 ranks that shard the parameters, the peer is the same layer without ep.
All mixtures start from the same weights. Their outputs and input gradients must agree before
timing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.config.recipe import ParallelConfig
from parallel3d.layers.experts import ParallelExperts
from parallel3d.layers.mlp import ParallelMLP
from parallel3d.layers.parameter import ParallelContext, initialize, set_fused_gradients
from parallel3d.mesh import Role, build_mesh, expert_mesh
from parallel3d.sharding.apply import shard
from parallel3d.tools.bench.harness import Case, TimedCase, check_agreement, time_in_turn
from parallel3d.tools.bench.report import Round

HIDDEN = 512
FFN_HIDDEN = 1376
COUNT = 8
PER_TOKEN = 2
TOKENS = 2048
# (ep, ranks, peer) -> largest ratio of CPU time. Ranks other than ep shard the parameters.
CPU_BARS = {
    (1, 1, "Mixtral eager"): 0.95,
    (1, 1, "Mixtral grouped_mm"): 0.95,
    (1, 1, "dense MLP"): 1.2,
    (2, 2, "one process"): 1.25,
    (4, 4, "one process"): 1.25,
    (4, 4, "fully_shard"): 0.5,
    (2, 4, "fully_shard"): 0.8,
}


def expert_cases() -> dict[str, Case]:
    has_transformers = find_spec("transformers") is not None
    if not has_transformers:
        print("skipped Mixtral; run pip install 'parallel3d[dev]'", file=sys.stderr)
    cases: dict[str, Case] = {}
    for (ep, ranks, peer), bar in CPU_BARS.items():
        if has_transformers or not peer.startswith("Mixtral"):
            cases[f"experts: ep {ep} on {ranks} ranks vs {peer}"] = TimedCase(
                measure=measure,
                arguments=(ep, peer),
                world_size=ranks,
                rounds=5,
                steps=2,
                cpu_bar=bar,
            )
    return cases


def measure(ep: int, peer: str, rounds: int, steps: int) -> list[Round]:
    """Times a layer over all ranks, and its peer. Runs on every rank."""
    rank = dist.get_rank()
    is_sharded = peer == "fully_shard"
    ours = own_layer(ep, is_sharded)
    other = peer_layer(peer)
    whole = torch.randn(2, 1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    own = whole.chunk(dist.get_world_size(), dim=2)[rank]
    seen = own if is_sharded else whole
    found = step(ours, own)
    wanted = step(other, seen)
    if not is_sharded:
        wanted = wanted.chunk(dist.get_world_size(), dim=2)[rank]
    if peer != "dense MLP":
        names = ("output", "input gradient")
        check_agreement(zip(names, found, wanted, strict=True))

    def step_peer(_: int) -> None:
        if is_sharded or rank == 0:
            step(other, seen)

    return time_in_turn(lambda _: step(ours, own), step_peer, rounds=rounds, steps=steps)


def step(layer: nn.Module, pair: Tensor) -> Tensor:
    """Returns the output and the input gradient, given the input and the output gradient.

    Weight gradients accumulate over calls.
    """
    leaf = pair[0].detach().requires_grad_()
    y = layer(leaf)
    y.backward(pair[1])
    assert leaf.grad is not None
    return torch.stack((y.detach(), leaf.grad))


def own_layer(ep: int, is_sharded: bool) -> nn.Module:
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
    if peer == "dense MLP":
        dense = ParallelMLP(HIDDEN, PER_TOKEN * FFN_HIDDEN)
        set_fused_gradients(dense, True)
        return dense
    if peer == "fully_shard":
        return own_layer(1, is_sharded=True)
    alone = ParallelExperts(HIDDEN, FFN_HIDDEN, COUNT, PER_TOKEN)
    initialize(alone, 0, "cpu")
    set_fused_gradients(alone, True)
    return mixtral(alone, peer.split()[1]) if peer.startswith("Mixtral") else alone


def mixtral(ours: ParallelExperts, implementation: str) -> nn.Module:
    """Returns the block of transformers with the weights of our layer."""
    config = import_module("transformers").MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN_HIDDEN,
        num_local_experts=COUNT,
        num_experts_per_tok=PER_TOKEN,
    )
    config._experts_implementation = implementation
    module = import_module("transformers.models.mixtral.modeling_mixtral")
    block: Any = module.MixtralSparseMoeBlock(config)
    weights = {
        name: each.unflatten(0, (COUNT, -1)) for name, each in ours.experts.named_parameters()
    }
    with torch.no_grad():
        block.gate.weight.copy_(ours.router.weight)
        block.experts.gate_up_proj.copy_(torch.cat((weights["gate"], weights["up"]), dim=1))
        block.experts.down_proj.copy_(weights["down"])
    return block
