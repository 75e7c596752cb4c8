"""`parallel3d-launch`: scripts for any recipe, which the tools that they are meant for take."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallel3d.tools.launch.command import main
from parallel3d.tools.launch.script import LAUNCHERS

Said = pytest.CaptureFixture[str]
GPUS = (
    "quickstart train.device=auto parallel.tp=4 parallel.dp_shard=2 model.kv_heads=4 model.heads=8 "
    "--gpus-per-node 8"
)


def printed(arguments: str, capsys: Said) -> str:
    assert main(shlex.split(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "where",
    ["quickstart parallel.pp=1 parallel.tp=1 parallel.dp_shard=1", f"{GPUS} --check-first"],
)
@pytest.mark.parametrize("kind", ["torchrun", "slurm", "torchx"])
def test_the_scripts_pass_shellcheck(kind: str, where: str, tmp_path: Path, capsys: Said) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    if kind == "torchx":
        where = where.removesuffix(" --check-first")  # it starts one program in a job
    site = "--partition gpu --account me --time 24:00:00" if kind == "slurm" else ""
    script = tmp_path / "script"
    script.write_text(printed(f"{kind} {where} {site}", capsys))
    checked = subprocess.run(["shellcheck", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0
    assert checked.stdout == ""


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_settings_of_gpus_have_their_reasons_and_a_run_on_cpus_has_none(
    kind: str, capsys: Said
) -> None:
    with_gpus = printed(f"{kind} {GPUS}", capsys)
    without = printed(f"{kind} quickstart train.device=cpu", capsys)
    for setting in ("TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}", "NCCL_DEBUG=$"):
        assert setting in with_gpus
        assert setting not in without
    assert kind == "k8s" or "# NCCL flight recorder" in with_gpus
    asked = {
        "slurm": "#SBATCH --gpus-per-node=8",
        "torchx": "--gpu 8",
        "k8s": "nvidia.com/gpu: 8",
        "torchrun": "",
    }
    assert asked[kind] in with_gpus
    assert not asked[kind] or asked[kind] not in without
    assert "{{" not in with_gpus + without


@pytest.mark.parametrize(
    "where", [GPUS, "quickstart parallel.pp=1 parallel.tp=1 parallel.dp_shard=1"]
)
def test_kubernetes_takes_the_manifest_and_the_recipe_in_it_is_the_resolved_one(
    where: str, capsys: Said
) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="needs Kubernetes' schemas: pip install kubernetes-validate"
    )
    text = printed(
        f"k8s {where} train.steps=7 --image registry/image:1 --claim runs --restarts 3", capsys
    )
    parts: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    for part in parts:
        kubernetes_validate.validate(part, "1.31", strict=True)
    config, service, job = parts
    recipe = yaml.safe_load(config["data"]["recipe.yaml"])
    spec = job["spec"]
    assert recipe["train"]["steps"] == 7
    assert recipe["checkpoint"]["resume"] == "none"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["backoffLimit"] == 3 * spec["completions"]
    (container,) = spec["template"]["spec"]["containers"]
    syntax = subprocess.run(
        ["bash", "-n", "-c", container["args"][0]],
        capture_output=True,
        text=True,
    )
    assert syntax.returncode == 0
    assert syntax.stderr == ""
    assert container["image"] == "registry/image:1"
    assert "/recipe/recipe.yaml checkpoint.resume=auto" in container["args"][0]


QUICK = ["quickstart", "data.source=text", "data.path=c"]


@pytest.mark.parametrize(
    "words, said",
    [
        (["pbs", "quickstart"], "pbs: no such command; known are torchrun, slurm"),
        (["slurm"], "RECIPE: required; try parallel3d-launch slurm quickstart"),
        (
            ["slurm", *QUICK, "--gpus-per-node", "3"],
            "must divide the number of workers of the layout, pp 2 x",
        ),
        (["slurm", *QUICK, "parallel.tp=5"], "parallel.tp = 5"),
        (["torchrun", *QUICK, "--partition", "gpu"], "unrecognized arguments: --partition gpu"),
        # what a script cannot hold
        (["slurm", *QUICK, "--partition", "gpu\ntouch /tmp/x"], "--partition "),
        (["slurm", *QUICK, "--account", "me\n#SBATCH --wrap=ls"], "--account "),
        (["slurm", *QUICK, "--time", "1 #"], "--time "),
        (["k8s", *QUICK, "--image", "image\n   securityContext: {privileged: true}"], "--image "),
        (["k8s", *QUICK, "--claim", "a\nb"], "--claim "),
        # what pods do not mount
        (["k8s", *QUICK, "run_dir=/scratch/run"], "run_dir = /scratch/run: must be in /work"),
        (["k8s", *QUICK, "data.path=~/corpus"], "/corpus: must be in /work"),
        (
            ["k8s", *QUICK, "data.path=null", "data.sources=[{path: /x, weight: 1}]"],
            "path = /x: must",
        ),
        (["k8s", *QUICK, "checkpoint.start_from=/model"], "start_from = /model: must be in /work"),
    ],
)
def test_a_mistake_is_a_line_and_status_2(words: list[str], said: str, capsys: Said) -> None:
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert said in error
    assert not out
    assert error.count("\n") == 1


def test_what_a_launcher_cannot_mend_is_a_warning(capsys: Said) -> None:
    printed("torchrun quickstart", capsys)
    assert main(shlex.split("torchrun quickstart --gpus-per-node 1 checkpoint.every=null")) == 0
    said = capsys.readouterr().err
    assert "parallel.tp = 2: does not divide the 1 workers of a node" in said
    assert "checkpoint.every is not set, so a restart starts from step 0" in said


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_the_kill_comes_after_the_last_save_may_have_taken_its_time(
    kind: str, capsys: Said
) -> None:
    asks = "#SBATCH --signal=TERM@{}\n" if kind == "slurm" else "PET_SHUTDOWN_TIMEOUT={}\n"
    assert asks.format(120) in printed(f"{kind} quickstart", capsys)
    text = printed(f"{kind} quickstart checkpoint.grace_s=299.5", capsys)
    assert asks.format(320) in text
    assert kind != "k8s" or "terminationGracePeriodSeconds: 350 " in text
