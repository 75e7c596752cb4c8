"""`--from-deepspeed`: every key of a DeepSpeed configuration is told of, and what is taken makes a recipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from house import ROOT

from parallel3d.config.load import load_recipe
from parallel3d.models import shape_cards
from parallel3d.recipes.deepspeed import Translation, from_deepspeed
from parallel3d.recipes.pretrain import main

STAGE_2: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
    "steps_per_print": 20,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.98], "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 10, "total_num_steps": 200},
    },
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "none", "pin_memory": True},
    },
    "wandb": {"enabled": True, "project": "tries"},
    "flops_profiler": {"enabled": True, "profile_step": 3, "top_modules": 1},
    "wall_clock_breakdown": False,
}


def translated(folder: Path, config: dict[str, Any]) -> Translation:
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return from_deepspeed(path)


def test_what_is_taken_is_a_recipe_with_deepspeeds_defaults_where_it_says_nothing(tmp_path: Path) -> None:
    found = translated(tmp_path, STAGE_2)
    assert found.refused == []
    (tmp_path / "mine.yaml").write_text(found.to_yaml())
    recipe = load_recipe(tmp_path / "mine.yaml", ["model.name=gpt3-125m", "train.seq_len=1024"], cards=shape_cards())
    assert recipe.train.global_batch_size == 64
    assert recipe.microbatches == 4
    assert (recipe.parallel.dp_shard, recipe.parallel.strategy) == (8, "SHARD_GRAD_OP")
    assert (recipe.train.precision, recipe.train.grad_clip, recipe.train.steps) == ("bf16", 0.5, 200)
    optimizer = recipe.optimizer
    assert (optimizer.lr, optimizer.betas, optimizer.weight_decay) == (1e-4, (0.9, 0.98), 0.0)
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.min_lr_ratio) == ("linear", 10, 0.0)
    assert recipe.logging.sinks == ("wandb",)
    assert (recipe.logging.project, recipe.logging.profile_steps) == ("tries", (3, 3))


def leaves(tree: dict[str, Any], under: str = "") -> list[str]:
    names = []
    for key, value in tree.items():
        names += leaves(value, f"{under}{key}.") if isinstance(value, dict) else [f"{under}{key}"]
    return names


def filled_in_by_trainer() -> dict[str, Any]:
    """A configuration as transformers' Trainer takes it, whose values it fills in."""
    names = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    rates = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    return {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": names},
        "scheduler": {"type": "WarmupLR", "params": rates},
        "zero_optimization": {"stage": 3, "sub_group_size": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
        **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"), "auto"),
        "train_micro_batch_size_per_gpu": "auto",
    }


def everything_else() -> dict[str, Any]:
    """What is left out by the other two: fp16's scale, offloading, and what this project does not have."""
    return {
        "fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "consecutive_hysteresis": True},
        "communication_data_type": "fp16",
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 10}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "mics_shard_size": 4},
        "data_efficiency": {"enabled": True, "seed": 1},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "sequence_parallel_size": 2,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 8},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-5}},
        "pipeline": {"stages": 2, "partition": "best"},
        "stepz_per_print": 3,
    }


@pytest.mark.parametrize("config", [STAGE_2, filled_in_by_trainer(), everything_else()])
def test_every_key_is_told_of(tmp_path: Path, config: dict[str, Any]) -> None:
    found = translated(tmp_path, config)
    said = [*found.taken, *found.differs, *found.idle, *found.refused, *found.open]
    assert [name for name in leaves(config) if not any(name in line for line in said)] == []


@pytest.mark.parametrize(("pure", "own", "other"), [(False, "fp32", "bf16"), (True, "bf16", "fp32")])
def test_gradients_that_are_added_up_as_they_are_here_are_taken(
    tmp_path: Path, pure: bool, own: str, other: str
) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": pure}
    assert not translated(tmp_path, {"bf16": bf16, "data_types": {"grad_accum_dtype": own}}).refused
    (refused,) = translated(tmp_path, {"bf16": bf16, "data_types": {"grad_accum_dtype": other}}).refused
    assert refused.startswith(f"data_types.grad_accum_dtype = {other}: ")


def test_what_the_trainer_fills_in_is_still_to_be_given(tmp_path: Path) -> None:
    found = translated(tmp_path, filled_in_by_trainer())
    assert found.keys["parallel.zero_stage"] == 3
    assert found.keys["checkpoint.export"] == "last"
    assert "optimizer.lr" not in found.keys
    for words in ("optimizer.lr (", "train.grad_clip (", "train.precision", "train.global_batch_size", "train.seq_len"):
        assert any(words in line for line in found.open), words
    assert found.to_yaml().startswith("# to be given: ")


def test_what_would_train_another_way_is_refused_and_what_is_off_is_not(tmp_path: Path) -> None:
    found = translated(tmp_path, everything_else())
    refused = {line.split(" = ")[0] for line in found.refused}
    assert refused == {
        "communication_data_type",
        "optimizer.type",
        "optimizer.params.lr",
        "optimizer.params.freeze_step",
        "zero_optimization.offload_param.device",
        "data_efficiency.enabled",
        "data_efficiency.seed",
        "sequence_parallel_size",
        "scheduler.type",
        "scheduler.params.cycle_min_lr",
        "stepz_per_print",
    }
    assert (found.keys["loss_scale.initial"], found.keys["loss_scale.interval"]) == (4096.0, 500)
    assert found.keys["parallel.pp"] == 2


def test_without_a_word_on_precision_clipping_or_decay_the_values_are_deepspeeds_not_ours(tmp_path: Path) -> None:
    found = translated(tmp_path, {"train_batch_size": 8, "optimizer": {"type": "Adam"}})
    assert found.keys["train.precision"] == "fp32"
    assert found.keys["train.grad_clip"] is None
    assert found.keys["optimizer.betas"] == [0.9, 0.999]
    assert found.keys["optimizer.weight_decay"] == 0.0


def test_a_key_is_known_by_its_older_and_its_shorter_name(tmp_path: Path) -> None:
    zero = {"stage": 3, "prefetch_bucket_size": 10, "gather_16bit_weights_on_model_save": True}
    config = {"bfloat16": {"enabled": True}, "zero_optimization": zero, "gradient_allreduce_op": "mean"}
    found = translated(tmp_path, config)
    assert found.refused == []
    assert (found.keys["train.precision"], found.keys["checkpoint.export"]) == ("bf16", "last")
    assert any(line.startswith("checkpoint.every") for line in found.open)
    found = translated(tmp_path, {**config, "gradient_allreduce_op": "sum"})
    assert [line.split(" = ")[0] for line in found.refused] == ["gradient_allreduce_op"]


def configurations_in(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the DeepSpeed configurations below a folder: JSON files, and those that its pages of Markdown print."""
    fence = re.compile(r"^ *(?:```\w*|{% highlight json %})\n(.*?)^ *(?:```|{% endhighlight %})", re.M | re.S)
    for path in sorted(folder.rglob("*.[jm][sd]*")):
        texts = [path.read_text()] if path.suffix == ".json" else fence.findall(path.read_text())
        for text in texts if path.suffix in (".json", ".md") else ():
            with contextlib.suppress(ValueError):
                config = json.loads(text)
                if isinstance(config, dict) and config.keys() & {
                    "zero_optimization",
                    "train_batch_size",
                    "fp16",
                    "bf16",
                }:
                    yield str(path), config


@pytest.mark.long
def test_every_key_of_deepspeeds_own_configurations_is_told_of_and_what_is_taken_is_a_recipe(tmp_path: Path) -> None:
    """Checkouts of DeepSpeed, DeepSpeedExamples or transformers are named in DEEPSPEED_EXAMPLES, with `:` between."""
    folders = [Path(each) for each in os.environ.get("DEEPSPEED_EXAMPLES", "").split(":") if each]
    if not folders:
        pytest.skip("DEEPSPEED_EXAMPLES names no checkout of DeepSpeed")
    read = [each for folder in folders for each in configurations_in(folder)]
    assert len(read) > 50
    given = {"model.name": "gpt3-125m", "train.seq_len": 1024, "train.steps": 10**6, "train.global_batch_size": 1024}
    given |= {"optimizer.lr": 1e-4, "checkpoint.every": 100}
    for name, config in read:
        found = translated(tmp_path, config)
        said = [*found.taken, *found.differs, *found.idle, *found.refused, *found.open]
        assert [key for key in leaves(config) if not any(key in line for line in said)] == [], name
        (tmp_path / "mine.yaml").write_text(found.to_yaml())
        settings = [f"{key}={value}" for key, value in given.items() if key not in found.keys]
        if found.keys.get("optimizer.state_dtype") == "bf16":
            settings.append("optimizer.betas=[0.9,0.95]")
        load_recipe(tmp_path / "mine.yaml", settings, cards=shape_cards())


def test_the_groups_of_mics_are_shards_with_replicas(tmp_path: Path) -> None:
    config = {**STAGE_2, "zero_optimization": {"stage": 3, "mics_shard_size": 4}}
    found = translated(tmp_path, config)
    assert (found.keys["parallel.dp_shard"], found.keys["parallel.dp_replicate"]) == (4, 2)


def test_the_command_prints_yaml_on_stdout_and_the_lists_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(STAGE_2))
    assert main(["--from-deepspeed", str(path)]) == 0
    printed = capsys.readouterr()
    assert "global_batch_size: 64" in printed.out
    assert "overlap_comm" not in printed.out
    assert (
        "without a meaning here:\n  wall_clock_breakdown" in printed.err or "zero_optimization.overlap" in printed.err
    )
    path.write_text(json.dumps(everything_else()))
    assert main(["--from-deepspeed", str(path)]) == 2
    assert "refused:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "must hold keys and values"),
        ("{", "cannot be read as JSON"),
        ('{"fp16": {"enabled": true, "initial_scale_power": "x"}}', "fp16.initial_scale_power = x: must be a number"),
    ],
)
def test_a_file_that_is_none_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert main(["--from-deepspeed", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_the_file_of_the_page_becomes_what_the_page_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/coming-from.md").read_text()
    config, recipe = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("json", "yaml"))
    (tmp_path / "ds.json").write_text(config)
    assert main(["--from-deepspeed", str(tmp_path / "ds.json")]) == 2
    printed = capsys.readouterr()
    written = [line for line in printed.out.splitlines() if not line.startswith("# ")]
    assert yaml.safe_load("\n".join(written)) == yaml.safe_load(recipe)
    assert printed.err.split("refused:")[1].split(" = ")[0].strip() == "zero_optimization.offload_optimizer.device"


@pytest.mark.parametrize("broken", [{"scheduler": {"type": ["cosine"]}}, {"steps_per_print": [[[1]]]}, {"\x1b[2J": 1}])
def test_a_broken_configuration_is_refused_in_words(broken: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(broken))
    assert main(["--from-deepspeed", str(tmp_path / "ds.json")]) == 2
    assert "\x1b" not in capsys.readouterr().err
