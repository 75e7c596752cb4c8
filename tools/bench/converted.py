"""Blocks of transformers' Llama and GPT-2, made tensor-parallel by their tables, beside the same blocks of this
library's layers; and Llama's beside DTensor's plan of the same block of transformers. All start from the same weights;
outputs and input gradients must agree before anything is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from parallel3d.config.recipe import ModelConfig
from parallel3d.convert.apply import tensor_parallelize
from parallel3d.layers.gradients import local_tensor
from parallel3d.layers.parameter import named_specs, set_fused_gradients
from parallel3d.mesh import Axis
from parallel3d.models.gpt import GPT
from parallel3d.models.llama import Llama
from parallel3d.pipeline.stage import BlockRange, cut
from parallel3d.tools.bench.harness import Case, TimedCase, check_agreement, time_in_turn
from parallel3d.tools.bench.report import Round
from parallel3d.tools.bench.step import StepSize

Family = Literal["llama", "gpt2"]
Forward = Callable[[Tensor], Tensor]
LAYERS_BAR = 1.05  # processor time, converted / this library's layers
_MIDDLE = BlockRange(0, 1, is_first_stage=False, is_last_stage=False)
_NAMES: dict[Family, dict[str, str]] = {  # a name of transformers by that of this library's
    "llama": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        **{f"attention.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
        **{f"mlp.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    },
    "gpt2": {
        **{"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.o": "attn.c_proj"},
        **{"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    },
}


def converted_cases(sizes: Sequence[StepSize], dtensor_bars: dict[str, float]) -> dict[str, Case]:
    """Returns the cases on CPUs, or none, which is said on stderr, where transformers is not installed."""
    if find_spec("transformers") is None:
        print("left out: blocks of transformers; pip install 'parallel3d[dev]'", file=sys.stderr)
        return {}
    cases: dict[str, Case] = {}
    for size in sizes:
        both: list[tuple[Family, bool]] = [("llama", False), ("llama", True), ("gpt2", False)]
        for family, beside_dtensor in both:
            peer = "DTensor's plan" if beside_dtensor else "the layers"
            cases[f"converted {family} block of {size.name}: tp 2, beside {peer}"] = TimedCase(
                measure=measure,
                arguments=(size, family, beside_dtensor),
                world_size=2,
                rounds=size.rounds,
                steps=size.steps,
                cpu_bar=dtensor_bars.get(size.name) if beside_dtensor else LAYERS_BAR,
            )
    return cases


def measure(size: StepSize, family: Family, beside_dtensor: bool, rounds: int, steps: int) -> list[Round]:
    """Runs on every rank: checks both contestants against each other, then times them in turn on one sequence."""
    tp = init_device_mesh("cpu", (2,))
    whole = foreign(size, family)
    weights = weights_of(whole, family)
    if beside_dtensor:
        peer = forward_of(by_dtensor(foreign(size, family), tp), family, size.seq_len)
    else:
        peer = own_layers(size, family, tp, weights)
    tensor_parallelize(whole, tp, check=False)
    set_fused_gradients(whole, not beside_dtensor)  # as the layers' are; DTensor's go through autograd
    ours = forward_of(whole, family, size.seq_len)
    x, grad = torch.randn((2, 1, size.seq_len, size.model.hidden), generator=torch.Generator().manual_seed(0))

    def step(block: Forward) -> tuple[Tensor, Tensor]:
        """Returns the output and the input's gradient; the weights' gradients add up, as over microbatches."""
        leaf = x.detach().requires_grad_()
        y = block(leaf)
        y.backward(grad)
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    check_agreement(zip(("output", "input gradient"), step(ours), step(peer), strict=True))
    return time_in_turn(lambda _: step(ours), lambda _: step(peer), rounds=rounds, steps=steps)


def foreign(size: StepSize, family: Family) -> nn.Module:
    """Returns a model of transformers with one block and no dropout, the same on every rank."""
    transformers: Any = import_module("transformers")
    model = size.model
    torch.manual_seed(0)
    if family == "llama":
        llama = transformers.LlamaConfig(
            **{"hidden_size": model.hidden, "intermediate_size": model.ffn_hidden, "num_hidden_layers": 1},
            **{"num_attention_heads": model.heads, "num_key_value_heads": model.key_value_heads},
            **{"vocab_size": model.vocab, "rms_norm_eps": model.norm_eps, "max_position_embeddings": size.seq_len},
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        )
        whole: nn.Module = transformers.LlamaForCausalLM(llama)
        return whole
    gpt2 = transformers.GPT2Config(
        **{"n_embd": model.hidden, "n_inner": model.ffn_hidden, "n_layer": 1, "n_head": model.heads},
        **{"vocab_size": model.vocab, "n_positions": size.seq_len, "layer_norm_epsilon": model.norm_eps},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    )
    other: nn.Module = transformers.GPT2LMHeadModel(gpt2)
    return other


def forward_of(model: Any, family: Family, seq_len: int) -> Forward:
    """Returns the forward of the model's block, with its rotary positions made beforehand."""
    if family == "gpt2":
        return model.transformer.h[0]
    positions = model.model.rotary_emb(torch.zeros(1), torch.arange(seq_len).unsqueeze(0))
    block: nn.Module = model.model.layers[0]
    return lambda x: block(x, position_embeddings=positions)


def weights_of(model: nn.Module, family: Family) -> dict[str, Tensor]:
    """Returns copies of the block's weights under this library's names."""
    block = model.get_submodule("model.layers.0" if family == "llama" else "transformer.h.0")
    found = {name: tensor.detach().clone() for name, tensor in block.named_parameters()}
    if family == "gpt2":  # Conv1D's weights are [in, out], and q, k and v are one
        found = {name: tensor.t() if tensor.ndim == 2 else tensor for name, tensor in found.items()}
    weights = {
        f"layers.0.{ours}.{kind}": found[f"{theirs}.{kind}"]
        for ours, theirs in _NAMES[family].items()
        for kind in ("weight", "bias")
        if f"{theirs}.{kind}" in found
    }
    for kind in ("weight", "bias") if family == "gpt2" else ():
        parts = found[f"attn.c_attn.{kind}"].chunk(3)
        weights |= {f"layers.0.attention.{name}.{kind}": part for name, part in zip("qkv", parts, strict=True)}
    return weights


def own_layers(size: StepSize, family: Family, tp: DeviceMesh, weights: dict[str, Tensor]) -> nn.Module:
    """Returns the same block of this library's layers."""
    config: ModelConfig = size.model
    if family == "gpt2":
        config = replace(config, architecture="gpt", kv_heads=config.heads, max_positions=size.seq_len)
    block = cut((Llama if family == "llama" else GPT)(config, tp=tp), _MIDDLE)
    set_fused_gradients(block, True)
    with torch.no_grad():
        for name, spec in named_specs(block):
            local_tensor(block.get_parameter(name)).copy_(spec.local_part(weights[name], Axis.of(tp)))
    return block


def by_dtensor(model: nn.Module, tp: DeviceMesh) -> nn.Module:
    """Lays out a Llama of transformers by `parallelize_module`; an attention or an MLP takes its input once."""
    once: dict[str, Any] = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
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
