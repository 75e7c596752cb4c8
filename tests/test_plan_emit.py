"""What a plan writes: recipes that the trainer takes as they are, and launch scripts that shells and YAML take."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from parallel3d.config.load import load_recipe
from parallel3d.config.recipe import Recipe, RopeScaling
from parallel3d.models import shape_cards
from parallel3d.recipes import pretrain
from parallel3d.tools.launch.script import LAUNCHERS
from parallel3d.tools.plan import command as plan

Said = pytest.CaptureFixture[str]
TINY = "--layers 4 --hidden 64 --heads 4 --vocab 300 --gpu cpu --gpus 4 --seq-len 64 --global-batch 8 --precision fp32"
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
        SMALL,
        f"{SMALL} --tokens 300B --fix dp_replicate=4,tp=2",
        "--model llama1-7b --gpu h100 --gpus 16 --seq-len 2048 --global-batch 128 --fix pp=2,vpp=4",
        "--model quickstart --gpu cpu --gpus 4",
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


def test_a_short_emitted_run_saves_and_evaluates_before_its_end(capsys: Said) -> None:
    """100 steps of a few milliseconds: an hour would be longer than the run."""
    recipe = emit(f"{TINY} --tokens 51200", capsys)
    assert recipe.train.steps == 100
    assert recipe.checkpoint.every == recipe.train.eval_every == 25


def test_an_emitted_recipe_evaluates_on_sequences_that_divide_over_its_data_ranks(capsys: Said) -> None:
    recipe = emit(
        f"{TINY.replace('--global-batch 8', '--global-batch 96')} --tokens 1M --fix dp_shard=4,mbs=24", capsys
    )
    assert recipe.train.eval_sequences == 96


def test_its_comments_say_why(capsys: Said) -> None:
    emit(f"{SMALL} --fix tp=2,pp=2", capsys)
    text = Path("plan.yaml").read_text()
    assert "  pp: 2                             # its bubble takes" in text
    assert "  tp: 2                             # within a node of 8; its traffic takes" in text
    assert "# llama3.2-1b on 16 x A100-80GB-SXM: planned by parallel3d-plan" in text


def test_a_card_keeps_what_the_shape_does_not_say(capsys: Said) -> None:
    recipe = emit(SMALL, capsys)
    assert (recipe.model.name, recipe.model.rope_theta, recipe.model.tied_embeddings) == ("llama3.2-1b", 500000.0, True)


def test_a_config_json_keeps_its_rotary_base_and_its_vocabulary(capsys: Said) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "intermediate_size": 512,
        "vocab_size": 1001,
        "rope_theta": 12345.0,
        "rms_norm_eps": 1e-6,
    }
    Path("config.json").write_text(json.dumps(config))
    recipe = emit("--model config.json --gpu cpu --gpus 4 --seq-len 64 --global-batch 8 --fix tp=4", capsys)
    assert (recipe.model.rope_theta, recipe.model.norm_eps, recipe.model.vocab) == (12345.0, 1e-6, 1001)


def test_a_config_json_keeps_its_window_and_its_long_context_and_what_is_left_out_is_said(capsys: Said) -> None:
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
    assert (model.window, model.head_dim, model.rope_theta) == (32, 64, 10_000.0)
    assert model.rope_scaling == RopeScaling(type="yarn", factor=4.0, original_max_positions=128)
    assert plan.main(asked.split()) == 0
    assert "rope_scaling's mscale of config.json is left out" in capsys.readouterr().out
    linear = {**config, "model_type": "qwen2", "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    Path("config.json").write_text(json.dumps(linear))  # Qwen 2 names a window, unused
    assert plan.main(asked.split()) == 0
    assert "rope_scaling (linear) of config.json is left out" in capsys.readouterr().out
    assert emit(asked, capsys).model.window is None


def test_a_token_budget_is_steps_and_checkpoints(capsys: Said) -> None:
    recipe = emit(f"{SMALL} --tokens 1B", capsys)
    assert recipe.train.steps == -(-(10**9) // (64 * 2048))
    assert recipe.checkpoint.every and recipe.optimizer.warmup_steps


def test_ones_own_recipe_keeps_its_other_sections(capsys: Said) -> None:
    recipe = emit("--model quickstart --gpu cpu --gpus 2 --seq-len 64", capsys)
    mine = load_recipe(pretrain.find_recipe("quickstart"), cards=shape_cards())
    assert recipe.optimizer == mine.optimizer and recipe.checkpoint == mine.checkpoint
    assert (recipe.train.steps, recipe.train.seq_len, recipe.parallel.world_size) == (mine.train.steps, 64, 2)


@pytest.mark.parametrize(
    ("model", "said"),
    [("gpt2", ("gpt", 1024, False)), ("qwen2.5-0.5b", ("llama", None, True)), ("llama1-7b", ("llama", None, False))],
)
def test_every_card_is_written_with_what_makes_its_model(
    model: str, said: tuple[str, int | None, bool], capsys: Said
) -> None:
    recipe = emit(f"--model {model} --gpu h100 --gpus 8 --seq-len 1024 --global-batch 64", capsys)
    assert (recipe.model.architecture, recipe.model.max_positions, recipe.model.qkv_bias) == said
    assert recipe.model.name == model


def test_a_model_that_the_trainer_lacks_is_planned_and_not_written(capsys: Said) -> None:
    model = "nemotron4-15b"
    arguments = f"--model {model} --gpu h100 --gpus 64 --seq-len 1024 --global-batch 512"
    assert plan.main(shlex.split(arguments)) == 0
    assert plan.main(shlex.split(f"{arguments} --emit-recipe plan.yaml")) == 2
    told = "the trainer has no module for nemotron4-15b (squared ReLU between LayerNorms), only for Llamas and GPTs"
    assert told in capsys.readouterr().err
    assert not Path("plan.yaml").exists()


@pytest.mark.parametrize("kind", LAUNCHERS)
@pytest.mark.parametrize("gpus", [4, 16])
def test_launch_scripts_are_well_formed(kind: str, gpus: int, capsys: Said) -> None:
    arguments = f"{SMALL} --gpus {gpus} --emit-recipe 'my plan.yaml' --emit-launch {kind} out"
    assert plan.main(shlex.split(arguments)) == 0
    assert "out" in capsys.readouterr().out.splitlines()[-1]
    text = Path("out").read_text()
    assert "$$" not in text and "{{" not in text
    if kind == "k8s":
        recipe, service, job = yaml.safe_load_all(text)
        assert "recipe.yaml" in recipe["data"]
        assert (service["kind"], job["spec"]["completions"]) == ("Service", max(1, gpus // 8))
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == min(gpus, 8)
    else:
        assert subprocess.run(["bash", "-n", "out"], capture_output=True).stderr == b""


def fake(name: str, script: str) -> None:
    folder = Path("bin")
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (folder / name).chmod(0o755)


def with_fakes(**variables: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path('bin').resolve()}:{os.environ['PATH']}", **variables}


@pytest.mark.parametrize(
    ("status", "again"), [(0, False), (2, False), (65, False), (75, True), (137, True), (143, True)]
)
def test_the_slurm_job_starts_a_task_a_gpu_and_asks_again_where_it_helps(
    status: int, again: bool, capsys: Said
) -> None:
    assert plan.main(shlex.split(f"{SMALL} --emit-recipe plan.yaml --emit-launch slurm")) == 0
    fake("srun", f'echo "$MASTER_ADDR $MASTER_PORT $*" > srun.log; exit {status}')
    fake("scontrol", 'if [ "$1" = show ]; then printf "node-1\\nnode-2\\n"; else echo "$*" >> requeued; fi')
    environment = with_fakes(SLURM_JOB_NODELIST="node-[1-2]", SLURM_JOB_ID="7")
    done = subprocess.run(["bash", "job.sbatch", "train.steps=3"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, "")
    started = Path("srun.log").read_text()
    assert started.startswith("node-1 29500 ") and "plan.yaml checkpoint.resume=auto train.steps=3" in started
    assert Path("requeued").exists() is again
    text = Path("job.sbatch").read_text()
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --ntasks-per-node=8\n" in text


@pytest.mark.parametrize(("gpus", "meets"), [(8, "--standalone"), (16, "--nnodes 2 --rdzv-backend c10d")])
def test_torchrun_is_told_how_the_nodes_meet(gpus: int, meets: str, capsys: Said) -> None:
    assert plan.main(shlex.split(f"{SMALL} --gpus {gpus} --emit-recipe plan.yaml --emit-launch torchrun")) == 0
    fake("torchrun", 'echo "$*"')
    done = subprocess.run(["bash", "launch.sh"], env=with_fakes(HEAD="node-1"), capture_output=True, text=True)
    assert done.stdout.startswith(meets)
    assert done.stdout.endswith("--nproc-per-node 8 -m parallel3d.recipes.pretrain plan.yaml checkpoint.resume=auto\n")


def test_two_jobs_of_one_script_have_different_rendezvous_ids(capsys: Said) -> None:
    """By an equal id one would join the other."""
    assert plan.main(shlex.split(f"{SMALL} --gpus 16 --emit-recipe plan.yaml --emit-launch torchrun")) == 0
    fake("torchrun", 'echo "$*"')
    found = set()
    for job in ({"JOB_ID": "a"}, {"JOB_ID": "b"}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8"}):
        command = ["bash", "launch.sh"]
        said = subprocess.run(command, env=with_fakes(HEAD="node-1", **job), capture_output=True, text=True).stdout
        found.add(said.partition("--rdzv-id ")[2].split()[0])
    assert len(found) == 4


def test_a_recipe_has_what_differs_from_the_defaults_and_in_full_every_key(capsys: Said) -> None:
    short = emit(f"{SMALL} --tokens 300B", capsys)
    text = Path("plan.yaml").read_text()
    assert "weight_decay" not in text and "loss_scale" not in text and len(text.splitlines()) < 45
    assert "the data is a stand-in" in text.splitlines()[2].lower()
    full = emit(f"{SMALL} --tokens 300B --full", capsys)
    assert full == short and "weight_decay: 0.1" in Path("plan.yaml").read_text()


def test_a_page_says_that_its_recipe_has_a_stand_in_for_data(tmp_path: Path, capsys: Said) -> None:
    assert plan.main(shlex.split(f"{TINY} --emit-recipe plan.yaml")) == 0
    *_, before, last = capsys.readouterr().out.splitlines()
    assert before == "next      # set data: in plan.yaml to your corpus; its stand-in is Python's own source"
    assert last == "next      parallel3d-train plan.yaml --print-config"
    own = Path("plan.yaml").read_text().replace("source: stdlib ", "source: tokens\n  path: data/mine\n  #")
    Path("own.yaml").write_text(own)
    assert plan.main(shlex.split("--model own.yaml --gpu cpu --emit-recipe again.yaml")) == 0
    assert "stand-in" not in capsys.readouterr().out + Path("again.yaml").read_text()


@pytest.mark.parametrize(
    "words",
    [
        f"{TINY} --emit-recipe mine",
        f"{TINY} --emit-recipe new.yaml --emit-launch slurm mine",
        f"{TINY} --emit-recipe new.yaml --html mine",
        f"{TINY} --emit-recipe . --emit-launch slurm",
        "timeline --schedule 1f1b --pp 2 --microbatches 2 --csv new.csv --svg mine",
    ],
)
def test_no_output_replaces_a_file_or_is_written_without_the_others(words: str, capsys: Said) -> None:
    Path("mine").write_text("mine")
    assert plan.main(shlex.split(words)) == 2
    assert capsys.readouterr().err.startswith("error: --")
    assert [path.read_text() for path in Path().iterdir()] == ["mine"]
