"""The models against transformers' own code, from the same weights: logits and every parameter's
gradient."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from parallel3d.config.hugging_face import from_hugging_face
from parallel3d.config.recipe import ModelConfig, RopeScaling
from parallel3d.layers.parameter import initialize
from parallel3d.models import model_class

B, S = 2, 12
SMALL = ModelConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, vocab=64, norm_eps=1e-6
)
_LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
    **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"},
    **{f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}


def build(config: ModelConfig) -> nn.Module:
    model = model_class(config.architecture)(
        config, tp=None, sequence_parallel=False, recompute="none", recompute_every=1, device="meta"
    )
    initialize(model, 0, "cpu")
    # a bias of zero and a scale of one hide what is done to them
    for parameter in model.parameters():
        nn.init.normal_(
            parameter, 0.0, 0.3, generator=torch.Generator().manual_seed(parameter.numel())
        )
    return model.double()


def llama_names(model: nn.Module) -> dict[str, str]:
    """Returns transformers' name of each of our parameters."""
    names = {}
    for name, _ in model.named_parameters():
        *path, leaf = name.split(".")
        block = path[:2] if path[0] == "layers" else []
        theirs = _LLAMA_NAMES[".".join(path[len(block) :])]
        names[name] = ".".join([*(["model", *block] if block else []), theirs, leaf])
    return names


def assert_near(ours: Tensor | None, theirs: Tensor | None, what: str) -> None:
    """In float64, but transformers' norms and angles are float32."""
    assert ours is not None and theirs is not None
    # the bias of k has none
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)
    assert error < 2e-6, f"{what} differs by {error:.2g} of its largest"


def forward_and_backward(model: nn.Module, peer: nn.Module) -> None:
    """Compares the logits, and leaves the gradients of both."""
    ids = torch.randint(64, (B, S), generator=torch.Generator().manual_seed(0))
    ours, theirs = model(ids), peer(ids).logits
    assert_near(ours, theirs, "logits")
    weight = torch.randn(
        ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()


# Both scalings keep some of the four frequencies of a head, stretch some and blend some.
LLAMA3 = RopeScaling(type="llama3", factor=8.0, original_max_positions=64)
YARN = RopeScaling(type="yarn", factor=4.0, original_max_positions=64)
HUGGING_FACE: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "llama3.1": (
        {"rope_theta": 100.0, "rope_scaling": LLAMA3},
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
    ),
    "qwen2": ({"qkv_bias": True}, transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen2-yarn": (
        {"qkv_bias": True, "rope_theta": 100.0, "rope_scaling": YARN},
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
    ),
    "qwen3": (
        {"qk_norm": True, "head_dim": 12},
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
    ),
    "mistral": ({"window": 5}, transformers.MistralConfig, transformers.MistralForCausalLM),
    "nemo": ({"head_dim": 6}, transformers.MistralConfig, transformers.MistralForCausalLM),
}


def peer_of(config: ModelConfig, family: str) -> Any:
    """Returns transformers' model of these numbers, with weights of its own."""
    _, config_class, peer_class = HUGGING_FACE[family]
    scaling = {} if config.rope_scaling is None else vars(config.rope_scaling).copy()
    if scaling:
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_positions")
    extra = {} if family.startswith("qwen2") else {"head_dim": config.head_size}
    return peer_class(
        config_class(
            hidden_size=config.hidden,
            intermediate_size=config.ffn_hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            vocab_size=config.vocab,
            rms_norm_eps=config.norm_eps,
            rope_parameters={
                "rope_type": scaling.pop("type", "default"),
                "rope_theta": config.rope_theta,
                **scaling,
            },
            sliding_window=config.window,
            tie_word_embeddings=False,
            attn_implementation="eager",
            **extra,
        )
    )


def copy_weights(model: nn.Module, peer: nn.Module) -> dict[str, str]:
    """Gives transformers' model our weights, and returns its names of them by ours."""
    names = llama_names(model)
    with torch.no_grad():
        for ours, theirs in names.items():
            peer.get_parameter(theirs).copy_(model.get_parameter(ours))
    assert len(names) == len(list(peer.parameters()))
    return names


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_a_llama_with_options_is_that_of_transformers(family: str) -> None:
    config = replace(SMALL, **HUGGING_FACE[family][0])
    model, peer = build(config), peer_of(config, family).double()
    names = copy_weights(model, peer)
    forward_and_backward(model, peer)
    for ours, theirs in names.items():
        assert_near(model.get_parameter(ours).grad, peer.get_parameter(theirs).grad, ours)


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_a_config_json_of_transformers_4_and_5_gives_the_model(family: str, tmp_path: Path) -> None:
    config = replace(SMALL, **HUGGING_FACE[family][0])
    peer_of(config, family).config.to_json_file(tmp_path / "5.json")
    said = json.loads((tmp_path / "5.json").read_text())
    rope = said.pop("rope_parameters")
    said["rope_theta"] = rope.pop("rope_theta")
    said["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    (tmp_path / "4.json").write_text(json.dumps(said))
    for version in (4, 5):
        found = from_hugging_face(tmp_path / f"{version}.json")
        assert found == config, version


def gpt_pairs(
    model: nn.Module, peer: nn.Module, *, gradients: bool
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Our parameters beside views of GPT-2's, which packs q, k and v and transposes its
    matrices."""

    def of(module: nn.Module, name: str) -> Tensor:
        parameter = module.get_parameter(name)
        assert not gradients or parameter.grad is not None
        return parameter.grad if gradients else parameter  # type: ignore[return-value]

    simple = {"embed.tokens.weight": "wte.weight", "embed.positions.weight": "wpe.weight"}
    simple |= {f"norm.{leaf}": f"ln_f.{leaf}" for leaf in ("weight", "bias")}
    for i in range(SMALL.layers):
        for leaf in ("weight", "bias"):
            simple[f"layers.{i}.attention_norm.{leaf}"] = f"h.{i}.ln_1.{leaf}"
            simple[f"layers.{i}.mlp_norm.{leaf}"] = f"h.{i}.ln_2.{leaf}"
    for ours, theirs in simple.items():
        yield ours, of(model, ours), of(peer, f"transformer.{theirs}")
    transposed = {"attention.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for i in range(SMALL.layers):
        for leaf in ("weight", "bias"):
            for ours, theirs in transposed.items():
                name = f"layers.{i}.{ours}.{leaf}"
                yield name, of(model, name), of(peer, f"transformer.h.{i}.{theirs}.{leaf}").t()
            packed = of(peer, f"transformer.h.{i}.attn.c_attn.{leaf}").chunk(3, dim=-1)
            for ours, part in zip("qkv", packed, strict=True):
                name = f"layers.{i}.attention.{ours}.{leaf}"
                yield name, of(model, name), part.t()


def test_a_gpt_is_that_of_transformers() -> None:
    config = ModelConfig(
        architecture="gpt",
        layers=2,
        hidden=32,
        heads=4,
        ffn_hidden=48,
        vocab=64,
        max_positions=16,
        tied_embeddings=True,
    )
    peer = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_inner=48,
            vocab_size=64,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).double()
    model = build(config)
    with torch.no_grad():
        for _, ours, theirs in gpt_pairs(model, peer, gradients=False):
            theirs.copy_(ours)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in peer.parameters())
    forward_and_backward(model, peer)
    for name, ours, theirs in gpt_pairs(model, peer, gradients=True):
        assert_near(ours, theirs, name)
