"""A run that starts from a folder of transformers computes what transformers computes, in layouts,
whoever saved it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel3d.checkpoint.hugging_face_names import hf_tensors
from parallel3d.checkpoint.store import check_start
from parallel3d.config.hugging_face import from_hugging_face, read_config_json
from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import ModelConfig, ParallelConfig
from parallel3d.errors import CheckpointError
from parallel3d.tools.checkpoint.command import main as parallel3d_checkpoint
from parallel3d.training.state import load_model
from tests.distributed.training_cases import (
    BATCH,
    GROUPED,
    label,
    make_recipe,
    make_trainer,
    own_batch,
    save_trainer,
    whole_batch,
)

transformers = pytest.importorskip(
    "transformers", reason="transformers makes the models and says what they compute"
)

PRELOAD = ("transformers",)
TP2_PP2 = ParallelConfig(
    tp=2,
    pp=2,
    sequence_parallel=True,
    microbatch_size=2,
)
_SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_LLAMA = {
    **_SMALL,
    "vocab_size": 301,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1000.0,
}
_LLAMA3 = {
    **{
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 500.0,
    },
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
# Three experts of an ep rank have an odd number of rows, which no shard has whole.
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 21}
FAMILIES = {
    "llama": ("Llama", _LLAMA),
    "llama-tied": ("Llama", {**_LLAMA, "tie_word_embeddings": True, "head_dim": 12}),
    "llama3.1": ("Llama", {**_LLAMA, "rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {**_LLAMA, "rope_parameters": _YARN}),
    "qwen2": ("Qwen2", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**_LLAMA, "head_dim": 12}),
    "mistral": ("Mistral", {**_LLAMA, "sliding_window": 7}),
    "mixtral": ("Mixtral", {**_LLAMA, "num_local_experts": 4}),
    "qwen2-moe": ("Qwen2Moe", {**_LLAMA, **_MOE, "shared_expert_intermediate_size": 24}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **_LLAMA,
            **_MOE,
            "head_dim": 12,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "n_layer": 4,
            "n_embd": 32,
            "n_head": 4,
            "n_positions": 32,
            "vocab_size": 1005,
        },
    ),
}
MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe")
SHORT = ("llama3.1", "gpt2", *MIXTURES)
CASES = [(name, TP2_PP2) for name in FAMILIES]
CASES += [(name, ParallelConfig(dp_shard=4, ep=2)) for name in MIXTURES]


def build(family: str, folder: Path) -> torch.nn.Module:
    """Saves a model of transformers, all of whose parameters are random, biases and norms too, in
    several files."""
    name, numbers = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        **numbers, attn_implementation="eager", experts_implementation="eager"
    )
    torch.manual_seed(1)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


def first_loss(
    model: ModelConfig,
    parallel: ParallelConfig,
    folder: Path,
    saved: Path,
) -> float:
    """Returns the loss of the first step of a run that starts from `folder`, and before it saves
    what it has."""
    recipe = make_recipe(model, parallel)
    trainer = make_trainer(recipe, initialize=False)
    load_model(trainer, folder)
    save_trainer(trainer, saved)
    return trainer.train_step(own_batch(recipe, 0)).loss


def loss_of(peer: torch.nn.Module, model: ModelConfig) -> float:
    """Returns transformers' own loss of the first step's batch."""
    batch = whole_batch(make_recipe(model, ParallelConfig()), 0)
    with torch.no_grad():
        logits = torch.cat([peer(ids).logits for ids in batch.inputs])
    labels = torch.cat([*batch.labels])
    assert len(labels) == BATCH
    return torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten()).item()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a folder of transformers, by their names."""
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    "family, parallel",
    [
        pytest.param(
            name,
            parallel,
            id=f"{name}-{label(parallel, GROUPED)}",
            marks=[] if name in SHORT else pytest.mark.long,
        )
        for name, parallel in CASES
    ],
)
def test_what_is_imported_computes_as_transformers_does_and_is_exported_bitwise(
    world: Callable, tmp_path: Path, family: str, parallel: ParallelConfig
) -> None:
    theirs, recipe, saved, again = (
        tmp_path / name for name in ("theirs", "recipe.yaml", "step_00000000", "again")
    )
    peer = build(family, theirs)
    assert parallel3d_checkpoint(["import", str(theirs), "-o", str(recipe)]) == 0
    needed = ("train.steps=1", "train.global_batch_size=8", "train.seq_len=24")
    read = load_recipe(recipe, needed, cards={})
    assert read.checkpoint.start_from == str(theirs)
    model = replace(read.model, dropout=0.0, attention_dropout=0.0)
    assert check_start(theirs, model) == []
    expected = loss_of(peer, model)
    losses = world(4).run(first_loss, model, parallel, theirs, saved)
    assert losses == pytest.approx([expected] * 4, rel=1e-6)
    assert parallel3d_checkpoint(["export", str(saved), str(again)]) == 0
    first = weights(theirs)
    second = weights(again)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        assert tensor.dtype == second[name].dtype


def logits_and_gradients(
    model: ModelConfig, folder: Path, ids: torch.Tensor
) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Returns the logits of a sequence by the weights in `folder`, its loss, and the gradients
    under the names of transformers."""
    trainer = make_trainer(make_recipe(model, ParallelConfig()), initialize=False)
    load_model(trainer, folder)
    module = trainer.stages[0].module
    logits = module(ids)
    loss = next_token_loss(logits, ids)
    loss.backward()
    gradients = {}
    for each in hf_tensors(model, ()):
        (name,) = each.parameters
        whole = module.get_parameter(name).grad
        assert whole is not None
        rows = each.rows(len(whole))
        gradients[each.name] = whole[rows.start : rows.stop].clone()
    return logits.detach(), loss.item(), gradients


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_have_the_logits_and_gradients_of_transformers(
    world: Callable, tmp_path: Path, family: str
) -> None:
    peer = build(family, tmp_path)
    path = tmp_path / "config.json"
    model = from_hugging_face(read_config_json(path), path)
    ids = torch.randint(model.vocab, (1, 48), generator=torch.Generator().manual_seed(0))
    logits, loss, gradients = world(1).run(logits_and_gradients, model, tmp_path, ids)[0]
    expected = peer(ids).logits
    assert (logits - expected).abs().max() < 1e-5
    expected_loss = next_token_loss(expected, ids)
    assert loss == pytest.approx(expected_loss.item(), rel=1e-6)
    expected_loss.backward()
    # transformers stacks experts in memory, but not in files: a model of its gradients
    for parameter in peer.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    peer.save_pretrained(tmp_path / "gradients")  # type: ignore[operator]
    theirs = weights(tmp_path / "gradients")
    assert theirs.keys() == gradients.keys()
    for name, gradient in theirs.items():
        error = (gradients[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-4)
        assert error < 1e-5, name


def start_one(model: ModelConfig, folder: Path) -> str:
    """Returns what a run in one process says of a folder: its refusal, or nothing."""
    trainer = make_trainer(make_recipe(model, ParallelConfig()))
    try:
        load_model(trainer, folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_folders_in_other_forms_and_of_other_models(world: Callable, tmp_path: Path) -> None:
    build("gpt2", tmp_path)
    path = tmp_path / "config.json"
    model = from_hugging_face(read_config_json(path), path)

    def said(model: ModelConfig = model) -> str:
        answer: str = world(1).run(start_one, model, tmp_path)[0]
        return answer

    index = (tmp_path / "model.safetensors.index.json").read_text()
    outside = index.replace("model-00001-of", "../model-00001-of", 1)
    (tmp_path / "model.safetensors.index.json").write_text(outside)
    assert "../model-00001-of" in said()
    assert "is not the name of a file in this folder" in said()
    (tmp_path / "model.safetensors.index.json").unlink()
    assert said() == "", "several files without an index"
    files = sorted(tmp_path.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {f"h.{block}.attn.bias": torch.ones(1, 1, 4, 4) for block in range(4)}
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    for file in files:
        file.unlink()
    save_file(bare, tmp_path / "model.safetensors")
    assert said() == "", (
        "the form of the first GPT-2, with buffers that nobody reads and the tied head"
    )
    save_file(
        {
            **bare,
            "extra": torch.ones(2),
            "wpe.weight": bare["wpe.weight"].char(),
        },
        tmp_path / "model.safetensors",
    )
    lines = said(replace(model, layers=6, vocab=1000)).splitlines()
    assert lines[0] == f"{tmp_path}: is from another model:"
    assert len(lines) == 16
    assert {
        "  transformer.extra is [2] there and missing here",
        "  transformer.h.*.attn.c_attn.weight (2 tensors) is missing there and [32, 96] here",
        "  transformer.wte.weight is [1005, 32] there and [1000, 32] here",
        "  transformer.wpe.weight has dtype I8; quantized weights cannot be loaded",
    } < {*lines}
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    assert "cannot be read as safetensors" in said()
