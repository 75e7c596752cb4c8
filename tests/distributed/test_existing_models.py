"""Models of transformers, and classes that know nothing of parallel3d, trained by recipe in every
layout, beside plain torch on the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from parallel3d.build_engine import block_weights_of
from parallel3d.config.hugging_face import config_of, sizes_of
from parallel3d.config.recipe import (
    DataConfig,
    ModelConfig,
    ParallelConfig,
    Recipe,
    StageNames,
    TpRule,
)
from parallel3d.convert.families import SEQUENCE_FAMILIES
from parallel3d.convert.hugging_face import construct_hugging_face
from parallel3d.errors import ConfigError
from parallel3d.export import ExportForm, export
from parallel3d.layers.parameter import initial_weights
from parallel3d.mesh import build_mesh
from parallel3d.models import check_model, model_class, unsharded_model
from parallel3d.planner.model.hf_config import shape_of_json
from parallel3d.planner.model.parameters import model_flops_per_token
from parallel3d.reporting.metrics import flops_per_token
from parallel3d.tools.check_layout.plain import plain_optimizers
from parallel3d.training.generation import sampling
from parallel3d.training.state import load_model, load_trainer
from tests.distributed.training_cases import (
    Curve,
    assert_follows,
    long,
    losses,
    make_recipe,
    make_trainer,
    save_trainer,
    train,
    whole_batch,
)

PRELOAD = ("transformers.models.qwen2.modeling_qwen2",)
STEPS = 5
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_MORE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 7},
    "gemma2": {"head_dim": 8, "sliding_window": 7},
    "gemma3_text": {"head_dim": 8, "sliding_window": 7},
    "qwen3": {"head_dim": 8},
    "glm": {"head_dim": 8},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 12.0},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
}
FAMILIES = [
    *["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2"],
    *["granite", "smollm3", "starcoder2", "stablelm", "cohere", "glm", "falcon", "gpt2"],
    *["gpt_neox", "opt", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"],
]
QUICK = ["llama", "mixtral"]  # the others are long tests
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2, "pp": 2, "dp_shard": 2},
]
MORE_LAYOUTS: list[dict[str, Any]] = [
    *({axis: 2} for axis in ("tp", "pp", "dp_shard")),
    {"pp": 2, "schedule": "zb_h1"},
    {"dp_shard": 2, "zero_stage": 1, "recompute": "every_n", "recompute_every": 2},
    {"dp_shard": 2, "sharding": "NO_SHARD", "tp": 2, "recompute": "full"},
    {"dp_replicate": 2, "zero_stage": 2},
]


def model_section(family: str, folder: Path) -> ModelConfig:
    """Writes the config.json of a tiny model, and returns the section that names it."""
    keys = _GPT2 if family == "gpt2" else _SIZES
    path = folder / f"{family}.json"
    config = {"model_type": family, **keys, **_MORE.get(family, {})}
    path.write_text(json.dumps(config))
    sizes = sizes_of(config, path)
    return ModelConfig(architecture="transformers", config=str(path), **sizes)


SIZES: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 4, "vocab": 128}
NANO = ModelConfig(
    architecture="tests.foreign_models:NanoGPT",
    **SIZES,
    ffn_hidden=128,
    options={"n_layer": 3},
    stages=StageNames(blocks="h", first=("wte", "drop"), added=("wpe",), last=("ln_f", "lm_head")),
    tp_rules=(
        TpRule(modules="wte", style="vocab"),
        TpRule(modules="wpe", style="replicate"),
        TpRule(modules="**.attn", style="divide", attributes=("n_head", "n_embd")),
        TpRule(modules="**.c_attn", style="column", parts=3),
        TpRule(modules="**.c_fc", style="column"),
        TpRule(modules="**.c_proj", style="row"),
        TpRule(modules="lm_head", style="column"),
    ),
)
GROUPED = ModelConfig(
    architecture="tests.foreign_models:GroupedDecoder",
    **SIZES,
    kv_heads=2,
    ffn_hidden=64,
    options={"vocab": 128, "hidden": 32, "heads": 4, "blocks": 3},
    stages=StageNames(blocks="blocks", first=("embed",), last=("head",)),
    tp_rules=(
        TpRule(modules="embed", style="vocab"),
        *(TpRule(modules=f"**.{name}", style="column") for name in ("q", "k", "v", "up")),
        *(TpRule(modules=f"**.{name}", style="row") for name in ("o", "down")),
        TpRule(modules="head", style="column", gather_output=True),
    ),
)


def whole_model(config: ModelConfig, seed: int) -> nn.Module:
    """Returns the model as plain torch has it, with the initial values of every layout."""
    build = model_class(config.architecture)
    model: nn.Module = build.construct(config)  # type: ignore[attr-defined]
    missing = model.load_state_dict(
        initial_weights(unsharded_model(config), seed), strict=False
    ).missing_keys
    assert all("head" in name or "embed_out" in name for name in missing)  # tied
    return model


def plain_loss(model: nn.Module, recipe: Recipe, step: int) -> Tensor:
    """Returns the loss of a batch. If documents are masked, the model sees each of them alone."""
    batch = whole_batch(recipe, step)
    parts = [batch.inputs.flatten(0, 1)]
    if batch.documents is not None:
        lengths = [length for each in batch.documents for length in each.lengths]
        parts = [document[None] for document in batch.inputs.flatten().split(lengths)]
    outputs = [model(part) for part in parts]
    logits = [getattr(output, "logits", output).flatten(0, 1) for output in outputs]
    return F.cross_entropy(torch.cat(logits), batch.labels.flatten())


def plain_curve(recipe: Recipe) -> Curve:
    """Trains the whole model in one process with plain torch."""
    model = whole_model(recipe.model, recipe.train.seed)
    (optimizer,) = plain_optimizers(model, recipe.optimizer, [])
    curve = []
    for step in range(STEPS):
        loss = plain_loss(model, recipe, step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.train.grad_clip or 1e9)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


def curve_of(recipe: Recipe) -> Curve:
    return train(make_trainer(recipe), STEPS)


def assert_same_in(
    world: Callable,
    model: ModelConfig,
    layouts: Iterable[Mapping[str, Any]],
    documents: Literal["join", "mask"] = "join",
    **settings: object,
) -> None:
    """Compares training in each layout with plain torch on the whole model."""
    data = DataConfig(documents=documents)
    alone = replace(make_recipe(model, ParallelConfig()), data=data)
    reference = world(1).run(plain_curve, alone)[0]
    for layout in layouts:
        parallel = ParallelConfig(**{"microbatch_size": 2, **layout})
        recipe = replace(make_recipe(model, parallel, **settings), data=data)
        curves = world(parallel.world_size).run(curve_of, recipe)
        assert_follows(curves[0], reference)


@pytest.mark.parametrize(
    "family",
    [each if each in QUICK else long(each) for each in FAMILIES],
)
def test_a_family_trains_as_in_plain_torch(world: Callable, family: str, tmp_path: Path) -> None:
    sequence = [{"tp": 2, "pp": 2, "sequence_parallel": True}]
    layouts = LAYOUTS + sequence * (family in SEQUENCE_FAMILIES)
    assert_same_in(world, model_section(family, tmp_path), layouts)


@pytest.mark.parametrize("model", [NANO, long(GROUPED)], ids=["nanoGPT", "grouped"])
def test_a_users_model_trains_as_in_plain_torch(world: Callable, model: ModelConfig) -> None:
    assert_same_in(world, model, LAYOUTS)


@pytest.mark.long
@pytest.mark.parametrize("model", [NANO, GROUPED], ids=["nanoGPT", "grouped"])
def test_a_users_model_in_other_layouts(world: Callable, model: ModelConfig) -> None:
    assert_same_in(world, model, MORE_LAYOUTS)


@pytest.mark.long
def test_llama_in_other_layouts(world: Callable, tmp_path: Path) -> None:
    selective = {"tp": 2, "recompute": "selective"}
    assert_same_in(world, model_section("llama", tmp_path), [*MORE_LAYOUTS, selective])


def test_masked_documents_train_as_if_alone(world: Callable, tmp_path: Path) -> None:
    assert_same_in(world, model_section("gemma2", tmp_path), [{"tp": 2, "pp": 2}], "mask")


@pytest.mark.long
def test_compiled_blocks_train_as_in_plain_torch(world: Callable, tmp_path: Path) -> None:
    split = {
        "tp": 2,
        "pp": 2,
        "schedule": "zb_h1",
        "sequence_parallel": True,
    }
    recomputed = {
        "dp_shard": 2,
        "recompute": "full",
    }
    model = model_section("llama", tmp_path)
    assert_same_in(
        world,
        model,
        [split, recomputed],
        compile=True,
    )


@pytest.mark.parametrize("into", [{"dp_shard": 4}, long({"tp": 2, "pp": 2})], ids=str)
def test_a_run_resumes_in_another_layout(
    world: Callable, tmp_path: Path, into: dict[str, Any]
) -> None:
    model = model_section("gemma2", tmp_path)
    before = make_recipe(model, ParallelConfig(tp=2, pp=2, microbatch_size=2))
    after = make_recipe(model, ParallelConfig(**into, microbatch_size=2))
    saved = world(4).run(curve_and_save, before, tmp_path / "saved")[0]
    resumed = world(after.parallel.world_size).run(resume_curve, after, tmp_path / "saved")[0]
    if before == after:
        assert resumed == saved
    assert losses(resumed) == pytest.approx(losses(saved), rel=1e-5)


def curve_and_save(recipe: Recipe, path: Path) -> Curve:
    """Saves after three steps, and returns the curve of the next two."""
    trainer = make_trainer(recipe)
    train(trainer, 3)
    save_trainer(trainer, path)
    return train(trainer, 2)


def resume_curve(recipe: Recipe, path: Path) -> Curve:
    trainer = make_trainer(recipe, initialize=False)
    load_trainer(trainer, path)
    return train(trainer, 2)


def wrong_rules(recipe: Recipe) -> str:
    """Returns the error of the comparison with the unsplit model."""
    build = model_class(recipe.model.architecture)
    with pytest.raises(ConfigError) as caught:
        build.compare(recipe, build_mesh(recipe.parallel, "cpu"))  # type: ignore[attr-defined]
    return str(caught.value)


def test_wrong_rules_are_found_before_the_first_step(world: Callable) -> None:
    rules = tuple(rule for rule in NANO.tp_rules if rule.style != "divide")
    for kept in (rules, (*rules, replace(NANO.tp_rules[2], attributes=("n_head",)))):
        recipe = make_recipe(replace(NANO, tp_rules=kept), ParallelConfig(tp=2))
        for error in world(2).run(wrong_rules, recipe):
            assert error.startswith("model.tp_rules: ")
            assert "attn" in error
    assert NANO.stages is not None
    names = replace(NANO.stages, last=("lm_head",), added=("wpe", "ln_f"))
    recipe = make_recipe(replace(NANO, stages=names), ParallelConfig(pp=2))
    assert world(2).run(wrong_rules, recipe)[0].startswith("model.stages: ")


def import_and_save(recipe: Recipe, folder: Path, path: Path) -> float:
    """Loads the weights of a Hugging Face folder into a layout, and saves a checkpoint of them.

    Returns the loss of the first step after that.
    """
    trainer = make_trainer(recipe, initialize=False)
    load_model(trainer, folder)
    save_trainer(trainer, path)
    return train(trainer, 1)[0][0]


# GPT-NeoX renames a tensor in files. The mixtures stack the experts of the files in memory.
IMPORTED = ["gpt_neox", "qwen2_moe"]
MORE_IMPORTED = [
    "gpt2",
    "llama",
    "gemma2",
    "mixtral",
    "qwen3_moe",
    "olmoe",
]


@pytest.mark.parametrize("family", [*IMPORTED, *map(long, MORE_IMPORTED)])
def test_imported_weights_are_exported_bitwise(
    world: Callable, tmp_path: Path, family: str
) -> None:
    folder = tmp_path / "published"
    own = model_section(family, tmp_path)
    model: Any = construct_hugging_face(own)
    model.save_pretrained(folder)
    own = replace(own, config=str(folder))
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_p": 0.9}')
    recipe = make_recipe(own, ParallelConfig(tp=2, dp_shard=2, pp=2, microbatch_size=2))
    losses = world(8).run(import_and_save, recipe, folder, tmp_path / "saved")
    form = ExportForm(
        model=own,
        seq_len=24,
        largest_file_bytes=20_000,
    )
    assert [*export(tmp_path / "saved", tmp_path / "exported", form)]
    published = tensors_in(folder)
    exported = tensors_in(tmp_path / "exported")
    assert published.keys() == exported.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, exported[name]), name
    back = type(model).from_pretrained(tmp_path / "exported")
    assert losses == pytest.approx([plain_loss(back, recipe, 0).item()] * 8, rel=1e-6)
    assert sampling(own, recipe.train).sample_top_p == 0.9
    assert (tmp_path / "exported" / "generation_config.json").is_file()


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_folders_with_other_names_are_read(world: Callable, tmp_path: Path, family: str) -> None:
    """As the first GPT-2, without the prefix of the base model, or with stacked experts."""
    own = model_section(family, tmp_path)
    model: Any = construct_hugging_face(own)
    tensors = {name.removeprefix("transformer."): x for name, x in model.state_dict().items()}
    save_file(
        {**tensors, "lm_head.weight": model.lm_head.weight.clone()}, tmp_path / "a.safetensors"
    )
    recipe = make_recipe(own, ParallelConfig(tp=2))
    loss = world(2).run(import_and_save, recipe, tmp_path, tmp_path / "saved")[0]
    assert loss == pytest.approx(plain_loss(model, recipe, 0).item(), rel=1e-6)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    files = map(load_file, folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in file.items()}


@pytest.mark.parametrize(
    "family",
    ["gemma2", "mistral", "starcoder2", "qwen3_moe"],
)
def test_flops_are_those_of_the_plan(tmp_path: Path, family: str) -> None:
    model = model_section(family, tmp_path)
    weights = block_weights_of(model_class("transformers"), model)
    shape = shape_of_json(config_of(model), tmp_path)
    assert weights is not None
    assert flops_per_token(model, weights, 24) == pytest.approx(model_flops_per_token(shape, 24))


REFUSED: dict[str, tuple[ModelConfig, dict[str, Any], str]] = {
    "no option": (replace(GROUPED, options={"vocab": 128}), {}, "missing a required argument"),
    "wrong option": (replace(GROUPED, options={**GROUPED.options, "width": 2}), {}, "'width'"),
    "no stages": (replace(NANO, stages=None), {}, "name the modules of NanoGPT"),
    "dropout": (replace(NANO, options={"dropout": 0.1}), {}, "drop: has dropout 0.1"),
    "blocks": (replace(NANO, layers=4), {}, "model.layers = 4: h has 3 blocks"),
    "ids": (replace(NANO, vocab=130), {}, "model.vocab = 130: wte has only 128 rows"),
    "positions": (
        replace(NANO, options={**NANO.options, "block_size": 16}),
        {},
        "train.seq_len = 24: wpe has only 16 rows; try train.seq_len=16",
    ),
    "no rules": (replace(NANO, tp_rules=()), {"tp": 2}, "model.tp_rules: none are set"),
    "no rule": (replace(NANO, tp_rules=NANO.tp_rules[:-1]), {"tp": 2}, "lm_head: this Linear"),
    "no attention": (GROUPED, {"recompute": "selective"}, "no module named self_attn"),
    "lost": (
        replace(NANO, stages=StageNames(blocks="h", first=("wte",), last=("ln_f", "lm_head"))),
        {},
        "no stage holds the parameters wpe.weight",
    ),
    "absent": (
        replace(NANO, stages=StageNames(blocks="blocks", first=("wte",), last=("lm_head",))),
        {},
        "the model has no module blocks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_line(name: str) -> None:
    model, layout, said = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        check_model(make_recipe(model, ParallelConfig(**layout)))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
