"""What a plan writes: recipes that the trainer takes as they are, and launch scripts that shells
and YAML take."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe, RopeScaling
from parallel3d.models import shape_cards
from parallel3d.recipes import named_recipe, pretrain
from parallel3d.tools.launch.script import LAUNCHERS
from parallel3d.tools.plan import command as plan

Said = pytest.CaptureFixture[str]
TINY = (
    "--layers 4 --hidden 64 --heads 4 --vocab 300 --gpu cpu --gpus 4 --seq-len 64 --global-batch 8 "
    "--precision fp32"
)
SMALL = "--model llama3.2-1b --gpu a100 --gpus 16 --seq-len 2048 --global-batch 64"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def emit(arguments: str, capsys: Said) -> Recipe:
    Path("plan.yaml").unlink(missing_ok=True)
    assert plan.main(shlex.split(f"{arguments} --emit-recipe plan.yaml")) == 0
    capsys.readouterr()
    return load_recipe(Path("plan.yaml"), cards=shape_cards())


@pytest.mark.parametrize(
    "arguments",
    [
        TINY,
        f"{TINY} --fix tp=2,pp=2 recompute=full",
        f"{TINY} --fix pp=4,schedule=zb_h1",
        f"{TINY} --fix cp=2",
        SMALL,
        f"{SMALL} --tokens 300B --fix dp_replicate=4,tp=2",
        "--model llama1-7b --gpu h100 --gpus 16 --seq-len 2048 --global-batch 128 --fix pp=2,vpp=4",
        "--model quickstart --gpu cpu --gpus 4 --optimizer-bits 16",
        f"{SMALL} --precision bf16_pure --optimizer-bits 32",
        "--model qwen3-30b-a3b --gpu h100 --gpus 16 --seq-len 4096 --global-batch 64 --fix ep=4",
    ],
)
def test_the_trainer_takes_an_emitted_recipe_as_it_is(arguments: str, capsys: Said) -> None:
    recipe = emit(arguments, capsys)
    assert plan.main(shlex.split(f"{arguments} --json")) == 0
    best = json.loads(capsys.readouterr().out)["strategies"][0]
    strategy = replace(recipe.parallel, sharding=recipe.parallel.strategy)
    assert best["parallel"].items() <= vars(strategy).items()
    assert pretrain.main(["plan.yaml", "--print-config"]) == 0
    assert "error" not in capsys.readouterr().err


def test_a_config_json_keeps_its_window_and_its_long_context_and_what_is_left_out_is_said(
    capsys: Said,
) -> None:
    config = {
        "model_type": "mistral",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "sliding_window": 32,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7},
    }
    asked = "--model config.json --gpu cpu --gpus 4 --seq-len 64 --global-batch 8"
    Path("config.json").write_text(json.dumps(config))
    model = emit(asked, capsys).model
    assert model.window == 32
    assert model.head_dim == 64
    assert model.rope_theta == 10_000.0
    assert model.rope_scaling == RopeScaling(type="yarn", factor=4.0, original_max_positions=128)
    assert plan.main(asked.split()) == 0
    assert "rope_scaling.mscale = " in capsys.readouterr().out
    linear = {
        **config,
        "model_type": "qwen2",
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    Path("config.json").write_text(json.dumps(linear))  # Qwen 2 names a window, unused
    assert plan.main(asked.split()) == 0
    assert "rope_scaling = linear of config.json is ignored" in capsys.readouterr().out
    assert emit(asked, capsys).model.window is None


def test_a_token_budget_is_steps_and_checkpoints(capsys: Said) -> None:
    recipe = emit(f"{SMALL} --tokens 1B", capsys)
    assert recipe.train.steps == -(-(10**9) // (64 * 2048))
    assert recipe.checkpoint.every
    assert recipe.optimizer.warmup_steps


def test_ones_own_recipe_keeps_its_other_sections(capsys: Said) -> None:
    recipe = emit("--model quickstart --gpu cpu --gpus 2 --seq-len 64", capsys)
    mine = named_recipe("quickstart")
    assert recipe.optimizer == mine.optimizer
    assert recipe.checkpoint == mine.checkpoint
    assert recipe.train.steps == mine.train.steps
    assert recipe.train.seq_len == 64
    assert recipe.parallel.world_size == 2


def test_a_model_that_the_trainer_lacks_is_planned_and_not_written(capsys: Said) -> None:
    model = "nemotron4-15b"
    arguments = f"--model {model} --gpu h100 --gpus 64 --seq-len 1024 --global-batch 512"
    assert plan.main(shlex.split(arguments)) == 0
    assert plan.main(shlex.split(f"{arguments} --emit-recipe plan.yaml")) == 2
    told = (
        "the trainer has no module for nemotron4-15b (squared ReLU between LayerNorms), only for "
        "Llama and GPT models"
    )
    assert told in capsys.readouterr().err
    assert not Path("plan.yaml").exists()


@pytest.mark.parametrize("kind", LAUNCHERS)
@pytest.mark.parametrize("gpus", [4, 16])
def test_launch_scripts_are_well_formed(kind: str, gpus: int, capsys: Said) -> None:
    arguments = f"{SMALL} --gpus {gpus} --emit-recipe 'my plan.yaml' --emit-launch {kind} out"
    assert plan.main(shlex.split(arguments)) == 0
    assert "out" in capsys.readouterr().out.splitlines()[-1]
    text = Path("out").read_text()
    assert "$$" not in text
    assert "{{" not in text
    if kind == "k8s":
        recipe, service, job = yaml.safe_load_all(text)
        assert "recipe.yaml" in recipe["data"]
        assert service["kind"] == "Service"
        assert job["spec"]["completions"] == max(1, gpus // 8)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == min(gpus, 8)
    else:
        assert subprocess.run(["bash", "-n", "out"], capture_output=True).stderr == b""


def test_a_recipe_has_what_differs_from_the_defaults(capsys: Said) -> None:
    emit(f"{SMALL} --tokens 300B", capsys)
    text = Path("plan.yaml").read_text()
    assert "weight_decay" not in text
    assert "loss_scale" not in text
    assert len(text.splitlines()) < 45
    assert "the data is a stand-in" in text.splitlines()[1].lower()


@pytest.mark.parametrize(
    "words",
    [
        f"{TINY} --emit-recipe mine",
        f"{TINY} --emit-recipe new.yaml --emit-launch slurm mine",
        f"{TINY} --emit-recipe . --emit-launch slurm",
        "timeline --schedule 1f1b --pp 2 --microbatches 2 --csv new.csv --svg mine",
    ],
)
def test_no_output_replaces_a_file_or_is_written_without_the_others(
    words: str, capsys: Said
) -> None:
    Path("mine").write_text("mine")
    assert plan.main(shlex.split(words)) == 2
    assert capsys.readouterr().err.startswith("error: --")
    assert [path.read_text() for path in Path().iterdir()] == ["mine"]


def command(arguments: str, capsys: Said) -> dict[str, str]:
    """Returns the options of another framework's command, with their values."""
    assert plan.main(shlex.split(f"{arguments} --gpu h100 --emit-command --json")) == 0
    (text,) = json.loads(capsys.readouterr().out)["next"]
    lines = [shlex.split(line.removesuffix("\\")) for line in text.splitlines()[1:]]
    return {words[0]: " ".join(words[1:]) for words in lines}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "--model mixtral-8x7b --fix tp=2,pp=2,cp=2 virtual_stages=4 ep=8 recompute=none",
            {
                "--num-virtual-stages-per-pipeline-rank": "4",
                "--num-query-groups": "8",
                "--moe-layer-freq": "([0]*0+[1]*32)",
                "--expert-model-parallel-size": "8",
                "--swiglu": "",
            },
        ),
        (
            "--model deepseek-v3 --fix tp=1,cp=1,pp=4,virtual_stages=1 recompute_every=2",
            {
                "--pipeline-model-parallel-layout": "Et*15|t*16|t*15|t*15L",
                "--q-lora-rank": "1536",
                "--moe-layer-freq": "([0]*3+[1]*58)",
                "--moe-router-score-function": "sigmoid",
                "--recompute-num-layers": "8",
            },
        ),
    ],
)
def test_the_command_of_megatron_core_has_the_layout_and_the_shape(
    arguments: str, expected: dict[str, str], capsys: Said
) -> None:
    rest = "--gpus 256 --gpu-memory 900GB --seq-len 4096 --global-batch 1024"
    told = command(f"{arguments} {rest} --framework megatron-core", capsys)
    assert expected.items() <= told.items()
    assert int(told["--nnodes"]) * int(told["--nproc-per-node"]) == 256
    assert "--group-query-attention" not in told or "--multi-latent-attention" not in told


def test_the_command_of_torchtitan_changes_the_configuration_of_the_same_shape(
    capsys: Said,
) -> None:
    rest = "--gpus 16 --seq-len 8192 --global-batch 64 --framework torchtitan"
    told = command(f"--model llama3-8b {rest} --fix pp=2,tp=1,cp=1 vpp=2 recompute=full", capsys)
    assert told["--config"] == "llama3_8b"
    assert told["--parallelism.pipeline_parallel_layers_per_stage"] == "8"
    microbatches = int(told["--parallelism.num_pp_microbatches"])
    tokens = int(told["--training.num_tokens_per_microbatch_per_dp_rank"])
    assert 8 * microbatches * tokens == 64 * 8192
    assert [*told][-1] == "activation-checkpoint:full"
    assert command(f"--model llama1-7b {rest} --fix recompute=none", capsys)["--module"] == "MODULE"
