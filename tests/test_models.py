"""The models against transformers' own code, from the same weights: logits and every parameter's
gradient."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from test_hugging_face import FAMILIES, config_json
from torch import Tensor, nn

from parallel3d.checkpoint.hugging_face_names import HfTensor, hf_tensors
from parallel3d.config.recipe import ModelConfig
from parallel3d.layers.attention import ParallelAttention
from parallel3d.layers.parameter import ParallelContext, initialize
from parallel3d.models import unsharded_model
from parallel3d.models.decoder import DecoderParts
from parallel3d.models.llama import Llama

B, S = 2, 12


def build(config: ModelConfig) -> nn.Module:
    model = unsharded_model(config)
    initialize(model, 0, "cpu")
    # a bias of zero and a scale of one hide what is done to them
    for parameter in model.parameters():
        generator = torch.Generator().manual_seed(parameter.numel())
        nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    return model.double()


def packed(tensor: HfTensor, ours: Callable[[str], Tensor]) -> Tensor:
    """Returns a tensor of transformers from ours by name."""
    whole = torch.cat([ours(name) for name in tensor.parameters])
    return whole.t() if tensor.transposed else whole


def assert_near(ours: Tensor, theirs: Tensor | None, what: str) -> None:
    """In float64, but transformers' norms and angles are float32."""
    assert theirs is not None
    # the bias of k has none
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6)
    assert error < 2e-6, f"{what} differs by {error:.2g} of its largest"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    config = replace(FAMILIES[family], layers=2)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    peer = transformers.AutoModelForCausalLM.from_config(read, attn_implementation="eager").double()
    model = build(config)
    tensors = [*hf_tensors(config, ())]
    with torch.no_grad():
        for each in tensors:
            peer.get_parameter(each.name).copy_(packed(each, model.get_parameter))
    ids = torch.randint(config.vocab, (B, S), generator=torch.Generator().manual_seed(0))
    ours = model(ids)
    theirs = peer(ids).logits
    assert_near(ours, theirs, "logits")
    weight = torch.randn_like(ours)
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for each in tensors:
        gradient = packed(each, gradients.__getitem__)
        assert_near(gradient, peer.get_parameter(each.name).grad, each.name)


class _Blind(ParallelAttention):
    def forward(self, x: Tensor, **given: object) -> Tensor:
        return torch.zeros_like(x)


class _BlindLlama(Llama):
    def parts(self, config: ModelConfig, context: ParallelContext) -> DecoderParts:
        return replace(super().parts(config, context), attention_class=_Blind)


def test_a_model_can_name_the_class_of_its_attention() -> None:
    config = replace(FAMILIES["llama"], layers=2)
    ids = torch.tensor([[1, 2, 3], [4, 5, 3]])
    logits = []
    for kind in (Llama, _BlindLlama):
        model = kind(config, device="cpu")
        initialize(model, 0, "cpu")
        logits.append(model(ids)[:, -1])
    (seen, other), (blind, same) = logits
    assert not torch.equal(seen, other)
    assert torch.equal(blind, same)
