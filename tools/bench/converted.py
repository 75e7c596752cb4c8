"""Benchmark of a Hugging Face Llama block converted to tensor parallelism.

The peers are the block built from parallel3d's layers, and the Hugging Face block parallelized by
DTensor. All start from the same weights. Outputs and input gradients must agree before timing.
Converted blocks and parallel3d's layers accumulate gradients in place (`set_fused_gradients`),
which DTensor does not support.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from parallel3d.convert.apply import tensor_parallelize
from parallel3d.layers.parameter import named_specs, set_fused_gradients
from parallel3d.layers.weight_gradients import local_tensor
from parallel3d.mesh import Axis
from parallel3d.models.llama import Llama
from parallel3d.pipeline.stage import BlockRange, cut
from parallel3d.tools.bench.harness import (
    Case,
    Step,
    TimedCase,
    check_agreement,
    pass_both_ways,
    time_in_turn,
)
from parallel3d.tools.bench.report import Options, ResultRow, Round, row_of, rows_against_peer
from parallel3d.tools.bench.step import StepSize
from parallel3d.tools.local_ranks import run_ranks

Forward = Callable[[Tensor], Tensor]
LAYERS_BAR = 1.05  # Largest ratio of CPU time, converted / parallel3d's layers.
_MIDDLE = BlockRange(0, 1, is_first_stage=False, is_last_stage=False)
_NAMES = {  # parallel3d name -> Hugging Face name
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def converted_cases(sizes: Sequence[StepSize], dtensor_bars: dict[str, float]) -> dict[str, Case]:
    """Returns the cases, which run on CPUs, or none if transformers is not installed."""
    if find_spec("transformers") is None:
        print("skipped blocks of transformers; run pip install 'parallel3d[dev]'", file=sys.stderr)
        return {}
    cases: dict[str, Case] = {}
    for size in sizes:
        name = f"converted llama block of {size.name}: tp 2 vs layers"
        cases[name] = partial(bench_beside_layers, name, size)
        name = f"converted llama block of {size.name}: tp 2, gradients in place, vs DTensor"
        cases[name] = TimedCase(
            measure=measure_beside_dtensor,
            arguments=(size,),
            world_size=2,
            rounds=size.rounds,
            steps=size.steps,
            cpu_bar=dtensor_bars.get(size.name),
        )
    return cases


def bench_beside_layers(name: str, size: StepSize, options: Options) -> list[ResultRow]:
    """Compares the converted block with parallel3d's layers.

    The rows compare CPU times at tp 2 and in one process, and the ratios of the two.
    """
    rounds = options.rounds or size.rounds
    steps = options.steps or size.steps
    split, alone = run_ranks(measure_beside_layers, size, rounds, steps, world_size=2)
    on_one_process = [(one.ours.cpu_s, one.peer.cpu_s) for one in alone]
    costs = [
        (tp.ours.cpu_s / ours, tp.peer.cpu_s / peer)
        for tp, (ours, peer) in zip(split, on_one_process, strict=True)
    ]
    return [
        *rows_against_peer(name, split, LAYERS_BAR),
        row_of(f"{name}: both on one process", "cpu_s_per_step", on_one_process),
        row_of(f"{name}: tp 2 / one process", "cpu_s / cpu_s", costs, LAYERS_BAR),
    ]


def measure_beside_layers(
    size: StepSize, rounds: int, steps: int
) -> tuple[list[Round], list[Round]]:
    """Times the converted block and parallel3d's layers alternately. Runs on every rank.

    Returns the rounds at tp 2, and those of both blocks unsharded on rank 0 while rank 1 waits.
    """
    tp = init_device_mesh("cpu", (2,))
    whole = foreign(size)
    converted = foreign(size)
    weights = weights_of(whole)
    tensor_parallelize(converted, tp, check=False)
    set_fused_gradients(converted, True)
    at_tp, alone = (
        steps_of(size, forward_of(block, size.seq_len), own_layers(size, mesh, weights))
        for block, mesh in ((converted, tp), (whole, None))
    )
    if dist.get_rank() > 0:
        alone = (lambda _: None, lambda _: None)
    found: tuple[list[Round], list[Round]] = ([], [])
    for _ in range(rounds):
        for contestants, timed in zip((at_tp, alone), found, strict=True):
            timed.extend(time_in_turn(*contestants, rounds=1, steps=steps))
    return found


def measure_beside_dtensor(size: StepSize, rounds: int, steps: int) -> list[Round]:
    """Times a converted block and a DTensor block alternately. Runs on every rank."""
    tp = init_device_mesh("cpu", (2,))
    peer = by_dtensor(foreign(size), tp)
    converted = foreign(size)
    tensor_parallelize(converted, tp, check=False)
    set_fused_gradients(converted, True)
    ours, theirs = (forward_of(each, size.seq_len) for each in (converted, peer))
    return time_in_turn(*steps_of(size, ours, theirs), rounds=rounds, steps=steps)


def steps_of(size: StepSize, ours: Forward, peer: Forward) -> tuple[Step, Step]:
    """Checks that both blocks agree. Returns a step of each."""
    x, grad = torch.randn(
        (2, 1, size.seq_len, size.model.hidden), generator=torch.Generator().manual_seed(0)
    )

    step = partial(pass_both_ways, x=x, grad=grad)
    check_agreement(zip(("output", "input gradient"), step(ours), step(peer), strict=True))
    return lambda _: step(ours), lambda _: step(peer)


def foreign(size: StepSize) -> nn.Module:
    """Returns a Hugging Face Llama with one block and the same weights on every rank."""
    transformers: Any = import_module("transformers")
    model = size.model
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.ffn_hidden,
        num_hidden_layers=1,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        vocab_size=model.vocab,
        rms_norm_eps=model.norm_eps,
        max_position_embeddings=size.seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
    )
    llama: nn.Module = transformers.LlamaForCausalLM(config)
    return llama


def forward_of(model: Any, seq_len: int) -> Forward:
    """Returns the block's forward function, with precomputed rotary embeddings."""
    positions = model.model.rotary_emb(torch.zeros(1), torch.arange(seq_len).unsqueeze(0))
    block: nn.Module = model.model.layers[0]
    return lambda x: block(x, position_embeddings=positions)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the block's weights by their names in parallel3d."""
    block = model.get_submodule("model.layers.0")
    return {
        f"layers.0.{ours}.weight": block.get_parameter(f"{theirs}.weight").detach().clone()
        for ours, theirs in _NAMES.items()
    }


def own_layers(size: StepSize, tp: DeviceMesh | None, weights: dict[str, Tensor]) -> nn.Module:
    """Returns the block built from parallel3d's layers, with the values of `weights`."""
    block = cut(Llama(size.model, tp=tp), _MIDDLE)
    set_fused_gradients(block, True)
    with torch.no_grad():
        for name, spec in named_specs(block):
            local_tensor(block.get_parameter(name)).copy_(Axis.of(tp).part(weights[name], spec.dim))
    return block


def by_dtensor(model: nn.Module, tp: DeviceMesh) -> nn.Module:
    """Parallelizes a Hugging Face Llama. Attention and MLP convert their input to a DTensor once,
    not once per linear layer."""
    once: dict[str, Any] = {
        "input_layouts": (Replicate(),),
        "desired_input_layouts": (Replicate(),),
    }
    named: dict[str, Placement] = {"hidden_states": Replicate()}
    attention = PrepareModuleInput(input_kwarg_layouts=named, desired_input_kwarg_layouts=named)
    plan = {
        **{"self_attn": attention, "mlp": PrepareModuleInput(**once)},
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        **{"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()},
    }
    parallelize_module(model.get_submodule("model.layers.0"), tp, plan, src_data_rank=None)
    return model
