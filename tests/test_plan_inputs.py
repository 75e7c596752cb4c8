"""What the plan commands are told: units, models, layouts; and what they refuse, in one line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel3d.planner.model.parameters import total_parameters
from parallel3d.tools.aliases.layout import read_layout, read_parallel
from parallel3d.tools.arguments import (
    HARDWARE,
    bytes_per_s,
    dollars,
    fraction,
    memory_bytes,
    tokens,
)
from parallel3d.tools.plan import command as plan
from parallel3d.tools.plan.models import read_model
from tests.plan_json import Said, error_line

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "rope_theta": 500000.0,
}
ON = "--gpu h100 --gpus 16 --seq-len 4096 --global-batch 128"
ASKED = f"--model llama3-8b {ON}"
BATCH = "--gpus 8 --seq-len 512 --global-batch 8"

BAD_INPUTS = [
    (
        f"--model llama3-8b --gpu h100,a100 {BATCH} --emit-command",
        "--emit-command: needs a single device",
    ),
    (f"{ASKED} --precision fp7", "--precision: invalid choice: 'fp7' (choose from"),
    (f"{ASKED} --precision fp8 --verify", "supports neither fp8 nor 8-bit optimizer states"),
    (
        f"{ASKED} --optimizer-bits 8 --emit-recipe x.yaml",
        "supports neither fp8 nor 8-bit optimizer states",
    ),
    (
        f"--model llama3-8b --gpu a100 {BATCH} --precision fp8",
        "--precision fp8: A100-80GB-SXM does not support fp8 matmuls; try --precision bf16",
    ),
    (f"{ASKED} --mtbf -3", "--mtbf: '-3' must be hours, above 0 and finite"),
    (f"--model llama3-8b --gpu h100,zorg {BATCH}", "hardware zorg: unknown"),
    (
        f"--model llama3-8b --gpu h100,a100 {BATCH} --emit-recipe x.yaml",
        "--emit-recipe: needs a single device",
    ),
    (ON, "--model: required; try --model llama3-8b"),
    (f"--model llama3-9b {ON}", "--model llama3-9b: unknown; did you mean llama3-8b"),
    (f"--model llama3-8b --gpu h1000 {BATCH}", "hardware h1000: unknown; did you mean h100-80gb"),
    (
        f"--model llama3-8b {BATCH}",
        "--gpu, --hardware: give exactly one of them, for example --gpu",
    ),
    (f"--model llama3-8b --hardware x.yaml {BATCH}", "hardware x.yaml: cannot be read"),
    (
        f"--model llama3-8b --hardware negative.yaml {BATCH}",
        "device.memory_gib = -4: must be above 0; try 1",
    ),
    (
        f"--model llama3-8b --hardware typo.yaml {BATCH}",
        "device.memory_gb: unknown key; did you mean device.memory_gib?",
    ),
    (
        f"--model llama3-8b --hardware less.yaml {BATCH}",
        "less.yaml: device.memory_gib: required but not set",
    ),
    (f"--model llama3-8b --hardware open.yaml {BATCH}", "hardware open.yaml:2: not valid YAML"),
    (f"--model llama3-8b --cluster nowhere.yaml {BATCH}", "hardware h9000: unknown; did you mean"),
    (
        f"--model llama3-8b --hardware share.yaml {BATCH}",
        "efficiency = 50: must be at most 1; try 1",
    ),
    ("--model llama3-8b --gpu h100 --gpus 0", "--gpus: '0' must be an integer of at least 1"),
    ("--model llama3-8b --gpu h100", "--gpus, --seq-len, --global-batch: required; try --gpus 64"),
    (f"--model gpt2 {ON}", "--seq-len 4096: must not exceed the positions of gpt2; try 1024"),
    (
        "--model llama3-8b --gpu h100 --gpus 37 --seq-len 512 --global-batch 8",
        "no layout of 37 devices divides",
    ),
    (
        f"{ASKED} --fix tp=7",
        "parallel.tp = 7: must divide model.heads = 32 and model.kv_heads = 8; try 1, 2, 4 or 8",
    ),
    (f"{ASKED} --fix pp=64", "parallel.pp = 64: 64 stages (parallel.virtual_stages = 1) need"),
    (f"{ASKED} --fix tp=8 --max-tp 4", "with tp = 8, max_tp = 4; try"),
    (f"{ASKED} --fix dp_shard=3", "dp_shard = 3: must divide gpus = 16; try --gpus 18"),
    (
        f"{ASKED} --fix schedule=1f1b --schedule gpipe",
        "--schedule gpipe: contradicts --fix schedule=1f1b",
    ),
    (
        f"{ASKED} --emit-recipe p.yaml --emit-launch slurm a --emit-launch k8s b",
        "--emit-launch slurm a k8s b: must be",
    ),
    (
        f"{ASKED} --fix tpp=8",
        "--fix tpp=8: not a key of the layout with its value, such as tp=8; did you mean tp?",
    ),
    (
        f"{ASKED} --framework eager --fix cp=8",
        "cp = 8: eager has no such axis; try --framework",
    ),
    (f"--model gemma2.json {ON} --fix cp=8", "cp = 8: parallel3d has no such axis"),
    (
        f"{ASKED} --fix cp=3",
        "train.seq_len = 4096: must be a multiple of 6, because parallel.cp = 3 splits",
    ),
    (
        f"--model deepseek-v3 {ON}",
        "has experts or attention that parallel3d cannot train; try --framework",
    ),
    (f"{ASKED} --fix ep=4", "parallel.ep = 4: only used with model.experts; try parallel.ep=null"),
    (
        f"--model mixtral-8x7b {ON} --fix tp=2,ep=3",
        "parallel.ep = 3: must divide dp_shard x cp x tp = 16 and model.experts.count = 8, and be "
        "a multiple of parallel.tp = 2; try parallel.ep=2, 4 or 8",
    ),
    (
        f"memory --model mixtral-8x7b {ON} --layout dp_shard=4,ep=8",
        "parallel.ep = 8: must divide dp_shard x cp x tp = 4",
    ),
    (f"{ASKED} --imbalance 0.5", "--imbalance: '0.5' must be a ratio of at least 1, such as 1.2"),
    (
        f"{ASKED} --fix dp=8",
        "--fix dp=8: the data-parallel size follows from tp and pp; set dp_shard",
    ),
    (f"{ASKED} --fix tp=8 tp=4", "--fix tp=4: tp is set twice"),
    (f"{ASKED} --fix tp=-1", "--fix tp=-1: must be an integer of at least 1"),
    (f"{ASKED} --fix recompute=some", "--fix recompute=some: must be one of none, selective, full"),
    (f"{ASKED} --schedule 1f1c", "--schedule: invalid choice: '1f1c'"),
    (f"{ASKED} --risk 2", "--risk: '2' must be a probability above 0 and below 1, such as 0.05"),
    ("--model quickstart --gpu cpu --fragmentation 0", "--context-memory: apply to GPUs only"),
    (
        f"{ASKED} --tokens lots",
        "--tokens: 'lots' must be a number of tokens, such as 300B, 2T or 1e12",
    ),
    (
        f"{ASKED} --gpu-memory 80",
        "--gpu-memory: '80' must be an amount of memory with its unit, such as 80GB",
    ),
    (
        f"{ASKED} --network-gb-per-s fast",
        "--network-gb-per-s: 'fast' must be GB/s, such as 50, 50GB/s or 400Gbps",
    ),
    (
        f"{ASKED} --frobnicate",
        "unrecognized arguments: --frobnicate; see parallel3d-plan recommend --help",
    ),
    (f"{ASKED} --layers 3", "--layers: cannot be combined with --model llama3-8b"),
    (
        f"--layers 3 --hidden 100 --heads 7 --vocab 300 {ON}",
        "model.heads = 7: must divide model.hidden = 100; try 1, 2, 5,",
    ),
    (f"--model uneven.json {ON}", "uneven.json: model.heads = 7: must divide model.hidden = 256"),
    (f"--model mixtral.json {ON}", "mixtral.json: no key num_hidden_layers"),
    (
        f"--model layers.json {ON}",
        "layers.json: decoder_sparse_step = 2: all layers after the first ones must have experts",
    ),
    (f"--model bert.json {ON}", "model_type = bert: must be one of"),
    (f"--model text.json {ON}", "text.json: hidden_size = big: must be an integer"),
    (f"--model cut.json {ON}", "cut.json: cannot be read as JSON (Unterminated string"),
    (f"--model heads.json {ON}", "heads.json: head_dim = 0: must be at least 1"),
    (f"--model factor.json {ON}", "factor.json: rope_scaling.factor = big: must be a number"),
    (f"--model folder {ON}", "--model folder: is a folder without config.json"),
    (f"{ASKED} --emit-launch slurm", "--emit-launch: needs a recipe; add --emit-recipe"),
    (f"{ASKED} --emit-command", "or for parallel3d --emit-recipe plan.yaml"),
    (f"{ASKED} --emit-command --framework nemo", "try --framework megatron-core or torchtitan"),
    (
        f"{ASKED} --emit-command --framework torchtitan --fix recompute_every=2",
        "torchtitan has no option for recompute = every_n; try --fix recompute=full",
    ),
    (
        f"{ASKED} --emit-recipe x.yaml --emit-launch pbs",
        "--emit-launch pbs: must be one of torchrun, slurm",
    ),
    (f"{ASKED} --framework megatrn", "--framework megatrn: unknown; did you mean megatron-core"),
    (f"{ASKED} --emit-recipe x.sh --emit-launch torchrun x.sh", "x.sh: is the path of two"),
    (
        "memory --model llama3-8b --gpu h100 --seq-len 512 --global-batch 8 --framework unknown",
        "--layout: required; try --layout tp=8",
    ),
    ("verify", "RECIPE: required; try parallel3d-plan verify quickstart"),
    ("score none.json", "none.json: cannot be read as cases (No such file or directory)"),
    (f"recomend {ASKED}", "recomend: no such command; did you mean recommend?"),
]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("uneven.json").write_text(
        json.dumps({**LLAMA, "num_attention_heads": 7, "num_key_value_heads": 7})
    )
    Path("bert.json").write_text('{"model_type": "bert"}')
    Path("gemma2.json").write_text(json.dumps({**LLAMA, "model_type": "gemma2"}))
    experts = '{"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}'
    Path("mixtral.json").write_text(experts)
    Path("layers.json").write_text('{"model_type": "qwen3_moe", "decoder_sparse_step": 2}')
    Path("text.json").write_text(json.dumps({**LLAMA, "hidden_size": "big"}))
    Path("heads.json").write_text(json.dumps({**LLAMA, "head_dim": 0}))
    yarn = {
        "type": "yarn",
        "factor": "big",
        "original_max_position_embeddings": 64,
    }
    Path("factor.json").write_text(json.dumps({**LLAMA, "rope_scaling": yarn}))
    Path("cut.json").write_text(json.dumps(LLAMA)[:60])
    Path("folder").mkdir()
    cpu = (HARDWARE / "cpu.yaml").read_text()
    Path("typo.yaml").write_text(cpu.replace("memory_gib: 4", "memory_gb: 4"))
    Path("less.yaml").write_text(cpu.replace("  memory_gib: 4", "#"))
    Path("open.yaml").write_text("device: [\n")
    Path("nowhere.yaml").write_text("device: h9000\n")
    Path("negative.yaml").write_text(cpu.replace("memory_gib: 4", "memory_gib: -4"))
    Path("share.yaml").write_text(cpu.replace("efficiency: 0.5 ", "efficiency: 50 "))
    return tmp_path


@pytest.mark.parametrize("arguments, message", BAD_INPUTS)
def test_a_bad_input_is_one_line_and_status_2(
    arguments: str, message: str, files: Path, capsys: Said
) -> None:
    assert plan.main(shlex.split(arguments)) == 2
    assert message in error_line(capsys)


@pytest.mark.parametrize(
    "parse, text, value",
    [
        (tokens, "2T", 2e12),
        (tokens, "300B", 3e11),
        (tokens, "1e12", 1e12),
        (tokens, "1_000_000", 1e6),
        (memory_bytes, "80GB", 80e9),
        (memory_bytes, "75.5 GiB", 75.5 * 2**30),
        (bytes_per_s, "50", 50e9),
        (bytes_per_s, "50GB/s", 50e9),
        (bytes_per_s, "400Gbps", 50e9),
        (bytes_per_s, "400 Gb/s", 50e9),
        (bytes_per_s, "400GBps", 400e9),
        (dollars, "$2.50", 2.5),
        (dollars, "2.5/gpu-h", 2.5),
        (fraction, "0.92", 0.92),
        (fraction, "92%", 0.92),
    ],
)
def test_amounts_are_read_with_their_units(
    parse: Callable[[str], float], text: str, value: float
) -> None:
    assert parse(text) == pytest.approx(value)


def test_a_layout_takes_the_names_of_others() -> None:
    assert read_layout(["tp=8,pp=2", "vpp=4", "mbs=2"], "--fix") == {
        "tp": 8,
        "pp": 2,
        "virtual_stages": 4,
        "microbatch_size": 2,
    }
    parallel = read_parallel(["tp=2,pp=2,vpp=2"], "--layout")
    assert parallel.schedule == "interleaved_1f1b"
    assert parallel.sequence_parallel


def test_a_model_is_a_config_json_its_folder_a_recipe_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    by_file = read_model(str(tmp_path / "config.json"))
    by_folder = read_model(str(tmp_path))
    assert by_file.shape == by_folder.shape
    assert by_file.shape.kv_heads == 4
    assert read_model("quickstart").recipe is not None
    assert read_model("Llama3_8B").shape == read_model("llama3-8b").shape
    assert total_parameters(read_model("gpt2").shape) == 124_439_808


@pytest.mark.parametrize(
    "text",
    [
        "device: " + "[" * 200_000,
        "device: {a: &a [x], peak_tflops: [*a, *a]}",
        f"device: {{memory_gib: 1{'0' * 400}}}",
    ],
)
def test_a_hardware_file_that_is_absurd_is_one_line(
    text: str, tmp_path: Path, capsys: Said
) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    assert plan.main(["hardware", str(tmp_path / "odd.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
