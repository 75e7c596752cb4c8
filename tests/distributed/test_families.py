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
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from parallel3d.convert.apply import plan_modules, tensor_parallelize
from parallel3d.convert.families import FAMILIES, SEQUENCE_FAMILIES, rules_of
from parallel3d.convert.rules import Column, Divide, Rules
from parallel3d.layers.parameter import set_fused_gradients
from parallel3d.pipeline.boundary import TensorSpec
from parallel3d.pipeline.runtime import PipelineRuntime
from parallel3d.pipeline.split_model import FAMILIES as CUT_FAMILIES
from parallel3d.pipeline.split_model import split_model
from parallel3d.schedules.build import build_schedule

# it imports what all of transformers' models import
PRELOAD = ("transformers.models.qwen2.modeling_qwen2",)
VOCAB, B, S = 101, 2, 12  # a number of ids that no tp divides
_DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 3,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_FALCON = {**_DECODER, "alibi": False, "hidden_dropout": 0.0, "attention_dropout": 0.0}


@dataclass(frozen=True)
class Model:
    """A tiny model of a family, and how far a run in float64 may be from the whole model's."""

    of: str  # its class in transformers
    config: dict[str, Any] = field(default_factory=lambda: _DECODER)
    tolerance: float = 1e-12


# norms of heads, or rotations, that compute in float32 whatever the model's type
FLOAT32_INSIDE = 1e-6
_LLAMA4 = {**_DECODER, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, (
    "attention_chunk_size"
): 8,
           "no_rope_layers": [1, 0], "num_experts_per_tok": 1}  # fmt: skip
# by the row of docs/layers-in-your-model.md, of which the first word is the family
MODELS: dict[str, Model] = {
    "llama": Model("LlamaForCausalLM"),
    "llama, a model without a head": Model("LlamaModel"),
    "llama, classes of sequences": Model("LlamaForSequenceClassification", {**_DECODER, (
        "num_labels"
    ): 3}),
    "llama4_text, mixtures": Model("Llama4ForCausalLM", {**_LLAMA4, "moe_layers": [1]}, FLOAT32_INSIDE),  # noqa: E501
    "llama4_text, dense": Model("Llama4ForCausalLM", {**_LLAMA4, "moe_layers": []}, FLOAT32_INSIDE),
    "mistral": Model("MistralForCausalLM", {**_DECODER, "sliding_window": 5}),
    "qwen2, tied": Model("Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "qwen3": Model("Qwen3ForCausalLM", {**_DECODER, "head_dim": 8}),
    "gemma": Model("GemmaForCausalLM", {**_DECODER, "head_dim": 8}),
    "gemma2": Model("Gemma2ForCausalLM", {**_DECODER, "head_dim": 8, "sliding_window": 5}),
    "gemma3_text": Model("Gemma3ForCausalLM", {**_DECODER, "head_dim": 8, (
        "sliding_window"
    ): 5}, FLOAT32_INSIDE),
    "phi3": Model("Phi3ForCausalLM"),
    "phi3, fewer heads of keys": Model("Phi3ForCausalLM", {**_DECODER, "num_key_value_heads": 2}),
    "mixtral": Model("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4}),
    "qwen3_moe": Model(
        "Qwen3MoeForCausalLM",
        {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, (
            "moe_intermediate_size"
        ): 16, "mlp_only_layers": [1]},
    ),
    "gpt2": Model(
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 64, "vocab_size": VOCAB, (
            "bos_token_id"
        ): 0,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "gpt_neox": Model("GPTNeoXForCausalLM"),
    "opt": Model(
        "OPTForCausalLM",
        {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0, (
            "attention_dropout"
        ): 0.0},
    ),
    "falcon, heads in turn": Model("FalconForCausalLM", {**_FALCON, "multi_query": False}),
    "falcon, one head of keys": Model("FalconForCausalLM", {**_FALCON, "multi_query": True}),
    "falcon, groups": Model("FalconForCausalLM", {**_FALCON, (
        "new_decoder_architecture"
    ): True, "num_kv_heads": 4}),
}  # fmt: skip


def family(name: str) -> str:
    return name.partition(",")[0]


def build(name: str, dtype: torch.dtype, **more: Any) -> nn.Module:
    """Returns a model of random weights, biases and norms too, with `more` in its config."""
    import transformers as hf

    model_class = getattr(hf, MODELS[name].of)
    torch.manual_seed(0)
    model: nn.Module = model_class(model_class.config_class(**{**MODELS[name].config, **more}))
    if name in ("mixtral", "qwen3_moe") and dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped product of torch has no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def differences(
    name: str, dtype: torch.dtype, sequence_parallel: bool = False
) -> tuple[float, float]:
    """Returns the largest difference of an output and of a gradient, in shares of each tensor's
    largest number, where that is not noise around 0 (a key's bias)."""
    tp = init_device_mesh("cpu", (get_world_size(),))
    alone = build(name, dtype)
    split = tensor_parallelize(
        copy.deepcopy(alone), tp, rules_of(alone, sequence_parallel=sequence_parallel)
    )
    torch.manual_seed(1)
    inputs = {"input_ids": torch.randint(4, VOCAB, (B, S))}
    outputs = [next(iter(model(**inputs).values())) for model in (alone, split)]
    factors = torch.randn_like(outputs[0])
    for output in outputs:
        (output * factors).sum().backward()
    named = dict(split.named_parameters())
    assert list(named) == [each for each, _ in alone.named_parameters()]
    worst = 0.0
    largest = max(p.grad.abs().max().item() for p in alone.parameters() if p.grad is not None)
    for each, parameter in alone.named_parameters():
        assert torch.equal(whole(named[each]), parameter), each
        if parameter.grad is not None:
            gradient = named[each].grad
            assert gradient is not None, each
            scale = max(parameter.grad.abs().max().item(), 1e-3 * largest)
            worst = max(worst, (whole(gradient) - parameter.grad).abs().max().item() / scale)
    scale = outputs[0].abs().max().item()
    return (outputs[1] - outputs[0]).abs().max().item() / scale, worst


AT_4 = ("llama", "phi3, fewer heads of keys", "qwen3_moe")  # heads that ranks share, experts
SIZES = [(2, name) for name in MODELS] + [(4, name) for name in AT_4]
SIZES += [pytest.param(4, name, marks=pytest.mark.long) for name in MODELS if name not in AT_4]


@pytest.mark.parametrize(("size", "name"), SIZES)
def test_the_split_model_is_the_whole_one(world: Callable, size: int, name: str) -> None:
    for output, gradient in world(size).run(differences, name, torch.float64):
        assert output < MODELS[name].tolerance and gradient < MODELS[name].tolerance, (
            output,
            gradient,
        )


@pytest.mark.parametrize("name", [name for name in MODELS if family(name) in SEQUENCE_FAMILIES])
@pytest.mark.parametrize("size", [2])
def test_it_is_the_whole_one_with_sequence_parallelism_too(
    world: Callable, size: int, name: str
) -> None:
    # Gemma's norms take their scale in float32, and each rank's tokens give a part of its gradient.
    tolerance = FLOAT32_INSIDE if name.startswith("gemma") else MODELS[name].tolerance
    for output, gradient in world(size).run(differences, name, torch.float64, True):
        assert output < MODELS[name].tolerance and gradient < tolerance, (output, gradient)


CUT = [
    name
    for name in MODELS
    if family(name) in CUT_FAMILIES and MODELS[name].of.endswith(("ForCausalLM", "HeadModel"))
]


def pipeline_differences(name: str) -> tuple[float, float]:
    """Returns how far the loss and a gradient of a pipeline of two stages, split over tp where
    there are ranks for it, are from the whole model's."""
    mesh = init_device_mesh("cpu", (2, get_world_size() // 2), mesh_dim_names=("pp", "tp"))
    pp = mesh["pp"]
    kinds = (
        {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3_text" else {}
    )
    alone = build(name, torch.float64, **kinds, tie_word_embeddings=False)
    model = copy.deepcopy(alone)
    if mesh["tp"].size() > 1:
        tensor_parallelize(model, mesh["tp"])
    stage = split_model(model, [1])[pp.get_local_rank()]

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / 2

    torch.manual_seed(1)
    ids, labels = torch.randint(4, VOCAB, (2, 2, B, S))
    gap = TensorSpec((B, S, 32), torch.float64)
    runtime = PipelineRuntime(
        [stage], build_schedule("1f1b", pp=2, microbatches=2), pp, loss_fn, boundaries=gap
    )
    loss = runtime.run(ids, labels)
    wanted = sum(
        loss_fn(alone(each).logits, label) for each, label in zip(ids, labels, strict=True)
    )
    assert isinstance(wanted, Tensor)
    wanted.backward()
    own = dict(stage.named_parameters())
    largest = max(p.grad.abs().max().item() for p in alone.parameters() if p.grad is not None)
    worst = 0.0
    for each, parameter in own.items():
        gradient, theirs = parameter.grad, alone.get_parameter(each).grad
        assert gradient is not None and theirs is not None, each
        scale = max(theirs.abs().max().item(), 1e-3 * largest)
        worst = max(worst, (whole(gradient) - theirs).abs().max().item() / scale)
    return abs(loss.item() / wanted.item() - 1) if pp.get_local_rank() == 1 else 0.0, worst


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_its_pipeline_is_the_whole_one(world: Callable, size: int, name: str) -> None:
    tolerance = 1e-12 if size == 2 else MODELS[name].tolerance
    for loss, gradient in world(size).run(pipeline_differences, name):
        assert loss < tolerance and gradient < tolerance, (loss, gradient)


def test_every_table_is_compared() -> None:
    assert {family(name) for name in MODELS} == set(FAMILIES)


def test_sequence_parallelism_refuses_dropout_and_families_without_a_table() -> None:
    with pytest.raises(ValueError, match="no such table for opt, only for gemma, "):
        rules_of(build("opt", torch.float32), sequence_parallel=True)
    model = build("gpt2", torch.float32)
    model.transformer.drop.p = 0.1  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"transformer\.drop: this dropout cannot be used"):
        rules_of(model, sequence_parallel=True)


class Fused(nn.Module):
    """An attention whose product has q, k and v side by side, fewer heads of k and v, and torch's
    own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.few, self.head_dim = 4, 2, 3
        self.qkv, self.out = nn.Linear(8, (4 + 2 + 2) * 3), nn.Linear(12, 8)
        self.other = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for each in self.qkv(x).split(
                [self.head_dim * n for n in (self.heads, self.few, self.few)], -1
            )
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.other(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


FUSED: Rules = {
    "0": Divide(("heads", "few"), shared=("few",)),
    "0.qkv": Column(unit="head_dim", parts=("heads", "few", "few")),
    "0.out": "row",
    "0.other": "replicate",
}


def train_fused() -> None:
    """A step on two gradients, added in place, of the split module is the whole one's."""
    tp = init_device_mesh("cpu", (get_world_size(),))
    torch.manual_seed(0)
    alone = nn.Sequential(Fused()).double()
    example = (torch.randn(2, 5, 8, dtype=torch.float64),)
    split = tensor_parallelize(copy.deepcopy(alone), tp, FUSED, example=example)
    set_fused_gradients(split, True)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    for model in (alone, split):
        for each in x.split(1):
            model(each).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    for (name, parameter), theirs in zip(split.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            whole(parameter), theirs, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_parts_of_unequal_size_are_each_split_by_themselves(world: Callable) -> None:
    world(4).run(train_fused)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (("heads", 1, 1), r"qkv: its parts have 4 \+ 1 \+ 1 = 6 units, and its output features 8"),
        (3, "qkv: 8 units of output features are no 3 equal parts"),
        ((5, 2, 1), "qkv: 5 units in one of the parts .* cannot be split over tp = 2"),
    ],
)
def test_parts_that_are_not_those_of_the_product_are_refused(parts: Any, words: str) -> None:
    rules: Rules = {"0.qkv": Column(unit="head_dim", parts=parts), "0.out": "row"}
    with pytest.raises(ValueError, match=words):
        plan_modules(nn.Sequential(Fused()), rules, 2)
