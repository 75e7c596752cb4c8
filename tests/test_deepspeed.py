"""`--from-deepspeed`: every key of a DeepSpeed configuration is reported, and what is taken makes a
recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config.load import load_recipe
from parallel3d.models import shape_cards
from parallel3d.recipes.deepspeed import Translation, from_deepspeed
from parallel3d.recipes.pretrain import main

STAGE_2: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale_window": 9, "hysteresis": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-4, "betas": [0.9, 0.98], "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": 1e-4,
            "warmup_num_steps": 10,
            "total_num_steps": 200,
        },
    },
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "none", "pin_memory": True},
    },
    "wandb": {"enabled": True, "project": "tries"},
}
AUTO: dict[str, Any] = {
    "fp16": {"enabled": "auto", "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
}
NOT_HERE: dict[str, Any] = {
    "fp16": {
        "enabled": True,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
    },
    "communication_data_type": "fp16",
    "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 10}},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "data_efficiency": {"enabled": True, "seed": 1},
    "sequence_parallel_size": 2,
    "hybrid_engine": {"enabled": False, "max_out_tokens": 8},
    "scheduler": {"type": "OneCycle"},
    "stepz_per_print": 3,
}


def translated(folder: Path, config: dict[str, Any]) -> Translation:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return from_deepspeed(path)


def test_what_is_taken_is_a_recipe_with_deepspeeds_defaults(tmp_path: Path) -> None:
    found = translated(tmp_path, STAGE_2)
    assert found.refused == []
    (tmp_path / "mine.yaml").write_text(found.to_yaml())
    settings = ["model.name=gpt3-125m", "train.seq_len=1024"]
    recipe = load_recipe(tmp_path / "mine.yaml", settings, cards=shape_cards())
    train = recipe.train
    optimizer = recipe.optimizer
    assert train.global_batch_size == 64
    assert train.precision == "bf16"
    assert train.steps == 200
    assert train.grad_clip == 0.5
    assert recipe.microbatches == 4
    assert recipe.parallel.dp_shard == 8
    assert recipe.parallel.strategy == "SHARD_GRAD_OP"
    assert optimizer.lr == 1e-4
    assert optimizer.betas == (0.9, 0.98)
    assert optimizer.weight_decay == 0.0
    assert optimizer.schedule == "linear"
    assert optimizer.warmup_steps == 10
    assert recipe.logging.sinks == ("wandb",)
    assert recipe.logging.project == "tries"


def test_what_the_trainer_fills_in_is_still_to_be_given(tmp_path: Path) -> None:
    found = translated(tmp_path, AUTO)
    assert found.keys["checkpoint.export"] == "last"
    assert not found.keys.keys() & {"optimizer.lr", "train.precision", "train.grad_clip"}
    for key in ("optimizer.lr", "train.grad_clip", "train.precision", "train.seq_len"):
        assert any(line.startswith(key) for line in found.open), key
    assert found.to_yaml().startswith("# missing: ")


def test_what_would_train_another_way_is_refused(tmp_path: Path) -> None:
    found = translated(tmp_path, NOT_HERE)
    assert {line.split(" = ")[0] for line in found.refused} == {
        "communication_data_type",
        "optimizer.type",
        "optimizer.params.freeze_step",
        "zero_optimization.offload_param.device",
        "data_efficiency.enabled",
        "data_efficiency.seed",
        "sequence_parallel_size",
        "scheduler.type",
        "stepz_per_print",
    }
    assert found.keys["loss_scale.interval"] == 500


@pytest.mark.parametrize(
    "text, words",
    [
        ("[1]", "must be an object with keys and values"),
        ("{", "cannot be read as JSON"),
        ('{"steps_per_print": [[[1]]]}', "refused:"),
        ('{"\\u001b[2J": 1}', "refused:"),
    ],
)
def test_a_broken_configuration_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert main(["--from-deepspeed", str(path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "\x1b" not in said
