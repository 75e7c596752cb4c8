"""The ready tables against transformers' own models: the same outputs and gradients before and
after `tensor_parallelize` without a table, with tiny random configs, for heads on top of a model
and for models without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from parallel3d.convert.apply import tensor_parallelize
from parallel3d.convert.families import SEQUENCE_FAMILIES, rules_of
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.pipeline.split_model import split_model
from parallel3d.schedules.build import build_schedule
from tests.distributed.layer_cases import tp_mesh
from tests.distributed.training_cases import long

# it imports what all of transformers' models import
PRELOAD = ("transformers.models.qwen2.modeling_qwen2",)
VOCAB, B, S = 101, 2, 12  # a number of ids that no tp divides
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_FALCON = {
    **_DECODER,
    "alibi": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Model:
    """A tiny model of a family, and how far a run in float64 may be from the whole model's."""

    of: str  # its class in transformers
    config: dict[str, Any] = field(default_factory=lambda: _DECODER)
    tolerance: float = 1e-12


# norms of heads, or rotations, that compute in float32 whatever the model's type
FLOAT32_INSIDE = 1e-6
_HEADS = {**_DECODER, "head_dim": 8}
_QWEN3_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 64,
    "vocab_size": VOCAB,
}
_OPT = {
    "ffn_dim": 48,
    "word_embed_proj_dim": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
_GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 4}
# The first word is a `config.model_type` of the table in docs/how-to/library.md.
MODELS: dict[str, Model] = {
    "llama": Model("LlamaForCausalLM"),
    "llama, a model without a head": Model("LlamaModel"),
    "mistral": Model("MistralForCausalLM", {**_DECODER, "sliding_window": 5}),
    "qwen2, tied": Model("Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "qwen3": Model("Qwen3ForCausalLM", _HEADS),
    "gemma": Model("GemmaForCausalLM", _HEADS),
    "gemma2": Model("Gemma2ForCausalLM", {**_HEADS, "sliding_window": 5}),
    "gemma3_text": Model("Gemma3ForCausalLM", {**_HEADS, "sliding_window": 5}, FLOAT32_INSIDE),
    "olmo": Model("OlmoForCausalLM"),
    "olmo2": Model("Olmo2ForCausalLM"),
    "cohere": Model("CohereForCausalLM"),
    "cohere2": Model("Cohere2ForCausalLM"),
    "granite": Model("GraniteForCausalLM", {**_DECODER, "logits_scaling": 4.0}),
    "smollm3": Model("SmolLM3ForCausalLM"),
    "ernie4_5": Model("Ernie4_5ForCausalLM"),
    "stablelm": Model("StableLmForCausalLM"),
    "nemotron": Model("NemotronForCausalLM"),
    "exaone4": Model("Exaone4ForCausalLM"),
    "starcoder2": Model("Starcoder2ForCausalLM", {**_DECODER, "use_bias": True}),
    "phi": Model("PhiForCausalLM"),
    "glm": Model("GlmForCausalLM", _HEADS),
    "glm4": Model("Glm4ForCausalLM", _HEADS),
    "phi3": Model("Phi3ForCausalLM"),
    "phi3, fewer heads of keys": Model("Phi3ForCausalLM", {**_DECODER, "num_key_value_heads": 2}),
    "mixtral": Model("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4}),
    "qwen2_moe": Model("Qwen2MoeForCausalLM", {**_DECODER, **_QWEN3_MOE, "mlp_only_layers": [1]}),
    "qwen3_moe": Model("Qwen3MoeForCausalLM", {**_DECODER, **_QWEN3_MOE, "mlp_only_layers": [1]}),
    "olmoe": Model("OlmoeForCausalLM", {**_DECODER, **_QWEN3_MOE}),
    "gpt2": Model("GPT2LMHeadModel", {**_GPT2, **_NO_DROPOUT, "bos_token_id": 0}),
    "gpt_bigcode": Model("GPTBigCodeForCausalLM", {**_GPT2, **_NO_DROPOUT, "bos_token_id": 0}),
    "gptj": Model("GPTJForCausalLM", {**_GPT2, **_NO_DROPOUT, "bos_token_id": 0, "rotary_dim": 2}),
    "gpt_neox": Model("GPTNeoXForCausalLM"),
    "opt": Model("OPTForCausalLM", {**_DECODER, **_OPT}),
    "falcon, heads in turn": Model("FalconForCausalLM", {**_FALCON, "multi_query": False}),
    "falcon, one head of keys": Model("FalconForCausalLM", {**_FALCON, "multi_query": True}),
    "falcon, groups": Model("FalconForCausalLM", {**_FALCON, **_GROUPS}),
}


def family(name: str) -> str:
    return name.partition(",")[0]


def build(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    """Returns a model of random weights, biases and norms too, with `more` in its config."""
    import transformers as hf

    model_class = getattr(hf, MODELS[name].of)
    torch.manual_seed(0)
    config = model_class.config_class(**{**MODELS[name].config, **more})
    model: nn.Module = model_class(config)
    if hasattr(model.config, "num_experts_per_tok") and dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped product of torch has no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def largest(x: Tensor) -> float:
    return x.abs().max().item()


def gradient_difference(model: nn.Module, alone: nn.Module) -> float:
    """Returns the largest difference of a gradient of the model from that of the whole one, in
    shares of the tensor's largest number, where that is not noise around 0 (a key's bias)."""
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    floor = 1e-3 * max(map(largest, wanted.values()))
    worst = 0.0
    for name, parameter in model.named_parameters():
        if name in wanted:
            difference = largest(whole(parameter.grad) - wanted[name])
            worst = max(worst, difference / max(largest(wanted[name]), floor))
        else:
            assert parameter.grad is None, name
    return worst


def differences(
    name: str, dtype: torch.dtype, sequence_parallel: bool = False
) -> tuple[float, float]:
    """Returns the largest difference of an output, and of a gradient."""
    tp = tp_mesh()
    alone = build(name, dtype)
    rules = rules_of(alone, sequence_parallel=sequence_parallel)
    split = tensor_parallelize(copy.deepcopy(alone), tp, rules)
    torch.manual_seed(1)
    inputs = {"input_ids": torch.randint(4, VOCAB, (B, S))}
    outputs = [next(iter(model(**inputs).values())) for model in (alone, split)]
    factors = torch.randn_like(outputs[0])
    for output in outputs:
        (output * factors).sum().backward()
    for (ours, part), (theirs, parameter) in zip(
        split.named_parameters(), alone.named_parameters(), strict=True
    ):
        assert ours == theirs and torch.equal(whole(part), parameter), theirs
    difference = largest(outputs[1] - outputs[0]) / largest(outputs[0])
    return difference, gradient_difference(split, alone)


# the others are long tests
QUICK = {
    "llama",
    "qwen2, tied",
    "gemma3_text",
    "cohere",
    "phi3, fewer heads of keys",
    "qwen3_moe",
    "gpt2",
    "gptj",
    "gpt_neox",
    "opt",
    "falcon, one head of keys",
    "falcon, groups",
}
# heads that ranks share, experts
SIZES = [(2, name) for name in MODELS] + [(4, "phi3, fewer heads of keys"), (4, "qwen3_moe")]


@pytest.mark.parametrize(
    "size, name",
    [each if each[1] in QUICK else long(*each) for each in SIZES],
)
def test_the_split_model_is_the_whole_one(
    world: Callable,
    size: int,
    name: str,
) -> None:
    for output, gradient in world(size).run(differences, name, torch.float64):
        assert max(output, gradient) < MODELS[name].tolerance, (output, gradient)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else long(name) for name in MODELS if family(name) in SEQUENCE_FAMILIES],
)
def test_it_is_the_whole_one_with_sequence_parallelism_too(world: Callable, name: str) -> None:
    # Norms of Gemma and Cohere scale in float32: each rank gives a part of their gradient.
    in_float32 = name.startswith(("gemma", "cohere"))
    tolerance = FLOAT32_INSIDE if in_float32 else MODELS[name].tolerance
    for output, gradient in world(2).run(differences, name, torch.float64, True):
        assert output < MODELS[name].tolerance and gradient < tolerance, (output, gradient)


# tests/test_split_model.py cuts all families; these are of layers, positions and masks of all kinds
CUT = ["qwen2, tied", "gemma3_text", "gpt2"]


def pipeline_differences(name: str) -> tuple[float, float]:
    """Returns how far the loss and a gradient of a pipeline of two stages are from the whole
    model's."""
    pp = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    kinds: dict[str, Any] = {"tie_word_embeddings": False}
    if name == "gemma3_text":
        kinds["layer_types"] = ["sliding_attention", "full_attention"]
    alone = build(name, torch.float64, **kinds)
    stage = split_model(copy.deepcopy(alone), [1])[pp.get_local_rank()]

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2

    torch.manual_seed(1)
    ids, labels = torch.randint(4, VOCAB, (2, 2, B, S))
    gap = TensorSpec((B, S, 32), torch.float64)
    schedule = build_schedule("1f1b", pp=2, microbatches=2)
    loss = PipelineRuntime([stage], schedule, pp, loss_fn, boundaries=gap).run(ids, labels)
    wanted = loss_fn(alone(ids[0]).logits, labels[0]) + loss_fn(alone(ids[1]).logits, labels[1])
    wanted.backward()
    difference = abs(loss.item() / wanted.item() - 1) if pp.get_local_rank() == 1 else 0.0
    return difference, gradient_difference(stage, alone)


@pytest.mark.parametrize("name", CUT)
def test_its_pipeline_is_the_whole_one(world: Callable, name: str) -> None:
    for loss, gradient in world(2).run(pipeline_differences, name):
        assert max(loss, gradient) < 1e-12, (loss, gradient)


def test_sequence_parallelism_refuses_dropout_and_families_without_a_table() -> None:
    with pytest.raises(ValueError, match="no built-in rules, only for cohere, "):
        rules_of(build("opt", torch.float32), sequence_parallel=True)
    model = build("gpt2", torch.float32)
    model.transformer.drop.p = 0.1  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"transformer\.drop: dropout cannot be used"):
        rules_of(model, sequence_parallel=True)
