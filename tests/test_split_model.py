"""Models of transformers are split into stages that compute the same, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.pipeline.split_model import FAMILIES, SplitSpec, split_model

hf = pytest.importorskip(
    "transformers", reason="its models are cut here: pip install 'parallel3d[dev]'"
)
VOCAB = 61
BLOCKS = 4
_TURNS: dict[str, Any] = {"sliding_window": 3, "head_dim": 8}
# the grouped product of torch has no float64
_EXPERTS: dict[str, Any] = {"experts_implementation": "eager"}
_FEW_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [1],
    **_EXPERTS,
}
# blocks of several kinds, whose masks and rotations differ by their numbers
LAYERS_OF: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 3},
    "gemma": {"head_dim": 8},
    "gptj": {"rotary_dim": 4},
    "gemma2": {**_TURNS, "final_logit_softcapping": 0.01},  # logits this small are capped visibly
    "gemma3_text": {
        **_TURNS,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 0.01,
    },
    "mixtral": {"num_local_experts": 4, **_EXPERTS},
    "granite": {"embedding_multiplier": 12.0},
    "qwen2_moe": _FEW_EXPERTS,
    "qwen3_moe": _FEW_EXPERTS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, **_EXPERTS},
    "opt": {
        "ffn_dim": 24,
        "word_embed_proj_dim": 8,
        "dropout": 0.0,
        "max_position_embeddings": 16,
    },
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {kind: (kind, {}) for kind in FAMILIES} | {
    "opt without projections": ("opt", {"word_embed_proj_dim": 16}),
    "falcon in groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
}


def build(kind: str, **more: Any) -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        **more,
    }
    if kind.startswith("gpt") and kind != "gpt_neox":
        sizes |= {"n_embd": 16, "n_layer": BLOCKS, "n_head": 2, "n_positions": 16}
    else:
        sizes |= {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": BLOCKS,
            "num_attention_heads": 2,
        }
        if kind != "gpt_neox":
            sizes["num_key_value_heads"] = 2
    # blocks of two kinds, whose masks the forward chooses by their numbers
    if kind in ("qwen2", "qwen3"):
        sizes |= {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
    sizes |= LAYERS_OF.get(kind, {}) | more
    torch.manual_seed(0)
    config = hf.AutoConfig.for_model(kind, **sizes)
    model: nn.Module = hf.AutoModelForCausalLM.from_config(config)
    return model.double()


def through(stages: list[nn.Module], x: Tensor, **keywords: Any) -> Tensor:
    for stage in stages:
        x = stage(x, **keywords)
    return x


@pytest.mark.parametrize("name", KINDS)
def test_the_stages_of_a_family_are_its_model(name: str) -> None:
    kind, more = KINDS[name]
    model = build(kind, **more).eval()
    alone = copy.deepcopy(model)
    stages = split_model(model, [1, 3])
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in alone.named_parameters())
    ids = torch.arange(16).view(2, 8) % VOCAB
    padded = torch.ones(2, 8, dtype=torch.int64)
    padded[0, 2:4] = 0  # inside, so that each token has one to look at in its window
    for keywords in ({}, {"attention_mask": padded}):
        ours = through(stages, ids, **keywords)
        wanted = alone(ids, **keywords).logits
        assert torch.equal(ours, wanted)
        ours.square().mean().backward()
        wanted.square().mean().backward()
    for stage in stages:
        for name, parameter in stage.named_parameters():
            gradient = alone.get_parameter(name).grad
            assert (
                parameter.grad is not None and gradient is not None and gradient.abs().max() > 0
            ), name
            torch.testing.assert_close(
                parameter.grad,
                gradient,
                rtol=0,
                atol=1e-12 * float(gradient.abs().max()),
            )


class OwnBlock(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return x + super().forward(x) * scale


class Own(nn.Module):
    """A model whose forward makes what its blocks take beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.positions = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(OwnBlock(8, 8) for _ in range(BLOCKS))
        self.head = nn.Linear(8, VOCAB)
        self.scale = nn.Parameter(torch.ones(()))
        self.factor = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, self.scale / ids.shape[1])
        y: Tensor = self.head(x * self.factor)
        return y


def test_a_model_of_ones_own_is_cut_by_its_table() -> None:
    model = Own()
    ids = torch.arange(16).view(2, 8)
    table = SplitSpec("blocks", ("embed",), ("head",), added=("positions",))
    with pytest.raises(ValueError, match=r"^scale: is on no stage"):
        split_model(model, [2], table, example=ids)
    del model.scale
    model.register_buffer("scale", torch.ones(()))
    assert torch.equal(through(split_model(model, [2], table, example=ids), ids), model(ids))
    model.factor = 2.0  # between the modules, so on every stage
    with pytest.raises(
        ValueError, match=r"^the stages of Own compute another output than the model"
    ):
        split_model(model, [2], table, example=ids)
    with pytest.raises(ValueError, match=r"^example = None: the check needs token ids"):
        split_model(model, [2], table)
    with pytest.raises(ValueError, match=r"^Own: model_type = None: has no rules"):
        split_model(model, [2])


def test_a_loss_of_all_routers_is_refused() -> None:
    model = build("mixtral", output_router_logits=True)
    with pytest.raises(ValueError, match=r"^output_router_logits = True: its loss needs"):
        split_model(model, [2])


def test_a_tied_parameter_on_two_stages_is_refused_with_the_line_that_unties_it() -> None:
    model = build("gemma2", tie_word_embeddings=True)  # as all published Gemmas are
    tie = r"^lm_head.weight: is tied to model.embed_tokens.weight, .* stages 1 and 0, "
    with pytest.raises(ValueError, match=tie) as caught:
        split_model(model, [2])
    ids = torch.arange(16).view(2, 8)
    tied = model(ids).logits
    exec(str(caught.value).rpartition("before the split: ")[2], {"model": model, "torch": torch})
    assert torch.equal(through(split_model(model, [2]), ids), tied)
    assert len(split_model(build("llama", tie_word_embeddings=True), [])) == 1


@pytest.mark.parametrize("boundaries", [[0], [4], [3, 2]])
def test_a_stage_without_blocks_is_refused(boundaries: list[int]) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="a stage would have none of the 4 modules"):
        split_model(model, boundaries)
